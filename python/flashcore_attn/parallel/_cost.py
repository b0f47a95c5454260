"""The predicted time of each schedule, from bytes, FLOP and constants of the machine."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._calls import ParallelCall
from ._plan import BandCall, GlobalBand, gather_plan
from ._split import SequenceSplit, joined
from ._stages import stages_of
from ._ulysses import degrees, lacks

__all__ = ["Costs", "ScheduleForecast", "chosen", "decode_forecast", "forecasts", "table"]

#: Slices of heads that are tried, and the least rows times bytes of a slice that are worth a message.
_SLICES = (1, 2, 4, 8)


class Costs(NamedTuple):
    """Constants of a machine. All ranks use the same ones, so that all choose alike."""

    #: FLOP a second of the forward pass; the backward pass has 2.5 times its FLOP.
    flops: float
    backward_flops: float
    #: Bytes a second that a rank receives, while it sends as many.
    link: float
    #: Bytes a second of a rank's memory.
    memory: float
    #: Seconds of one exchange and of one kernel, besides bytes and FLOP.
    exchange: float
    kernel: float
    #: Seconds of the host for a pass, and for each exchange and kernel of it.
    host: tuple[float, float, float]
    #: The time that an exchange beside a kernel takes from the kernel, as a share of the exchange.
    overlap_loss: float
    #: Bytes of keys and values that decoding reads in a second; seconds of exchanging and merging results.
    reads: float
    merge: float
    source: str

    @staticmethod
    def of(device: torch.device, hosts: int, peers: bool = True) -> Costs:
        """The constants for ranks on such devices and so many hosts. ``peers``: whether ranks of a host write into the
        memory of each other."""
        if device.type != "cuda":
            words = "a CPU core and sockets: orders of magnitude"
            return Costs(5e10, 5e10, 1e9, 1e10, 2e-4, 1e-4, (0.0, 0.0, 0.0), 0.5, 1e10, 2e-4, words)
        near = Costs(
            7.4e14, 5e14, 2.32e11, 4.2e12, 3e-5, 1.3e-4, (2e-4, 2e-4, 1e-4), 0.6, 4.55e12, 4e-5,
            "H200: 740 TFLOP/s, 4.2 TB/s, 232 GB/s of an all-gather by NCCL, and 0.6 of a hidden exchange lost, "
            "measured; 130 us of a kernel's start and end, fitted to the suite's rows; 500 TFLOP/s backward, the "
            "host's times and 40 us of exchanging and merging decoded results, assumed",
        )  # fmt: skip
        if hosts <= 1 and peers:
            words = "380 GB/s of copies between GPUs, and 0.1 of a hidden one lost"
            words = near.source.replace("232 GB/s of an all-gather by NCCL, and 0.6 of a hidden exchange lost", words)
            of_results = "20 us of a barrier and of a merge that reads the memory of peers"
            words = words.replace("40 us of exchanging and merging decoded results", of_results)
            return near._replace(link=3.8e11, exchange=2e-5, overlap_loss=0.1, merge=2e-5, source=words)
        if hosts <= 1:
            return near
        return near._replace(link=5e10, exchange=5e-5, source=f"{near.source}; 50 GB/s between hosts, nominal")


class ScheduleForecast(NamedTuple):
    """The predicted time of one schedule, of the slowest rank."""

    schedule: str
    slices: int
    #: Bytes that a rank receives, and seconds: in all, of compute alone, of exchanges that nothing hides.
    received: int
    seconds: float
    compute: float
    exposed: float
    #: Seconds of merges and copies.
    extra: float
    #: One GPU's predicted time divided by the ranks, as a share of ``seconds``.
    efficiency: float
    #: Why it cannot be taken, or an empty text.
    lacks: str
    #: The ranks that exchange heads.
    together: int = 1


def chosen(told: tuple[ScheduleForecast, ...], schedule: str = "auto") -> ScheduleForecast:
    """The one with the least time, of those that can be taken, and of one schedule unless that is "auto"."""
    possible = [x for x in told if not x.lacks and schedule in ("auto", x.schedule)]
    return min(possible, key=lambda x: x.seconds)


@functools.lru_cache(maxsize=256)
def forecasts(
    split: SequenceSplit, band: GlobalBand, dims: tuple[int, int, int, int, int], element: int, trains: bool,
    costs: Costs,
) -> tuple[ScheduleForecast, ...]:  # fmt: skip
    """The predicted times of a call. ``dims``: batch, heads, heads_k, head_dim and head_dim_v; ``element``: bytes of an
    element; ``trains``: with the backward pass."""
    heads_k = dims[2]
    found = [
        _of_stages(split, band, dims, element, trains, costs, "all_gather", slices)
        for slices in _SLICES
        if heads_k % slices == 0
    ]
    found.append(_of_stages(split, band, dims, element, trains, costs, "ring", 1))
    neighbours = (*degrees(split.ranks), split.ranks)
    found += [_of_heads(split, band, dims, element, trains, costs, together) for together in neighbours]
    return tuple(found)


def decode_forecast(
    keys: int, ranks: int, dims: tuple[int, int, int, int, int], element: int, costs: Costs
) -> ScheduleForecast:
    """The predicted time of one query of each sequence to ``keys`` keys, which are sharded over ranks. ``dims`` are as
    in :func:`forecasts`."""
    batch, heads, heads_k, dim, dim_v = dims
    whole = batch * keys * heads_k * (dim + dim_v) * element / costs.reads
    seconds = whole / ranks + costs.merge
    received = (ranks - 1) * batch * heads * (dim_v * element + 4)
    share = _share(whole / ranks, seconds)
    return ScheduleForecast("decode", 1, received, seconds, whole / ranks, costs.merge, 0.0, share, "")


def _pairs(call: BandCall) -> int:
    """Pairs of a query and a key that it sees."""
    ends = (*call.starts_q[1:], call.rows[1] - call.rows[0])
    pairs = 0
    for first, end, keys in zip(call.starts_q, ends, call.used_k):
        rows, offset = end - first, keys - (end - first)
        last = keys * rows if call.after < 0 else _clamped(rows, offset + call.after + 1, keys)
        hidden = 0 if call.before < 0 else _clamped(rows, offset - call.before, keys)
        pairs += last - hidden
    return pairs


def _clamped(rows: int, start: int, most: int) -> int:
    """The sum of ``min(max(start + i, 0), most)`` over ``i < rows``."""
    first = min(max(0, -start), rows)  # the first i with a positive term
    full = min(max(first, most - start), rows)  # the first i whose term is the most
    return (full - first) * (2 * start + first + full - 1) // 2 + (rows - full) * most


def _seconds(pairs: int, dims: tuple[int, int, int, int, int], costs: Costs, trains: bool) -> float:
    batch, heads, _, dim, dim_v = dims
    flop = 2.0 * batch * heads * pairs * (dim + dim_v)
    return flop / costs.flops + (2.5 * flop / costs.backward_flops if trains else 0.0)


def _ideal(
    split: SequenceSplit, band: GlobalBand, dims: tuple[int, int, int, int, int], costs: Costs, trains: bool
) -> float:
    whole = SequenceSplit((((0, split.length),),), split.documents)
    return _seconds(sum(map(_pairs, gather_plan(whole, 0, band).calls)), dims, costs, trains) / split.ranks


def _of_stages(
    split: SequenceSplit, band: GlobalBand, dims: tuple[int, int, int, int, int], element: int, trains: bool,
    costs: Costs, schedule: str, slices: int,
) -> ScheduleForecast:  # fmt: skip
    batch, heads, heads_k, dim, dim_v = dims
    if schedule == "ring" and band.chunk:
        return ScheduleForecast(schedule, 1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, "no chunks")
    passes, slowest = 2 if trains else 1, None
    for rank in range(split.ranks):
        job = ParallelCall(None, rank, split, band, None, 0.0, schedule, slices)
        stages = stages_of(job, heads_k)
        compute, sends, received, extra, exchanges = [], [], 0, 0.0, 0
        for number, stage in enumerate(stages):
            own_heads = stage.heads.stop - stage.heads.start
            row = batch * own_heads * (dim + dim_v) * element
            away = sum(piece.rows for piece in stage.plan.pieces if piece.rank != rank) * row
            share = (batch, heads * own_heads // heads_k, own_heads, dim, dim_v)
            pairs = sum(map(_pairs, stage.plan.calls))
            compute.append(_seconds(pairs, share, costs, trains) + passes * len(stage.plan.calls) * costs.kernel)
            # The backward pass receives keys again, and gradients of keys go the other way.
            times = (3 if trains else 1) if away or stage.sends else 0
            sends.append(times * (away / costs.link + costs.exchange))
            received += times * away
            exchanges += times
            rows = sum(call.rows[1] - call.rows[0] for call in stage.plan.calls)
            # Of two results, the kernel of the second one reads and writes the first one. A merge of more
            # reads and writes results in float32. Else results are copied to their place, and own keys into
            # the buffer.
            merged = 22 if len(stages) > 2 else element
            place = rows * share[0] * share[1] * dim_v * (merged if stage.partial and number else 2 * element)
            extra += (0.0 if stage.partial and not number else passes * place) / costs.memory
            extra += 0.0 if stage.partial else passes * 2 * split.rows * row / costs.memory
        # While a stage is computed, the next one is received.
        exposed = sends[0] + sum(max(0.0, coming - busy) for coming, busy in zip(sends[1:], compute))
        busy, hidden = sum(compute), max(0.0, sum(sends) - exposed)
        kernels = passes * sum(len(stage.plan.calls) for stage in stages)
        on_host = _of_host(costs, passes, exchanges, kernels)
        total = max(busy + exposed + extra + costs.overlap_loss * hidden, on_host)
        made = (total, received, busy, exposed, extra)
        slowest = made if slowest is None or made > slowest else slowest
    assert slowest is not None
    total, received, busy, exposed, extra = slowest
    ideal = _ideal(split, band, dims, costs, trains)
    return ScheduleForecast(schedule, slices, received, total, busy, exposed, extra, _share(ideal, total), "")


def _of_host(costs: Costs, passes: int, exchanges: int, kernels: int) -> float:
    """Seconds of the host, which enqueues everything."""
    of_pass, of_exchange, of_kernel = costs.host
    return passes * of_pass + exchanges * of_exchange + kernels * of_kernel


def _of_heads(
    split: SequenceSplit, band: GlobalBand, dims: tuple[int, int, int, int, int], element: int, trains: bool,
    costs: Costs, together: int,
) -> ScheduleForecast:  # fmt: skip
    batch, heads, heads_k, dim, dim_v = dims
    schedule = "ulysses" if together == split.ranks else "ulysses_ring"
    told = lacks(heads, heads_k, together)
    if told is None and band.chunk and schedule == "ulysses_ring":
        told = "no chunks"
    if told is not None:
        return ScheduleForecast(schedule, 1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, told, together)
    own = (batch, heads // together, max(1, heads_k // together), dim, dim_v)
    rows = joined(split, together)
    inner = _of_stages(rows, band, own, element, trains, costs, "ring" if rows.ranks > 1 else "all_gather", 1)
    passes = 2 if trains else 1
    row = batch * (own[1] + own[2]) * (dim + dim_v) * element
    moved = passes * (together - 1) * split.rows * row
    exposed = 0.0 if together == 1 else moved / costs.link + 2 * passes * costs.exchange
    extra = 4 * passes * rows.rows * row / costs.memory
    # Heads are packed and unpacked by a copy for each rank.
    on_host = _of_host(costs, passes, 2 * passes, passes * together)
    total = max(inner.seconds + exposed + extra, on_host)
    exposed, extra = inner.exposed + exposed, inner.extra + extra
    ideal = _ideal(split, band, dims, costs, trains)
    share = _share(ideal, total)
    received = inner.received + moved
    return ScheduleForecast(schedule, 1, received, total, inner.compute, exposed, extra, share, "", together)


def _share(ideal: float, total: float) -> float:
    return ideal / total if total else 1.0


def table(told: tuple[ScheduleForecast, ...], costs: Costs) -> str:
    """The predicted times as text."""
    best = chosen(told)
    head = "schedule        slices  degree  received MB  predicted ms  exposed ms  of ideal"
    lines = [f"constants: {costs.source}", head]
    for x in told:
        if x.lacks:
            lines.append(f"  {x.schedule:<14}  not taken: {x.lacks}")
            continue
        mark = "* " if x is best else "  "
        name = f"{mark}{x.schedule:<14} {x.slices:>5} {x.together:>7}"
        figures = f"{x.received / 1e6:>12.1f} {x.seconds * 1e3:>13.3f} {x.exposed * 1e3:>11.3f} {x.efficiency:>9.2f}"
        lines.append(name + figures)
    return "\n".join(lines)
