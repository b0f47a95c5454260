"""The schedules in which keys travel: all at once by slices of heads, or in steps around a ring.

The keys of a stage are exchanged while those of the stage before are computed. Gradients of keys go back to the ranks
that hold the keys, which add them in the order of stages: with deterministic kernels, equal calls give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._calls import ParallelCall, Terms, TermSums, attend, continued, differentiate, kv_heads, merge
from ._exchange import Exchange
from ._peers import Landing
from ._plan import BandCall, GlobalBand, KeyPlan, RowPiece, gather_plan, ring_plans
from ._split import SequenceSplit

__all__ = ["backward", "forward", "stages_of"]


class KeyStage(NamedTuple):
    """A part of the keys: a plan, for some KV heads."""

    heads: slice
    plan: KeyPlan
    #: The rows of this rank's keys that others need, with the ranks that need them.
    sends: tuple[tuple[int, RowPiece], ...]
    #: Whether other stages compute further keys of the same rows.
    partial: bool
    #: Whether some rank receives keys of another one.
    shared: bool


@functools.lru_cache(maxsize=256)
def _stages(
    split: SequenceSplit, rank: int, band: GlobalBand, ring: bool, heads: int, slices: int
) -> tuple[KeyStage, ...]:
    found = []
    for step in range(split.ranks if ring else 1):
        every = [
            ring_plans(split, peer, band)[step] if ring else gather_plan(split, peer, band)
            for peer in range(split.ranks)
        ]
        plan = every[rank]
        needs = [(peer, piece) for peer, theirs in enumerate(every) for piece in theirs.pieces if piece.rank != peer]
        sends = [(peer, piece) for peer, piece in needs if piece.rank == rank]
        # Also without keys: all ranks have equally many stages, so that two ranks post their messages in one
        # order.
        each = heads // slices
        for first in range(0, heads, each):
            found.append(KeyStage(slice(first, first + each), plan, tuple(sends), ring, bool(needs)))
    return tuple(found)


def stages_of(job: ParallelCall, heads: int) -> tuple[KeyStage, ...]:
    """The stages of a call with so many KV heads."""
    ring = job.schedule == "ring"
    return _stages(job.split, job.rank, job.band, ring, heads, 1 if ring else job.slices)


class _Keys:
    """The keys and values of a stage, perhaps still under way: each ``(rows, batch, heads, dim)``."""

    def __init__(self, job: ParallelCall, stage: KeyStage, kv: tuple[Tensor, Tensor], ahead: bool) -> None:
        self._works: Exchange | None = None
        kv = tuple(x[:, :, stage.heads].transpose(0, 1) for x in kv)
        pieces, rows = stage.plan.pieces, stage.plan.rows
        own = [piece for piece in pieces if piece.rank == job.rank]
        is_own = not stage.sends and own == list(pieces) and _is_identity(own)
        if is_own and not stage.shared:
            self.buffers = [x[:rows] for x in kv]
            return
        if len(pieces) == 1 and not own:  # where it arrives
            sends = [(_held(x, x, piece, own), peer) for peer, piece in stage.sends for x in kv]
            landings = [(Landing((rows, *x.shape[1:]), x), pieces[0].rank) for x in kv]
            self._works = Exchange(job.group, sends, landings, "keys and values", ahead)
            self.buffers = self._works.received
            return
        self.buffers = [x[:rows] if is_own else x.new_empty((rows, *x.shape[1:])) for x in kv]
        own = [] if is_own else own
        for piece in own:
            for buffer, x in zip(self.buffers, kv):
                _rows(buffer, piece.buffer, piece).copy_(_rows(x, piece.shard, piece))
        sends = [(_held(x, buffer, piece, own), peer) for peer, piece in stage.sends for x, buffer in self._both(kv)]
        receives = [
            (_rows(buffer, piece.buffer, piece), piece.rank)
            for piece in stage.plan.pieces
            if piece.rank != job.rank
            for buffer in self.buffers
        ]
        if stage.shared:
            self._works = Exchange(job.group, sends, receives, "keys and values", ahead)

    def _both(self, kv: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(kv, self.buffers)

    def wait(self) -> None:
        if self._works is not None:
            self._works.wait()

    def of(self, call: BandCall) -> tuple[Tensor, Tensor]:
        """The keys and values of a call, ``(batch, keys, heads, dim)``."""
        k, v = (buffer[slice(*call.keys)].transpose(0, 1) for buffer in self.buffers)
        return k, v


def _is_identity(own: list[RowPiece]) -> bool:
    """Whether own rows lie in the buffer as in the shard."""
    return all(piece.shard == piece.buffer for piece in own)


def _rows(x: Tensor, first: int, piece: RowPiece) -> Tensor:
    return x[first : first + piece.rows]


def _held(x: Tensor, buffer: Tensor, wanted: RowPiece, own: list[RowPiece]) -> Tensor:
    """Rows of this rank, contiguous: from the buffer if they were copied there."""
    for piece in own:
        if piece.shard <= wanted.shard and wanted.shard + wanted.rows <= piece.shard + piece.rows:
            return _rows(buffer, piece.buffer + wanted.shard - piece.shard, wanted)
    return _rows(x, wanted.shard, wanted).contiguous()


def _fetched(
    job: ParallelCall, stages: tuple[KeyStage, ...], kv: tuple[Tensor, Tensor]
) -> Iterator[tuple[KeyStage, _Keys]]:
    """The stages with their keys; those of the next stage are under way."""
    ahead = sum(stage.shared for stage in stages) > 1
    following = _Keys(job, stages[0], kv, ahead)
    for i, stage in enumerate(stages):
        keys = following
        if i + 1 < len(stages):
            following = _Keys(job, stages[i + 1], kv, ahead)
        keys.wait()
        yield stage, keys


def _sum_type(number: int, dtype: torch.dtype) -> torch.dtype:
    """The type of a sum of so many tensors: two are rounded once in any case."""
    return dtype if number <= 2 else torch.float32


def forward(job: ParallelCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The result of this rank's rows and its log-sum-exp."""
    stages, group = stages_of(job, k.shape[2]), q.shape[2] // k.shape[2]
    kind = _sum_type(len(stages) if stages[0].partial else 1, q.dtype)
    out: Tensor | None = None
    lse: Tensor | None = None
    for stage, keys in _fetched(job, stages, (k, v)):
        heads = kv_heads(stage.heads, group)
        for call in stage.plan.calls:
            rows = slice(*call.rows)
            if stage.partial and out is not None and lse is not None and kind == q.dtype:
                made = out[:, rows, heads], lse[:, heads, rows]
                total = continued(job, call, q[:, rows, heads], *keys.of(call), terms.of(heads), made)
                if total.shape == lse.shape:
                    lse = total
                else:
                    lse[:, heads, rows] = total
                continue
            part, part_lse = attend(job, call, q[:, rows, heads], *keys.of(call), terms.of(heads))
            if out is None or lse is None:
                if part.shape[:3] == q.shape[:3]:
                    out, lse = part.to(kind), part_lse
                    continue
                out, lse = _unseen(q, v, kind, zeros=stage.partial or job.is_padded)
            if stage.partial:
                merge(out[:, rows, heads], lse[:, heads, rows], part, part_lse)
            else:
                out[:, rows, heads] = part
                lse[:, heads, rows] = part_lse
    if out is None or lse is None:  # a shard of padding
        out, lse = _unseen(q, v, kind, zeros=True)
    return out.to(q.dtype), lse


