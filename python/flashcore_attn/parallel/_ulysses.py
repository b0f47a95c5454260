"""The schedule in which heads travel: each rank computes all rows of some heads (DeepSpeed-Ulysses)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._calls import ParallelCall, Terms, TermSums, attend, differentiate
from ._exchange import Exchange
from ._plan import BandCall, gather_plan
from ._split import SequenceSplit

__all__ = ["backward", "forward", "heads_of", "lacks"]


def lacks(heads: int, heads_k: int, ranks: int) -> str | None:
    """Why so many heads cannot be given to ranks, or None."""
    if heads % ranks:
        return f"{heads} heads are not a multiple of {ranks} ranks"
    if heads_k % ranks and ranks % heads_k:
        return f"{heads_k} KV heads neither divide {ranks} ranks nor are a multiple of them"
    return None


def heads_of(rank: int, ranks: int, heads: int, heads_k: int) -> tuple[slice, slice]:
    """The query heads and the KV heads of a rank. Fewer KV heads than ranks are read by several ranks."""
    each, group = heads // ranks, heads // heads_k
    first, last = rank * each, (rank + 1) * each
    return slice(first, last), slice(first // group, (last - 1) // group + 1)


def calls_of(job: ParallelCall) -> tuple[BandCall, ...]:
    """The calls of a rank, which has all rows."""
    whole = SequenceSplit((((0, job.split.length),),), job.split.documents)
    return gather_plan(whole, 0, job.band).calls


def _places(split: SequenceSplit, rank: int) -> list[tuple[slice, slice]]:
    """The rows of a rank, in its shard and in the sequence."""
    places, at = [], 0
    for first, last in split.fragments[rank]:
        places.append((slice(at, at + last - first), slice(first, last)))
        at += last - first
    return places


class _ToHeads:
    """Shards ``(batch, rows, heads, dim)`` on their way to all rows of this rank's heads, ``(length, batch, heads,
    dim)``."""

    def __init__(self, job: ParallelCall, tensors: list[Tensor], heads: list[list[slice]]) -> None:
        ranks = job.split.ranks
        self.whole = [
            x.new_empty((job.split.length, x.shape[0], _number(of[job.rank]), x.shape[3]))
            for x, of in zip(tensors, heads)
        ]
        sends = []
        for x, of, whole in zip(tensors, heads, self.whole):
            for here, there in _places(job.split, job.rank):
                whole[there].copy_(x[:, here, of[job.rank]].transpose(0, 1))
                for peer in range(ranks):
                    if peer != job.rank:
                        sends.append((x[:, here, of[peer]].transpose(0, 1).contiguous(), peer))
        receives = [
            (whole[there], peer)
            for whole in self.whole
            for peer in range(ranks)
            if peer != job.rank
            for _, there in _places(job.split, peer)
        ]
        self._works = Exchange(job.group, sends, receives, "heads")

    def wait(self) -> list[Tensor]:
        self._works.wait()
        return [x.transpose(0, 1) for x in self.whole]


def _to_rows(
    job: ParallelCall, wholes: list[Tensor], heads: list[list[slice]], shapes: list[list[int]]
) -> list[Tensor]:
    """Sums over ranks of this rank's rows, ``(batch, rows, heads, dim)``, of all rows of each rank's heads."""
    wholes = [x.transpose(0, 1).contiguous() for x in wholes]
    results = [
        x.new_zeros(shape, dtype=torch.float32 if _overlap(of) else x.dtype)
        for x, shape, of in zip(wholes, shapes, heads)
    ]
    peers = [peer for peer in range(job.split.ranks) if peer != job.rank]
    sends = [(x[there], peer) for x in wholes for peer in peers for _, there in _places(job.split, peer)]
    arrived = []
    for x, of, result in zip(wholes, heads, results):
        for peer in range(job.split.ranks):
            for here, there in _places(job.split, job.rank):
                rows, number = here.stop - here.start, _number(of[peer])
                part = x[there] if peer == job.rank else x.new_empty((rows, x.shape[1], number, x.shape[3]))
                arrived.append((result[:, here, of[peer]], part, peer))
    receives = [(part, peer) for _, part, peer in arrived if peer != job.rank]
    Exchange(job.group, sends, receives, "rows").wait()
    for target, part, _ in arrived:
        target += part.transpose(0, 1)
    return [result.to(x.dtype) for result, x in zip(results, wholes)]


def _number(heads: slice) -> int:
    return heads.stop - heads.start


def _overlap(heads: list[slice]) -> bool:
    return any(a.stop > b.start for a, b in zip(heads, heads[1:]))


def _heads(job: ParallelCall, q: Tensor, k: Tensor) -> tuple[list[slice], list[slice]]:
    pairs = [heads_of(rank, job.split.ranks, q.shape[2], k.shape[2]) for rank in range(job.split.ranks)]
    return [of_q for of_q, _ in pairs], [of_k for _, of_k in pairs]


def forward(
    job: ParallelCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The result of this rank's rows, its log-sum-exp, and the tensors of all rows for the backward pass."""
    of_q, of_k = _heads(job, q, k)
    whole_q, whole_k, whole_v = _ToHeads(job, [q, k, v], [of_q, of_k, of_k]).wait()
    out = whole_q.new_zeros((*whole_q.shape[:3], v.shape[3]))
    lse = q.new_full((q.shape[0], whole_q.shape[2], job.split.length), -torch.inf, dtype=torch.float32)
    own = terms.of(of_q[job.rank])
    for call in calls_of(job):
        rows, keys = slice(*call.rows), slice(*call.keys)
        part = attend(job, call, whole_q[:, rows], whole_k[:, keys], whole_v[:, keys], own)
        out[:, rows], lse[:, :, rows] = part
    shape = list(q.shape)
    by_row = lse.transpose(1, 2)[..., None]
    shard = _to_rows(job, [out, by_row], [of_q, of_q], [[*shape[:3], v.shape[3]], [*shape[:3], 1]])
    rows_lse = shard[1][..., 0].transpose(1, 2).contiguous()
    used = sum(here.stop - here.start for here, _ in _places(job.split, job.rank))
    rows_lse[:, :, used:] = -torch.inf
    return shard[0], rows_lse, (whole_q, whole_k, whole_v, out, lse)


