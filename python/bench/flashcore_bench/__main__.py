"""``python -m flashcore_bench``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashcore_attn._errors import FlashCoreError, invalid

from . import _bench
from ._problem import DRAWN, EXPECTED, ON_CPU, OURS, RANDOM, RANDOM_BACKWARD, Problem
from ._rows import Rows

#: Suites of features other than even lengths: those of ``ON_CPU`` on a CPU, ``decode`` and ``backward`` on a
#: CPU or a GPU, the others on a GPU.
FEATURES = (
    *ON_CPU, "softcap", "sinks", "packed", "documents", "bias", "decode", "backward", RANDOM_BACKWARD, "step", "gpt",
)  # fmt: skip
#: The suite of several GPUs, under ``torchrun``.
PARALLEL = "parallel"

_EPILOG = """\
Times are of one call, in graphs of up to 20 (warm) or one (cold, L2 flushed before). FlashCore's harness launches and
times everybody in turn, on the same values, new ones now and then, and holds the outputs against float64: a wrong or
impossible answer does not count. A ratio above 1 says how many times faster FlashCore was; FASTER, SLOWER or UNDECIDED
is the verdict on it against the noise of FlashCore raced against itself. A causal problem counts half of the FLOP."""


def arguments(suites: list[str]) -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m flashcore_bench",
        description="Races FlashCore against every other attention that imports, in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="race",
        choices=["race", "host", "model", "quantize", "first"],
        help="race kernels, time what a call costs the host, race on the CPU between PyTorch's operations, time the "
        "quantisation to 8 bits beside a copy of as many bytes, or time the first call with a new program",
    )
    parser.add_argument("--suite", action="append", choices=suites, default=[], help="may be repeated; mission if none")
    drawn = ", ".join(DRAWN)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help=f"of the problems of {drawn} (default 1)")
    parser.add_argument("--count", type=int, default=120, metavar="K", help="how many of them (default 120)")
    parser.add_argument("--problem", action="append", default=[], metavar="P", help=EXPECTED)
    parser.add_argument("--mode", choices=["warm", "cold", "both", "sustained"], default="both")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each problem and mode, about (default 1)")
    parser.add_argument(
        "--overlapping",
        action="store_true",
        help="also race FlashCore's launches where each may begin while the one before it ends, if the plan can",
    )
    parser.add_argument("--peers", help="comma-separated names, or none; all that import if not given")
    parser.add_argument("--device", type=int, default=0, help="which GPU (default 0)")
    parser.add_argument("--start", type=int, default=1, metavar="N", help="begin with the Nth problem (default 1)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no further problem after so long")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture (SVG); with --suite parallel of one step"
    )
    parser.add_argument(
        "--predict", type=_ranks, metavar="RANKS", help="with --suite parallel: print the cost model's times for H200s"
    )
    parser.add_argument("--json", action="store_true", help="print rows instead of a table")
    return parser


def _ranks(text: str) -> int:
    ranks = int(text)
    if not 2 <= ranks <= 1024:
        raise argparse.ArgumentTypeError(f"invalid value {ranks}: expected 2 to 1024")
    return ranks


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0 if all contestants raced, 1 if FlashCore failed, 2 if nothing could start."""
    suites = {name: [Problem(*p[0], *p[1:]) for p in problems] for name, problems in _bench.bench_suites()}
    parser = arguments([*suites, RANDOM, *FEATURES, PARALLEL])
    args = parser.parse_args(argv)
    if args.what == "model":
        _only(args, parser, "model", "seconds", "start", "limit", "evidence", "json")
        return _run("_model", "the race is held in PyTorch, and it cannot be imported", args)
    if args.what == "quantize":
        _only(args, parser, "quantize", "seconds", "device", "evidence", "json")
        return _run("_quantize", "the tensors are PyTorch's", args)
    if args.what == "first":
        _only(args, parser, "first", "peers", "device", "evidence", "json")
        return _run("_first", "the tensors are PyTorch's", args)
    if PARALLEL in args.suite:
        return _on_several(args, parser)
    if features := [name for name in args.suite if name in FEATURES]:
        return _of_features(args, parser, features)
    if RANDOM not in args.suite and any(vars(args)[name] != parser.get_default(name) for name in ("seed", "count")):
        parser.error(f"--seed and --count go with --suite {', '.join(DRAWN)}")
    try:
        problems = _problems(args, suites)
        peers = _peers(args)
        session = _session(args)
        rows = Rows(args, session.commit())
    except (ValueError, ImportError, OSError, FlashCoreError) as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    for row in _raced(args, session, problems, peers):
        rows.add(row | {"seed": args.seed} if row["suite"] == RANDOM else row)
    from ._plot import plot
    from ._table import summary, table

    if not args.json:
        print(table(rows.every))
        print(*summary(rows.every), sep="\n")
    if args.plot:
        args.plot.write_text(plot(rows.every), encoding="utf-8")
    return 1 if any(row["impl"].startswith(OURS) and row["fault"] for row in rows.every) else 0