def _unseen(q: Tensor, v: Tensor, dtype: torch.dtype, zeros: bool) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp before a row has seen a key; uninitialised where all rows are written."""
    shape = (*q.shape[:3], v.shape[3])
    out = (q.new_zeros if zeros else q.new_empty)(shape, dtype=dtype)
    return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)


def backward(
    job: ParallelCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    made: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    terms: Terms,
    wants: tuple[bool, bool],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The gradients of this rank's q, k and v, and its part of those of sinks and slopes."""
    q, k, v = tensors
    (out, lse), (d_out, d_lse) = made, gradients
    of_forward, group = stages_of(job, k.shape[2]), q.shape[2] // k.shape[2]
    partial = of_forward[0].partial
    kind = _sum_type(len(of_forward) if partial else 1, q.dtype)
    # Where a call sees all rows of its heads first, it writes dQ itself.
    first = not partial or kind == q.dtype
    empty = not partial and not job.is_padded
    like = torch.contiguous_format
    dq = (torch.empty_like if empty else torch.zeros_like)(q, dtype=kind, memory_format=like)
    sums, of_terms = _KeySums(job, (k, v)), TermSums(terms, wants)
    returned: _Returned | None = None
    stages = _in_backward(of_forward, q.shape[0] * k.shape[1] if q.is_cuda else None)
    for i, (stage, keys) in enumerate(_fetched(job, stages, (k, v))):
        heads = kv_heads(stage.heads, group)
        of_keys = _KeyGradients(keys.buffers, len(stage.plan.calls))
        places = sums.places(stage)
        for number, call in enumerate(stage.plan.calls):
            rows = slice(*call.rows)
            made_here = (out[:, rows, heads], lse[:, heads, rows])
            given = (d_out[:, rows, heads], None if d_lse is None else d_lse[:, heads, rows])
            inputs = (q[:, rows, heads], *keys.of(call))
            writes = first and (not partial or i == number == 0)
            into = (dq[:, rows, heads] if writes else None, *places)
            of_q, of_kv, others = differentiate(job, call, inputs, made_here, given, terms.of(heads), wants, into)
            if not writes:
                dq[:, rows, heads] += of_q
            if places[0] is None:
                of_keys.add(call, of_kv)
            of_terms.add(heads, others)
        if places[0] is None and not stage.shared:
            sums.own(of_keys.taken(), stage)
        if returned is not None and stage.shared:
            returned.add(sums)
        if stage.shared:
            returned = _Returned(job, stage, of_keys.taken(), k.dtype)
    if returned is not None:
        returned.add(sums)
    return [dq.to(q.dtype), *sums.taken()], of_terms.taken()


