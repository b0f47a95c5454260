"""Times attention on the CPU as a model calls it: between other PyTorch operations."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashcore_attn import scaled_dot_product_attention

from . import _bench
from ._race import Row
from ._rows import Rows

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# Rows do not count as evidence if other programs used more than this fraction of the CPU during their race.
MOST_BY_OTHERS = 0.1

Stated = tuple[tuple[int, int, int, int, int, int], str, str, float | None]


class Layer:
    """Layer norm, a linear map, attention, a linear map, GELU. Contestant 0 is FlashCore's attention, 1 PyTorch's."""

    def __init__(self, stated: Stated) -> None:
        (batch, heads, _, rows, _, dim), dtype, self.mask, _ = stated
        self.shape, self.dtype = (batch, heads, rows, dim), DTYPES[dtype]
        hidden = heads * dim
        self.norm = torch.nn.LayerNorm(hidden, dtype=self.dtype)
        self.before = torch.nn.Linear(hidden, 3 * hidden, dtype=self.dtype)
        self.after = torch.nn.Linear(hidden, hidden, dtype=self.dtype)
        self.x = torch.randn(batch, rows, hidden).to(self.dtype)
        self.inputs = [torch.zeros(self.shape, dtype=self.dtype) for _ in range(3)]
        self.calls = (scaled_dot_product_attention, F.scaled_dot_product_attention)
        self.outputs: list[Tensor | None] = [None, None]

    def load(self, *values: bytes) -> None:
        """Writes new values for q, k and v to their addresses."""
        for x, new in zip(self.inputs, values):
            x.copy_(torch.frombuffer(bytearray(new), dtype=self.dtype).view(self.shape))

    def time(self, who: int) -> float:
        """Microseconds of one attention between the layer's other operations."""
        call, (q, k, v), causal = self.calls[who], self.inputs, self.mask != "none"
        with torch.inference_mode():
            self.before(self.norm(self.x))
            start = time.perf_counter_ns()
            out = call(q, k, v, is_causal=causal)
            spent = time.perf_counter_ns() - start
            F.gelu(self.after(out.transpose(1, 2).flatten(2)))
        self.outputs[who] = out
        return spent / 1000

    def forget(self, who: int) -> None:
        """Drops an output, so that only a later call can produce it."""
        self.outputs[who] = None

    def output(self, who: int) -> bytes:
        """The last output, dense as (batch, head, row, dim)."""
        out = self.outputs[who]
        if out is None:
            return b""
        return out.contiguous().view(torch.uint8).numpy().tobytes()


class Load:
    """Measures how much of the CPU other programs use."""

    def __init__(self) -> None:
        self.busy, self.own, self.wall = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        times = os.times()
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy, times.user + times.system, time.monotonic()

    def of_others(self) -> float:
        """The fraction of all cores since this object was made, time given to other virtual machines included."""
        busy, own, wall = self._now()
        others = (busy - self.busy) - (own - self.own)
        return max(others, 0.0) / max((wall - self.wall) * (os.cpu_count() or 1), 1e-9)


def rows(
    session: Any, problems: list[Stated], seconds: float, start: int = 1, limit: float | None = None
) -> Iterator[tuple[Row, float]]:
    """The rows of all races, FlashCore's first, each with the part of the processor that other programs used.

    Begins with problem ``start`` (from 1), and begins no race after ``limit`` seconds.
    """
    peer, began = f"torch {torch.__version__} SDPA", time.monotonic()
    for index, stated in list(enumerate(problems))[start - 1 :]:
        if limit is not None and time.monotonic() - began > limit:
            print(f"flashcore_bench: time is up; --start {index + 1} goes on from here", file=sys.stderr)
            return
        (_, heads, _, length, _, dim), dtype, _, _ = stated
        layer, load = Layer(stated), Load()
        raced = session.race(stated, peer, layer, seconds)
        others = load.of_others()
        at = f"{index + 1}/{len(problems)} {dtype} H{heads} S{length} D{dim}"
        print(f"{at}: other programs used {others:.0%} of the processor", file=sys.stderr, flush=True)
        yield from ((json.loads(row), others) for row in raced)


def run(args: Any) -> int:
    """``python -m flashcore_bench model``: 0 if all races count, 1 if an output was wrong or the CPU was busy."""
    from ._table import summary, table

    session = _bench.CpuSession(torch.get_num_threads())
    try:
        kept = Rows(args, session.commit())
    except (OSError, ValueError) as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    problems = _bench.model_problems()
    if not 1 <= args.start <= len(problems):
        print(f"flashcore_bench: --start {args.start} is none of the {len(problems)} problems", file=sys.stderr)
        return 2
    waiting = os.environ.get("OMP_WAIT_POLICY") or "the runtime's own"
    print(f"{session.device()}; OMP_WAIT_POLICY: {waiting}", file=sys.stderr)
    bad = 0
    for row, others in rows(session, problems, args.seconds, args.start, args.limit):
        counts = others <= MOST_BY_OTHERS
        bad += not counts or (row["fault"] is not None and row["impl"] == "flashcore")
        kept.add(row, is_evidence=counts)
    if not args.json:
        print(table(kept.every))
        print(*summary(kept.every), sep="\n")
    if bad:
        print(f"flashcore_bench: {bad} rows do not count; none of them is written", file=sys.stderr)
    return 1 if bad else 0