def _only(
    args: argparse.Namespace, parser: argparse.ArgumentParser, what: str, *options: str, also: tuple[str, ...] = ()
) -> None:
    """Rejects options that would be ignored."""
    ignored = [
        f"--{name}"
        for name, value in vars(args).items()
        if name not in (*options, *also, "what") and value != parser.get_default(name)
    ]
    if ignored:
        accepted = ", ".join(f"--{name}" for name in options)
        parser.error(f"{what} goes with {accepted} alone, not with {', '.join(ignored)}")


def _run(module: str, lacking: str, args: argparse.Namespace) -> int:
    """Runs a module of this package whose imports need PyTorch."""
    try:
        run = importlib.import_module(f".{module}", __package__).run
    except ImportError as error:
        print(f"flashcore_bench: {lacking} ({error})", file=sys.stderr)
        return 2
    status: int = run(args)
    return status


def _of_features(args: argparse.Namespace, parser: argparse.ArgumentParser, features: list[str]) -> int:
    if len(features) < len(args.suite) or args.what != "race":
        parser.error(f"--suite {features[0]} goes with race and other suites of features: {', '.join(FEATURES)}")
    drawn = ("seed", "count") if any(name in DRAWN for name in features) else ()
    options = ("seconds", "peers", "device", "start", "limit", "evidence", "json", *drawn)
    _only(args, parser, f"--suite {features[0]}", *options, also=("suite",))
    try:
        _check_draw(args)
    except ValueError as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    return _run("_alternating", "the race is held on PyTorch's tensors", args)


def _on_several(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.suite != [PARALLEL] or args.what != "race":
        parser.error(f"--suite {PARALLEL} goes with race, and with no other suite")
    options = (
        ("predict", "json") if args.predict is not None else ("seconds", "start", "limit", "evidence", "plot", "json")
    )
    _only(args, parser, f"--suite {PARALLEL}", *options, also=("suite",))
    return _run("_parallel", "the ranks are processes of PyTorch", args)


def _check_draw(args: argparse.Namespace) -> None:
    """Rejects numbers of random problems that cannot be drawn."""
    if not 0 <= args.seed < 2**64:
        raise invalid("--seed", args.seed, "a number from 0 to 2^64 - 1")
    if args.count < 1:
        raise invalid("--count", args.count, "1 or more")


def _problems(args: argparse.Namespace, suites: dict[str, list[Problem]]) -> list[tuple[str, Problem]]:
    """The problems asked for, each with the suite that it belongs to."""
    _check_draw(args)
    drawn = [Problem(*p[0], *p[1:]) for p in _bench.random_problems(args.seed, args.count)]
    problems = [(name, problem) for name in args.suite for problem in (drawn if name == RANDOM else suites[name])]
    for text in args.problem:
        problem = Problem.parse(text)
        problems.append((next((name for name, all_of in suites.items() if problem in all_of), "other"), problem))
    if not problems:
        problems = [("mission", problem) for problem in suites["mission"]]
    if not 1 <= args.start <= len(problems):
        raise ValueError(f"--start {args.start} is none of the {len(problems)} problems")
    return problems


def _peers(args: argparse.Namespace) -> list[Any]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"the race is held on PyTorch's tensors, and it cannot be imported ({error})") from error
    if not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU; `python -m flashcore_bench model` races on the CPU")
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        raise ValueError(f"PyTorch {torch.__version__} is too old: it does not hand out the graphs that it captures")
    from ._peers import chosen

    return chosen(args.peers)


def _session(args: argparse.Namespace) -> Any:
    import torch

    torch.cuda.set_device(args.device)
    session = _bench.Session(args.device)
    for missing in session.missing():
        print(f"flashcore_bench: {missing}", file=sys.stderr)
    return session


def _raced(
    args: argparse.Namespace, session: Any, problems: list[tuple[str, Problem]], peers: list[Any]
) -> Iterator[Any]:
    from ._host import host
    from ._race import Run, race

    modes = ["warm", "cold"] if args.mode == "both" else [args.mode]
    began = time.monotonic()
    for index, (suite, problem) in list(enumerate(problems))[args.start - 1 :]:
        if args.limit is not None and time.monotonic() - began > args.limit:
            print(f"flashcore_bench: time is up; --start {index + 1} goes on from here", file=sys.stderr)
            return

        def say(text: str, at: str = f"{index + 1}/{len(problems)} {problem}") -> None:
            print(f"{at}: {text}", file=sys.stderr, flush=True)

        run = Run(session, peers, modes, args.seconds, args.overlapping, args.device, say)
        if args.what == "host":
            yield from host(run, problem)
        else:
            yield from race(run, suite, problem)


if __name__ == "__main__":
    sys.exit(main())
