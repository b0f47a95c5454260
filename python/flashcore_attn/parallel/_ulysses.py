"""The exchange of rows against heads (DeepSpeed-Ulysses): neighbouring ranks get all their rows of some heads each.

If these are all ranks, a rank then computes its heads alone. Else the keys of the heads go around the ring of the ranks
that have the same heads, and other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _stages
from ._calls import ParallelCall, Terms, TermSums
from ._exchange import Exchange, RankSubset
from ._split import SequenceSplit, joined

__all__ = ["backward", "degrees", "forward", "heads_of", "inner_of", "lacks"]


def lacks(heads: int, heads_k: int, ranks: int) -> str | None:
    """Why so many heads cannot be given to ranks, or None."""
    if heads % ranks:
        return f"{heads} heads are not a multiple of {ranks} ranks"
    if heads_k % ranks and ranks % heads_k:
        return f"{heads_k} KV heads neither divide {ranks} ranks nor are a multiple of them"
    return None


def degrees(ranks: int) -> list[int]:
    """The numbers of neighbours that leave a ring of further ranks."""
    return [degree for degree in range(2, ranks) if ranks % degree == 0]


def heads_of(rank: int, ranks: int, heads: int, heads_k: int) -> tuple[slice, slice]:
    """The query heads and the KV heads of a rank. Fewer KV heads than ranks are read by several ranks."""
    each, group = heads // ranks, heads // heads_k
    first, last = rank * each, (rank + 1) * each
    return slice(first, last), slice(first // group, (last - 1) // group + 1)


def _neighbours(job: ParallelCall) -> RankSubset:
    first = job.rank // job.together * job.together
    return RankSubset(job.group, tuple(range(first, first + job.together)))


def inner_of(job: ParallelCall) -> ParallelCall:
    """The call of the ranks that have the heads of this one."""
    split, member = joined(job.split, job.together), job.rank % job.together
    others = RankSubset(job.group, tuple(range(member, job.split.ranks, job.together)))
    schedule = "ring" if split.ranks > 1 else "all_gather"
    return job._replace(group=others, rank=job.rank // job.together, split=split, schedule=schedule, slices=1)


def _places(job: ParallelCall, member: int) -> tuple[tuple[slice, slice], ...]:
    """The rows of a neighbour, in its shard and in the joined one."""
    return _joined_places(job.split, job.together, _neighbours(job).ranks[member])


@functools.lru_cache(maxsize=256)
def _joined_places(split: SequenceSplit, together: int, rank: int) -> tuple[tuple[slice, slice], ...]:
    starts, at = {}, 0
    for first, last in joined(split, together).fragments[rank // together]:
        starts[first], at = at, at + last - first
    places, at = [], 0
    for first, last in split.fragments[rank]:
        places.append((slice(at, at + last - first), slice(starts[first], starts[first] + last - first)))
        at += last - first
    return tuple(places)


class _ToHeads:
    """Shards ``(batch, rows, heads, dim)`` on their way to the neighbours' rows of this rank's heads, ``(rows, batch,
    heads, dim)``."""

    def __init__(self, job: ParallelCall, tensors: Sequence[Tensor], heads: list[list[slice]]) -> None:
        inner, own = inner_of(job), job.rank % job.together
        peers = [member for member in range(job.together) if member != own]
        made = torch.Tensor.new_zeros if inner.is_padded else torch.Tensor.new_empty
        self.whole = [
            made(x, (inner.split.rows, x.shape[0], _number(of[own]), x.shape[3])) for x, of in zip(tensors, heads)
        ]
        sends = []
        for x, of, whole in zip(tensors, heads, self.whole):
            for here, there in _places(job, own):
                whole[there].copy_(x[:, here, of[own]].transpose(0, 1))
                for peer in peers:
                    sends.append((x[:, here, of[peer]].transpose(0, 1).contiguous(), peer))
        receives = [(whole[there], peer) for whole in self.whole for peer in peers for _, there in _places(job, peer)]
        self._works = Exchange(_neighbours(job), sends, receives, "heads")

    def wait(self) -> list[Tensor]:
        self._works.wait()
        return [x.transpose(0, 1) for x in self.whole]


def _to_rows(
    job: ParallelCall, wholes: list[Tensor], heads: list[list[slice]], shapes: list[list[int]]
) -> list[Tensor]:
    """This rank's rows, ``(batch, rows, heads, dim)``, of all rows of each neighbour's heads: sums of shared heads."""
    wholes = [x.transpose(0, 1).contiguous() for x in wholes]
    results = [
        x.new_zeros(shape, dtype=torch.float32 if _overlap(of) else x.dtype)
        for x, shape, of in zip(wholes, shapes, heads)
    ]
    own = job.rank % job.together
    peers = [peer for peer in range(job.together) if peer != own]
    sends = [(x[there], peer) for x in wholes for peer in peers for _, there in _places(job, peer)]
    arrived: list[tuple[Tensor, Tensor, int, bool]] = []
    for x, of, result in zip(wholes, heads, results):
        for peer in range(job.together):
            for here, there in _places(job, own):
                rows, number = here.stop - here.start, _number(of[peer])
                part = x[there] if peer == own else x.new_empty((rows, x.shape[1], number, x.shape[3]))
                arrived.append((result[:, here, of[peer]], part, peer, _overlap(of)))
    receives = [(part, peer) for _, part, peer, _ in arrived if peer != own]
    Exchange(_neighbours(job), sends, receives, "rows").wait()
    for target, part, _, adds in arrived:
        if adds:
            target += part.transpose(0, 1)
        else:
            target.copy_(part.transpose(0, 1))
    return [result.to(x.dtype) for result, x in zip(results, wholes)]


def _number(heads: slice) -> int:
    return heads.stop - heads.start


def _overlap(heads: list[slice]) -> bool:
    return any(a.stop > b.start for a, b in zip(heads, heads[1:]))


def _heads(job: ParallelCall, heads: int, heads_k: int) -> tuple[list[slice], list[slice]]:
    pairs = [heads_of(member, job.together, heads, heads_k) for member in range(job.together)]
    return [of_q for of_q, _ in pairs], [of_k for _, of_k in pairs]


def forward(
    job: ParallelCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The result of this rank's rows, its log-sum-exp, and the tensors of its heads for the backward pass."""
    of_q, of_k = _heads(job, q.shape[2], k.shape[2])
    whole_q, whole_k, whole_v = _ToHeads(job, (q, k, v), [of_q, of_k, of_k]).wait()
    out, lse = _stages.forward(inner_of(job), whole_q, whole_k, whole_v, terms.of(of_q[job.rank % job.together]))
    shape = list(q.shape)
    by_row = lse.transpose(1, 2)[..., None]
    shard = _to_rows(job, [out, by_row], [of_q, of_q], [[*shape[:3], v.shape[3]], [*shape[:3], 1]])
    rows_lse = shard[1][..., 0].transpose(1, 2).contiguous()
    used = sum(here.stop - here.start for here, _ in _places(job, job.rank % job.together))
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
    of_q, of_k = _heads(job, shapes[0][2], shapes[1][2])
    travelling = [d_out] if d_lse is None else [d_out, d_lse.transpose(1, 2)[..., None]]
    arrived = _ToHeads(job, travelling, [of_q] * len(travelling)).wait()
    whole_d_lse = None if d_lse is None else arrived[1][..., 0].transpose(1, 2)
    own, of_terms = of_q[job.rank % job.together], TermSums(terms, wants)
    given = (arrived[0], whole_d_lse)
    found, of_own = _stages.backward(inner_of(job), (q, k, v), (out, lse), given, terms.of(own), wants)
    of_terms.add(own, (of_own[0], of_own[1]))
    return _to_rows(job, found, [of_q, of_k, of_k], shapes), of_terms.taken()
