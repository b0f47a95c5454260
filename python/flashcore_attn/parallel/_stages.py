"""The schedules in which keys travel: all at once by slices of heads, or in steps around a ring.

The keys of a stage are exchanged while those of the stage before are computed. Gradients of keys go back to the ranks
that hold the keys, which add them in the order of ranks, so that equal calls give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._calls import ParallelCall, Terms, TermSums, attend, differentiate, kv_heads, merge
from ._exchange import Exchange
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


@functools.lru_cache(maxsize=256)
def _plans(
    split: SequenceSplit, rank: int, band: GlobalBand, ring: bool
) -> tuple[tuple[KeyPlan, tuple[tuple[int, RowPiece], ...]], ...]:
    found = []
    for step in range(split.ranks if ring else 1):
        if ring:
            plan = ring_plans(split, rank, band)[step]
            peers = {(rank + step) % split.ranks} - {rank}
            needs = {peer: ring_plans(split, peer, band)[step] for peer in peers}
        else:
            plan = gather_plan(split, rank, band)
            needs = {peer: gather_plan(split, peer, band) for peer in range(split.ranks) if peer != rank}
        sends = [(peer, piece) for peer, theirs in needs.items() for piece in theirs.pieces if piece.rank == rank]
        found.append((plan, tuple(sends)))
    return tuple(found)


def stages_of(job: ParallelCall, heads: int) -> list[KeyStage]:
    """The stages of a call with so many KV heads."""
    ring = job.schedule == "ring"
    each = heads // (1 if ring else job.slices)
    return [
        KeyStage(slice(first, first + each), plan, sends, ring)
        for plan, sends in _plans(job.split, job.rank, job.band, ring)
        for first in range(0, heads, each)
    ]


class _Keys:
    """The keys and values of a stage, perhaps still under way: each ``(rows, batch, heads, dim)``."""

    def __init__(self, job: ParallelCall, stage: KeyStage, kv: tuple[Tensor, Tensor]) -> None:
        self._works: Exchange | None = None
        kv = tuple(x[:, :, stage.heads].transpose(0, 1) for x in kv)
        own = [piece for piece in stage.plan.pieces if piece.rank == job.rank]
        if not stage.sends and own == list(stage.plan.pieces) and all(piece.shard == piece.buffer for piece in own):
            self.buffers = [x[: stage.plan.rows] for x in kv]
            return
        self.buffers = [x.new_empty((stage.plan.rows, *x.shape[1:])) for x in kv]
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
        self._works = Exchange(job.group, sends, receives, "keys and values")

    def _both(self, kv: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(kv, self.buffers)

    def wait(self) -> None:
        if self._works is not None:
            self._works.wait()

    def of(self, call: BandCall) -> tuple[Tensor, Tensor]:
        """The keys and values of a call, ``(batch, keys, heads, dim)``."""
        k, v = (buffer[slice(*call.keys)].transpose(0, 1) for buffer in self.buffers)
        return k, v


def _rows(x: Tensor, first: int, piece: RowPiece) -> Tensor:
    return x[first : first + piece.rows]


def _held(x: Tensor, buffer: Tensor, wanted: RowPiece, own: list[RowPiece]) -> Tensor:
    """Rows of this rank, contiguous: from the buffer if they were copied there."""
    for piece in own:
        if piece.shard <= wanted.shard and wanted.shard + wanted.rows <= piece.shard + piece.rows:
            return _rows(buffer, piece.buffer + wanted.shard - piece.shard, wanted)
    return _rows(x, wanted.shard, wanted).contiguous()


def _fetched(job: ParallelCall, stages: list[KeyStage], kv: tuple[Tensor, Tensor]) -> Iterator[tuple[KeyStage, _Keys]]:
    """The stages with their keys; those of the next stage are under way."""
    following = _Keys(job, stages[0], kv)
    for i, stage in enumerate(stages):
        keys = following
        if i + 1 < len(stages):
            following = _Keys(job, stages[i + 1], kv)
        keys.wait()
        yield stage, keys


def forward(job: ParallelCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The result of this rank's rows and its log-sum-exp."""
    stages, group = stages_of(job, k.shape[2]), q.shape[2] // k.shape[2]
    shape = (*q.shape[:3], v.shape[3])
    out = q.new_zeros(shape, dtype=torch.float32 if stages[0].partial else q.dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    for stage, keys in _fetched(job, stages, (k, v)):
        heads = kv_heads(stage.heads, group)
        for call in stage.plan.calls:
            rows = slice(*call.rows)
            part, part_lse = attend(job, call, q[:, rows, heads], *keys.of(call), terms.of(heads))
            if stage.partial:
                merge(out[:, rows, heads], lse[:, heads, rows], part, part_lse)
            else:
                out[:, rows, heads] = part
                lse[:, heads, rows] = part_lse
    return out.to(q.dtype), lse


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
    stages, group = stages_of(job, k.shape[2]), q.shape[2] // k.shape[2]
    dq = q.new_zeros(q.shape, dtype=torch.float32 if stages[0].partial else q.dtype)
    sums = [x.new_zeros((x.shape[1], x.shape[0], *x.shape[2:]), dtype=torch.float32) for x in (k, v)]
    of_terms = TermSums(terms, wants)
    returned: _Returned | None = None
    for stage, keys in _fetched(job, stages, (k, v)):
        heads = kv_heads(stage.heads, group)
        of_keys = _KeyGradients(keys.buffers)
        for call in stage.plan.calls:
            rows = slice(*call.rows)
            made_here = (out[:, rows, heads], lse[:, heads, rows])
            given = (d_out[:, rows, heads], None if d_lse is None else d_lse[:, heads, rows])
            inputs = (q[:, rows, heads], *keys.of(call))
            of_q, of_kv, others = differentiate(job, call, inputs, made_here, given, terms.of(heads), wants)
            dq[:, rows, heads] += of_q
            of_keys.add(call, of_kv)
            of_terms.add(heads, others)
        if returned is not None:
            returned.add(sums)
        returned = _Returned(job, stage, of_keys.taken())
    if returned is not None:
        returned.add(sums)
    dk, dv = (x.transpose(0, 1).to(k.dtype) for x in sums)
    return [dq.to(q.dtype), dk, dv], of_terms.taken()


class _KeyGradients:
    """The gradients of a stage's keys and values, each ``(rows, batch, heads, dim)``."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._sums: list[Tensor] = []

    def add(self, call: BandCall, found: list[Tensor]) -> None:
        parts = [x.transpose(0, 1) for x in found]
        if not self._sums:
            if call.keys == (0, self._buffers[0].shape[0]):
                self._sums = [x.contiguous() for x in parts]
                return
            self._sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in self._buffers]
        for x, part in zip(self._sums, parts):
            x[slice(*call.keys)] += part

    def taken(self) -> list[Tensor]:
        """The gradients; zeros where no call read a key."""
        return self._sums or [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in self._buffers]


class _Returned:
    """Gradients of keys on their way to the ranks that hold the keys."""

    def __init__(self, job: ParallelCall, stage: KeyStage, found: list[Tensor]) -> None:
        self._heads, self._found = stage.heads, found
        self._own = [piece for piece in stage.plan.pieces if piece.rank == job.rank]
        away = [piece for piece in stage.plan.pieces if piece.rank != job.rank]
        sends = [(_rows(x, piece.buffer, piece), piece.rank) for piece in away for x in found]
        self._others = [
            (piece, [x.new_empty((piece.rows, *x.shape[1:])) for x in found], peer) for peer, piece in stage.sends
        ]
        receives = [(x, peer) for _, parts, peer in self._others for x in parts]
        self._works = Exchange(job.group, sends, receives, "gradients of keys and values")

    def add(self, sums: list[Tensor]) -> None:
        """Adds the gradients of this rank's keys."""
        self._works.wait()
        for piece in self._own:
            for x, found in zip(sums, self._found):
                _rows(x, piece.shard, piece)[:, :, self._heads] += _rows(found, piece.buffer, piece)
        for piece, parts, _ in self._others:
            for x, part in zip(sums, parts):
                _rows(x, piece.shard, piece)[:, :, self._heads] += part