#: The least tiles of 128 keys that half of the heads must have on a GPU, three for each multiprocessor of an
#: H200. A causal call takes at least the time of its longest tile, so that halves of fewer take longer than
#: gradients return.
_LEAST_TILES = 396


def _in_backward(stages: tuple[KeyStage, ...], keys: int | None) -> tuple[KeyStage, ...]:
    """The stages of the backward pass: half of the heads of the first one come last. While they are computed, the last
    gradients of keys return to other ranks. ``keys`` are those of a head that a GPU holds, over the batch."""
    first, heads = stages[0], stages[0].heads
    middle = (heads.start + heads.stop + 1) // 2
    if first.shared or not first.partial or middle == heads.stop or not any(stage.shared for stage in stages):
        return stages
    if keys is not None and keys // 128 * (heads.stop - middle) < _LEAST_TILES:
        return stages
    halves = [first._replace(heads=part) for part in (slice(heads.start, middle), slice(middle, heads.stop))]
    return (halves[0], *stages[1:], halves[1])


class _KeySums:
    """The gradients of this rank's keys and values, each ``(rows, batch, heads, dim)``."""

    def __init__(self, job: ParallelCall, kv: tuple[Tensor, Tensor]) -> None:
        self._kv, self._ranks, self.rank = kv, job.split.ranks, job.rank
        self._type = _sum_type(self._ranks, kv[0].dtype)
        self._sums: list[Tensor] = []

    def places(self, stage: KeyStage) -> tuple[Tensor | None, Tensor | None]:
        """Memory for the gradients of a stage of own keys, where one call has all of them, ``(batch, rows, heads,
        dim)``."""
        calls, rows = stage.plan.calls, self._kv[0].shape[1]
        whole = [RowPiece(self.rank, 0, 0, rows)] == list(stage.plan.pieces)
        # Of more ranks, gradients return before the last of a rank's own.
        alone = self._ranks == 2 and len(calls) == 1 and calls[0].keys == (0, rows)
        if stage.shared or not whole or not alone:
            return None, None
        if not self._sums:
            self._sums = [x.new_empty((rows, x.shape[0], *x.shape[2:])) for x in self._kv]
        dk, dv = (x[:, :, stage.heads].transpose(0, 1) for x in self._sums)
        return dk, dv

    def own(self, found: list[Tensor], stage: KeyStage) -> None:
        """Adds the gradients of a stage of this rank's own keys, the only ones for their rows and heads."""
        pieces = [piece for piece in stage.plan.pieces if piece.rank == self.rank]
        if not self._sums:
            kind = torch.promote_types(self._type, found[0].dtype)
            self._sums = [x.new_zeros((x.shape[1], x.shape[0], *x.shape[2:]), dtype=kind) for x in self._kv]
        for piece in pieces:
            for x, part in zip(self._sums, found):
                _rows(x, piece.shard, piece)[:, :, stage.heads] += _rows(part, piece.buffer, piece)

    def add(self, parts: list[Tensor], piece: RowPiece, heads: slice) -> None:
        """Adds the gradients that another rank has computed."""
        for x, part in zip(self._sums, parts):
            _rows(x, piece.shard, piece)[:, :, heads] += part

    def taken(self) -> list[Tensor]:
        """The gradients in the shape of the keys and values."""
        if not self._sums:
            return [torch.zeros_like(x) for x in self._kv]
        return [x.transpose(0, 1).to(like.dtype) for x, like in zip(self._sums, self._kv)]


