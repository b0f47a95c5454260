"""The suites of features, shrunk so that a CPU can try them: shapes, arguments, references and rows."""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from flashcore_bench import __main__, _alternating, _features, _gpt, _training  # noqa: E402

from flashcore_attn import flash_attn_func  # noqa: E402
from flashcore_attn.engines import flash_attn_2  # noqa: E402


@pytest.mark.parametrize("suite", __main__.FEATURES)
def test_a_shrunk_suite_runs_and_flashcore_is_right(suite):
    dtype = torch.float32 if suite == "features" else torch.bfloat16
    works = list(_features.works(suite, "cpu", dtype, 16 if suite == "features" else 64, draw=(1, 6)))
    rows = [row for work in works for row in _alternating.race(suite, work, 0.0, "cpu", ["sdpa", "sdpa-math"])]
    ours = [row for row in rows if row["impl"].startswith("flashcore")]
    assert len(ours) >= len(works) and all(row["fault"] is None and row["samples"] >= 5 for row in ours), ours
    peers = [row for row in rows if row["impl"].startswith("sdpa") and row["fault"] is None]
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in peers)
    assert _alternating.table(rows).count("\n") == len(rows) + 1


def test_a_wrong_contestant_is_not_timed():
    work = next(iter(_features.works("features", "cpu", torch.float32, 16)))
    work.calls = {"flashcore": lambda: lambda: torch.zeros_like(work.q)}
    (row,) = _alternating.race("features", work, 0.0, "cpu", None)
    assert row["fault"].startswith("wrong") and "us_median" not in row


def test_every_gpu_suite_is_known_to_the_command():
    assert {*_features.GPU_SUITES, *__main__.ON_CPU, "random-backward"} == set(__main__.FEATURES)


def test_random_backward_problems_are_those_of_the_seed():
    names = [work.name for work in _training.random_works("cpu", 512, 7, 5)]
    assert names == [work.name for work in _training.random_works("cpu", 512, 7, 5)]
    assert len(set(names)) > 1 and names != [work.name for work in _training.random_works("cpu", 512, 8, 5)]
    with pytest.raises(SystemExit):
        __main__.main(["--suite", "step", "--seed", "3"])


def test_random_calls_on_the_cpu_are_those_of_the_seed():
    for suite, rows in (("random-cpu", range(17, 2049)), ("rows-cpu", range(1, 17))):
        first, again, other = ([*_features.works(suite, "cpu", torch.float32, 1, (seed, 8))] for seed in (7, 7, 8))
        assert [work.name for work in first] == [work.name for work in again] != [work.name for work in other]
        assert all(torch.equal(a.q, b.q) and a.q.shape[2] in rows for a, b in zip(first, again))
    assert {work.name.split()[-1] for work in first + other} >= {"mask"}


def test_the_summary_takes_the_best_peer_of_each_problem():
    rows = [{"suite": "random-backward", "problem": "a", "impl": impl, "ratio": ratio}
            for impl, ratio in (("fa4 1", 0.5), ("sdpa-flash", 2.0), ("flashcore-deterministic", 0.1))]  # fmt: skip
    rows += [{"suite": "random-backward", "problem": "b", "impl": "fa4 1", "ratio": 2.0},
             {"suite": "random-backward", "problem": "b", "impl": "flashcore"}]  # fmt: skip
    mean, behind, *worst = _alternating.summary(rows)
    assert "1.000 times" in mean and "geometric mean of 2" in mean and "least 0.500 at a" in mean
    assert behind == "behind the best peer: 1 of 2 (50.0%)" and worst == ["  0.500  a", "  2.000  b"]


@pytest.mark.parametrize("suite", ["step", "gpt"])
def test_the_pair_of_flash_attention_3_and_4_is_right(suite, monkeypatch):
    """Their functions, as FlashCore serves them: what the pair passes on."""

    def backward(q, k, v, out, d_out, lse, causal, softcap=0.0, window_size_left=None, window_size_right=None):
        into = [torch.empty_like(x) for x in (q, k, v)]
        sides = tuple(-1 if side is None else side for side in (window_size_left, window_size_right))
        flash_attn_2._flash_attn_backward(
            d_out, q, k, v, out, lse, *into, 0.0, q.shape[-1] ** -0.5, causal, *sides, softcap, None, False
        )
        return into

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"]._flash_attn_bwd = backward
    for module in (_training, _gpt):
        monkeypatch.setattr(module, "_flash_attention", lambda version, name="flash_attn_func": flash_attn_func)
    works = [work for work in _features.works(suite, "cpu", torch.bfloat16, 128) if "fa3+fa4" in work.calls]
    for work in works[:4] + works[-3:]:
        rows = _alternating.race(suite, work, 0.0, "cpu", ["fa3+fa4", "sdpa-flash"])
        assert {row["impl"] for row in rows} >= {"flashcore", "fa3+fa4"}
        assert all(row["fault"] is None for row in rows), rows
        assert suite != "gpt" or all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize("mean", [500, 4000])
def test_uneven_lengths_fill_the_tokens(mean):
    lengths = _features.lengths_of(mean, 32768)
    assert sum(lengths) == 32768 and min(lengths) > 0 and max(lengths) <= 3 * mean and len(set(lengths)) > 5


def test_a_library_that_is_not_installed_has_no_version():
    assert _alternating._versioned("flashinfer-tensor-cores").startswith("flashinfer-tensor-cores")
    assert _alternating._versioned("sdpa-cudnn") == f"sdpa-cudnn {torch.__version__}"
