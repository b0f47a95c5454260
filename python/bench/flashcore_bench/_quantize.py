"""Times the quantisation of Q, K and V on a GPU beside a copy of as many bytes, which has the memory's bandwidth."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from flashcore_attn import quantize

from . import _bench
from ._alternating import Contestant, interval
from ._problem import OURS
from ._rows import Rows

#: Batch entries, query heads, KV heads, sequence length, head dim. The tensors are larger than any L2.
SHAPES = ((4, 16, 16, 8192, 128), (4, 32, 32, 8192, 64), (4, 32, 8, 8192, 128), (2, 16, 16, 8192, 256))
#: Rows that share a factor, the seed of the rotation, and whether keys are smoothed.
OPTIONS = (
    (None, 1, False), (None, None, False), (64, 1, False), (64, None, False), (64, None, True), (64, 1, True),
)  # fmt: skip

COPY = "copy"


def tensors(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Q, K and V of normal draws."""
    batch, heads, heads_k, length, dim = shape
    torch.manual_seed(0)
    return [torch.randn(batch, length, own, dim, device=device).to(dtype) for own in (heads, heads_k, heads_k)]


def least_bytes(inputs: list[Tensor]) -> int:
    """Bytes that a quantisation must move without smoothing: each input once, and a code for each element."""
    return sum(x.numel() * (x.element_size() + 1) for x in inputs)


def fault(inputs: list[Tensor], quantised: Any, options: dict[str, Any]) -> str | None:
    """Why the result is wrong: the first batch entry differs from that of the CPU."""
    on_cpu = quantize(*(x[:1].cpu() for x in inputs), **options)
    for name, found, expected in zip(on_cpu._fields, quantised, on_cpu):
        same = found[:1].cpu().contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
        if not bool(same.all()):
            return f"wrong: {int((~same).sum())} bytes of {name} differ from those of the CPU"
    return None


def rows_of(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seconds: float, device: str) -> list[Any]:
    """The rows of a shape: FlashCore's with each of the options, then the copy's."""
    inputs = tensors(shape, dtype, device)
    moved = least_bytes(inputs)
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    batch, heads, heads_k, length, dim = shape
    problem = f"B{batch} H{heads}/{heads_k} S{length} D{dim} {str(dtype).removeprefix('torch.')}"
    every: list[tuple[dict[str, Any], Contestant]] = []
    for rows, seed, smooth in OPTIONS:
        options: dict[str, Any] = {"rows": rows, "hadamard": seed, "smooth_keys": smooth}
        words = ("per head" if rows is None else f"per {rows} rows") + (", Hadamard" if seed is not None else "")
        words += ", smoothed keys" if smooth else ""
        wrong = fault(inputs, quantize(*inputs, **options), options)
        call = functools.partial(quantize, *inputs, **options)
        every.append((_row(f"{problem}, {words}", OURS, wrong), Contestant(OURS, call, device)))
    every.append((_row(problem, COPY, None), Contestant(COPY, lambda: target.copy_(source), device)))
    began, order = time.monotonic(), [contestant for _, contestant in every]
    while time.monotonic() - began < seconds or len(order[0].samples) < 5:
        for contestant in order:
            contestant.samples.append(contestant.time())
        order = order[1:] + order[:1]
    copy = every[-1][1]
    for row, contestant in every:
        ordered = sorted(contestant.samples)
        row["us_median"] = statistics.median(ordered)
        row["us_low"], row["us_high"] = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
        row["samples"], row["all_us"] = len(ordered), [round(us, 3) for us in contestant.samples]
        row["bytes"], row["gbps"] = moved, moved / row["us_median"] / 1e3
        if contestant is not copy:
            ratios = [copied / own for copied, own in zip(copy.samples, contestant.samples)]
            row["of_copy"], row["of_copy_low"], row["of_copy_high"] = interval(ratios)
    return [row for row, _ in every]


def _row(problem: str, impl: str, fault: str | None) -> dict[str, Any]:
    return {"suite": "quantize", "problem": problem, "impl": impl, "fault": fault}


def table(rows: list[dict[str, Any]]) -> str:
    """Times, rates, and the share of the copy's rate."""
    lines = ["| problem | impl | µs | GB/s | of the copy's |", "|---|---|---:|---:|---:|"]
    for row in rows:
        share = ""
        if "of_copy" in row:
            share = f"{row['of_copy']:.3f} ({row['of_copy_low']:.3f} to {row['of_copy_high']:.3f})"
        cells = row["problem"], row["impl"], f"{row['us_median']:.1f}", f"{row['gbps']:.0f}", row["fault"] or share
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(args: Any) -> int:
    """0 if all codes and factors were correct, 1 if not, 2 if nothing could start."""
    if not torch.cuda.is_available():
        print("flashcore_bench: quantize is timed on a GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    torch.cuda.set_device(args.device)
    provenance = json.loads(_bench.Session(args.device).provenance())
    try:
        kept = Rows(args, provenance["commit"])
    except (OSError, ValueError) as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    for shape in SHAPES:
        for row in rows_of(shape, torch.bfloat16, args.seconds, "cuda"):
            kept.add(row | provenance)
    if not args.json:
        print(table(kept.every))
    return 1 if any(row["fault"] for row in kept.every) else 0