class _KeyGradients:
    """The gradients of a stage's keys and values, each ``(rows, batch, heads, dim)``."""

    def __init__(self, buffers: list[Tensor], calls: int) -> None:
        self._buffers, self._type = buffers, _sum_type(calls, buffers[0].dtype)
        self._sums: list[Tensor] = []

    def add(self, call: BandCall, found: list[Tensor]) -> None:
        parts = [x.transpose(0, 1) for x in found]
        if not self._sums:
            if call.keys == (0, self._buffers[0].shape[0]):
                self._sums = [x.to(self._type).contiguous() for x in parts]
                return
            self._sums = self._zeros(self._type)
        for x, part in zip(self._sums, parts):
            x[slice(*call.keys)] += part

    def taken(self) -> list[Tensor]:
        """The gradients, in float32 if they are sums of many; zeros where no call read a key."""
        return self._sums or self._zeros(None)

    def _zeros(self, dtype: torch.dtype | None) -> list[Tensor]:
        return [torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in self._buffers]


class _Returned:
    """Gradients of keys on their way to the ranks that hold the keys."""

    def __init__(self, job: ParallelCall, stage: KeyStage, found: list[Tensor], dtype: torch.dtype) -> None:
        self._stage, self._found = stage, found
        found = [x.to(dtype) for x in found]
        away = [piece for piece in stage.plan.pieces if piece.rank != job.rank]
        sends = [(_rows(x, piece.buffer, piece), piece.rank) for piece in away for x in found]
        self._others = [piece for _, piece in stage.sends]
        landings = [(Landing((piece.rows, *x.shape[1:]), x), peer) for peer, piece in stage.sends for x in found]
        self._works = Exchange(job.group, sends, landings, "gradients of keys and values")

    def add(self, sums: _KeySums) -> None:
        """Adds the gradients of this rank's keys."""
        if any(piece.rank == sums.rank for piece in self._stage.plan.pieces):
            sums.own(self._found, self._stage)
        self._works.wait()
        received = self._works.received
        for i, piece in enumerate(self._others):
            sums.add(received[2 * i : 2 * i + 2], piece, self._stage.heads)