def backward(
    job: ParallelCall,
    shapes: list[list[int]],
    whole: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor | None],
    terms: Terms,
    wants: tuple[bool, bool],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The gradients of this rank's q, k and v, and its part of those of sinks and slopes. ``shapes`` are q's, k's and
    v's."""
    q, k, v, out, lse = whole
    d_out, d_lse = gradients
    ranks = job.split.ranks
    pairs = [heads_of(rank, ranks, shapes[0][2], shapes[1][2]) for rank in range(ranks)]
    of_q, of_k = [x for x, _ in pairs], [x for _, x in pairs]
    travelling = [d_out] if d_lse is None else [d_out, d_lse.transpose(1, 2)[..., None]]
    arrived = _ToHeads(job, travelling, [of_q] * len(travelling)).wait()
    whole_d_lse = None if d_lse is None else arrived[1][..., 0].transpose(1, 2)
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    of_terms, own = TermSums(terms, wants), of_q[job.rank]
    for call in calls_of(job):
        rows, keys = slice(*call.rows), slice(*call.keys)
        made = (out[:, rows], lse[:, :, rows])
        given = (arrived[0][:, rows], None if whole_d_lse is None else whole_d_lse[:, :, rows])
        inputs = (q[:, rows], k[:, keys], v[:, keys])
        found_q, found_kv, others = differentiate(job, call, inputs, made, given, terms.of(own), wants)
        for x, part, where in zip(found, (found_q, *found_kv), (rows, keys, keys)):
            x[:, where] += part
        of_terms.add(own, others)
    return _to_rows(job, found, [of_q, of_k, of_k], shapes), of_terms.taken()
