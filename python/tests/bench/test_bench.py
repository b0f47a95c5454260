"""The bench: its arguments, its output, and a short race if there is a GPU."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from flashcore_bench import _bench
from flashcore_bench._problem import Problem

torch = pytest.importorskip("torch")

from flashcore_bench import __main__ as command  # noqa: E402
from flashcore_bench import _first, _peers, _plot, _quantize, _race, _table, _timeline  # noqa: E402

from flashcore_attn import quantize  # noqa: E402


def test_problems_are_parsed():
    assert Problem.parse("1,32/8,1x8192,128,bf16,causal") == Problem(1, 32, 8, 1, 8192, 128, "bf16", "causal")
    assert str(Problem.parse("1,8,512,64,f16")) == "B1 H8 S512 D64 f16"
    assert str(Problem.parse("1,8,2x3,64,f16,causal-top-left")) == "B1 H8 S2x3 D64 f16 causal-top-left"
    windowed = Problem.parse("1,8,512,64,bf16,window:127:inf,softcap:50")
    assert (windowed.window, windowed.softcap, windowed.causal) == ((127, -1), 50.0, False)
    assert str(windowed) == "B1 H8 S512 D64 bf16 window:127:inf softcap 50"
    shape = "1,8,512,64"
    for text in (
        shape, f"{shape},f64", f"{shape},f16,window", f"{shape},f16,window:1", f"{shape},f16,none", "x,8,512,64,f16",
        f"{shape},f16,softcap:0", f"{shape},f16,softcap:nan", f"{shape},f16,softcap:1,causal",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="BATCH,HEADS,SEQ,DIM"):
            Problem.parse(text)


def test_suites_are_those_of_the_rust_program():
    suites = dict(_bench.bench_suites())
    assert list(suites) == ["mission", "small", "forward", "ampere", "windows", "fp8"]
    assert ((1, 8, 8, 512, 512, 64), "f16", "none", None) in suites["mission"]
    for problems in suites.values():
        for extents, dtype, mask, softcap in problems:
            words = f",{mask}" * (mask != "none") + f",softcap:{softcap}" * (softcap is not None)
            batch, heads, kv_heads, seq, _, dim = extents
            stated = Problem.parse(f"{batch},{heads}/{kv_heads},{seq},{dim},{dtype}{words}").stated
            assert stated == (extents, dtype, mask, softcap)


def test_peers_are_chosen_by_name():
    assert [peer.key for peer in _peers.chosen("fa3,sdpa-math")] == ["fa3", "sdpa-math"]
    assert _peers.chosen("none") == [] and len(_peers.chosen(None)) == 9
    with pytest.raises(ValueError, match="invalid value 'triton' for peers: expected sdpa-flash"):
        _peers.chosen("triton")


def test_peers_refuse_what_they_compute_otherwise():
    peers = {peer.key: peer for peer in _peers.PEERS}
    with pytest.raises(NotImplementedError, match="top left"):
        peers["sdpa-flash"].load(Problem.parse("1,8,512x1024,64,f16,causal"))
    assert peers["sdpa-flash"].load(Problem.parse("1,8,512x1024,64,f16,causal-top-left"))
    for rows, keys in [(512, 512), (512, 1024), (1024, 512)]:
        of = [Problem.parse(f"1,8,{rows}x{keys},64,f16{mask}") for mask in ("", ",causal", ",causal-top-left")]
        square = rows == keys
        assert [p.aligned_as("causal") for p in of] == [True, True, square]
        assert [p.aligned_as("causal-top-left") for p in of] == [True, square, True]
    for words in (",window:127:0", ",softcap:30"):
        for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"):
            with pytest.raises(NotImplementedError, match="neither sliding windows nor a softcap"):
                peers[name].load(Problem.parse("1,8,512,64,f16" + words))
    for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"):
        with pytest.raises(NotImplementedError, match="no 8-bit inputs"):
            peers[name].load(Problem.parse("1,8,512,64,e4m3"))
    with pytest.raises(NotImplementedError, match="GB of scores"):
        peers["sdpa-math"].load(Problem.parse("1,32,16384,64,f16"))


def row(name, us, fault=None, ratio=None):
    comparison = {"ratio": ratio, "low": ratio, "high": ratio, "noise": 1.0, "verdict": "FASTER"} if ratio else None
    all_of = {"sdpa-flash": comparison, "fa3": None}
    return {
        "suite": "mission", "impl": name, "mode": "warm", "us_median": us, "us_low": us, "us_high": us, "tflops": 1.0,
        "err_max": 1e-4, "fault": fault,
        "ratio_vs": {"comparison": comparison, "all": all_of} if name == "flashcore" else None,
        "problem": {
            "batch": 1, "heads_q": 8, "heads_kv": 8, "seq_q": 512, "seq_kv": 512, "head_dim": 64, "dtype": "f16",
            "mask": "causal",
        },
    }  # fmt: skip


ROWS = [row("flashcore", 5.0, ratio=2.0), row("sdpa-flash", 10.0), row("fa3", None, "ImportError: no module")]


def test_table_and_summary():
    lines = _table.table(ROWS).splitlines()
    assert "flashcore is faster by" in lines[0]
    assert "2.000 [2.000, 2.000]  FASTER" in lines[3] and "B1 H8 S512 D64 f16 causal" in lines[3]
    assert lines[4].endswith("ImportError: no module")
    assert _table.summary(ROWS) == [
        "mission, warm: 2.000 times as fast as the best peer (geometric mean of 1), "
        "least 2.000 at B1 H8 S512 D64 f16 causal"
    ]


def test_random_problems_are_those_of_their_seed():
    drawn = _bench.random_problems(7, 30)
    assert drawn[:3] == _bench.random_problems(7, 3) and drawn[:3] != _bench.random_problems(8, 3)
    problems = [Problem(*p[0], *p[1:]) for p in drawn]
    assert {p.causal for p in problems} == {True, False} and {p.dtype for p in problems} == {"f16", "bf16"}


def test_the_summary_of_random_problems_lists_the_worst():
    def at(seq, ratio):
        problem = row("flashcore", 5.0, ratio=ratio)
        return problem | {"suite": "random", "problem": problem["problem"] | {"seq_q": seq, "seq_kv": seq}}

    lines = _table.summary([at(seq, 0.5 + seq / 10) for seq in range(12)])
    assert lines[0].startswith("random, warm: 0.98")
    assert lines[1] == "behind the best peer: 5 of 12 (41.7%)"
    assert lines[2] == "  0.500  B1 H8 S0 D64 f16 causal" and len(lines) == 2 + 10


def test_plot_shows_everyone_with_a_time():
    drawing = ElementTree.fromstring(_plot.plot(ROWS))
    titles = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 and "flashcore, B1 H8 S512 D64 f16 causal, warm: 5.00 µs" in titles
    ElementTree.fromstring(_plot.plot([]))


def test_arguments_are_checked(capsys):
    with pytest.raises(SystemExit):
        command.main(["--suite", "huge"])
    with pytest.raises(SystemExit):
        command.main(["--seed", "3"])
    for arguments in (["--problem", "1,2,3"], ["--start", "5"], ["--suite", "random", "--count", "0"]):
        assert command.main(arguments) == 2
    assert "none of the 4 problems" in capsys.readouterr().err


def test_options_that_would_be_ignored_are_refused(capsys):
    for arguments, ignored in (
        (["--suite", "features", "--seed", "3", "--mode", "warm"], "--seed, --mode"),
        (["--suite", "step", "--predict", "2", "--overlapping"], "--overlapping, --predict"),
        (["model", "--device", "1"], "--device"),
        (["quantize", "--suite", "fp8"], "--suite"),
        (["first", "--seconds", "2"], "--seconds"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert f" alone, not with {ignored}" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main([]) == 2
    assert "PyTorch sees no GPU" in capsys.readouterr().err
    assert command.main(["quantize"]) == 2
    assert "quantize is timed on a GPU, and PyTorch sees none" in capsys.readouterr().err
    assert command.main(["first"]) == 2
    assert "first is timed on a GPU, and PyTorch sees none" in capsys.readouterr().err


def test_quantisations_are_timed_beside_a_copy():
    """On a CPU, with small tensors: the rows and the table are those of a GPU."""
    shape, options = (2, 4, 2, 70, 32), _quantize.OPTIONS
    rows = _quantize.rows_of(shape, torch.bfloat16, 0.0, "cpu")
    assert [row["impl"] for row in rows] == ["flashcore"] * len(options) + ["copy"]
    assert all(row["fault"] is None and row["samples"] >= 5 for row in rows)
    assert {row["bytes"] for row in rows} == {3 * 2 * 70 * 32 * (4 + 2 + 2)}
    lines = _quantize.table(rows).splitlines()
    assert len(lines) == 2 + len(rows) and "B2 H4/2 S70 D32 bfloat16, per 64 rows, Hadamard | flashcore" in lines[4]
    inputs = _quantize.tensors(shape, torch.float16, "cpu")
    wrong = quantize(*inputs)._replace(descale_v=torch.ones(2, 2))
    assert "of descale_v differ" in _quantize.fault(inputs, wrong, {})


def test_reasons_are_short_and_name_no_place():
    error = RuntimeError("no library:\n  one of /opt/somebody/lib.so expected")
    assert _race.reason(error) == "RuntimeError: no library: one of expected"
    assert _race.reason(ValueError()) == "ValueError: no reason given"
    assert len(_race.reason(ValueError("a " * 500))) == 300


@pytest.mark.needs_cuda
@pytest.mark.parametrize("text", ["1,2,128,64,f16", "1,4/2,100x300,64,bf16,causal"])
def test_a_short_race(capsys, tmp_path, text):
    plot = tmp_path / "race.svg"
    status = command.main(["--problem", text, "--seconds", "0.05", "--json", "--plot", str(plot)])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * (1 + len(_peers.PEERS)) and {row["mode"] for row in rows} == {"warm", "cold"}
    assert status == 0, [row["fault"] for row in rows if row["impl"] == "flashcore"]
    ours = [row for row in rows if row["impl"] == "flashcore"]
    assert all(row["us_median"] > 0 and row["err_max"] < 0.1 for row in ours)
    assert all(row["us_median"] or row["fault"] for row in rows)
    assert plot.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.needs_cuda
def test_a_peer_that_fails_is_a_row(monkeypatch, capsys):
    def broken(problem):
        raise torch.cuda.OutOfMemoryError("no room")

    def wrong(problem):
        return lambda q, k, v: q * 1.0

    peers = [_peers.Peer("broken", "bhsd", broken, str), _peers.Peer("wrong", "bshd", wrong, str)]
    monkeypatch.setattr(_peers, "PEERS", (*peers, *_peers.PEERS[:1]))
    assert command.main(["--problem", "1,2,128,64,f16", "--seconds", "0.05", "--mode", "warm", "--json"]) == 0
    rows = {row["impl"].split()[0]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert "no room" in rows["broken"]["fault"] and rows["wrong"]["fault"]
    assert rows["sdpa-flash"]["fault"] is None


@pytest.mark.needs_cuda
def test_host_costs(capsys):
    arguments = ["host", "--problem", "1,8,512,64,f16", "--seconds", "0.1", "--json", "--peers", "sdpa-flash"]
    assert command.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["suite"] for row in rows] == ["host"] * 3 and all(row["us_median"] > 0 for row in rows)


def test_first_calls_are_timed_in_processes_of_their_own():
    rows = _first.rows_of("flashcore", "cpu", repeats=1, length=240)
    assert [row["problem"].split(", ")[1] for row in rows] == 2 * ["new", "from the cache on disk", "another parameter"]
    assert all(row["fault"] is None and row["us_median"] > 0 for row in rows), rows
    assert [row["samples"] for row in rows] == 2 * [1, 1, 2]
    assert _first.table(rows).count("\n") == len(rows) + 1
    assert _first.chosen(None) == ["flashcore", "flex"] and _first.chosen("none") == ["flashcore"]
    with pytest.raises(ValueError, match="'fa3'"):
        _first.chosen("fa3")


def test_a_timeline_has_the_work_of_the_last_call():
    def event(name, stream, ts, dur, cat="kernel"):
        return {"name": name, "cat": cat, "ts": ts, "dur": dur, "args": {"stream": stream}}

    call = [("flash_forward", 7, 0, 50), ("Memcpy PtoP", 9, 5, 30), ("put_signal_kernel", 9, 36, 2), ("add", 7, 60, 4)]
    cats = ["kernel", "gpu_memcpy", "kernel", "kernel"]
    events = [event(n, s, t + 100 * i, d, c) for i in range(3) for (n, s, t, d), c in zip(call, cats)]
    events.append({"name": "aten::add", "cat": "cpu_op", "ts": 1, "dur": 9})
    bars = _timeline.bars_of(events, 3)
    assert [(bar.stream, bar.start, bar.us) for bar in bars] == [(7, 0, 50), (9, 5, 30), (9, 36, 2), (7, 60, 4)]
    kinds = [_timeline._KINDS[bar.kind][0] for bar in bars]
    assert kinds == ["attention", "copy to another GPU", "signal", "other kernels"]
    drawn = ElementTree.fromstring(_timeline.timeline(bars, "a < b"))
    told = [x.text for x in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert told[0] == "a < b" and "Memcpy PtoP: 30 µs from 5 µs on" in told and len(told) == 5
