"""The suites of features, shrunk so that a CPU can try them: shapes, arguments, references and rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashcore_bench import __main__, _alternating, _features  # noqa: E402


@pytest.mark.parametrize("suite", __main__.FEATURES)
def test_a_shrunk_suite_runs_and_flashcore_is_right(suite):
    dtype = torch.float32 if suite == "features" else torch.bfloat16
    works = _features.works(suite, "cpu", dtype, 16 if suite == "features" else 64)
    rows = [row for work in works for row in _alternating.race(suite, work, 0.0, "cpu", ["sdpa", "sdpa-math"])]
    ours = [row for row in rows if row["impl"].startswith("flashcore")]
    assert len(ours) >= len(works) and all(row["fault"] is None and row["samples"] >= 5 for row in ours), ours
    peers = [row for row in rows if row["impl"].startswith("sdpa") and row["fault"] is None]
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in peers)
    assert _alternating.table(rows).count("\n") == len(rows) + 1


def test_a_wrong_contestant_is_not_timed():
    work = _features.works("features", "cpu", torch.float32, 16)[0]
    work.calls = {"flashcore": lambda: lambda: torch.zeros_like(work.q)}
    (row,) = _alternating.race("features", work, 0.0, "cpu", None)
    assert row["fault"].startswith("wrong") and "us_median" not in row


def test_every_gpu_suite_is_known_to_the_command():
    assert set(_features.GPU_SUITES) | {"features"} == set(__main__.FEATURES)


@pytest.mark.parametrize("mean", [500, 4000])
def test_uneven_lengths_fill_the_tokens(mean):
    lengths = _features.lengths_of(mean, 32768)
    assert sum(lengths) == 32768 and min(lengths) > 0 and max(lengths) <= 3 * mean and len(set(lengths)) > 5


def test_a_library_that_is_not_installed_has_no_version():
    assert _alternating._versioned("flashinfer-tensor-cores").startswith("flashinfer-tensor-cores")
    assert _alternating._versioned("sdpa-cudnn") == f"sdpa-cudnn {torch.__version__}"
