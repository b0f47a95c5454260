"""Which rows of a sequence each rank holds, and the rows of tensors by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import ArgumentError, invalid

__all__ = ["SequenceSplit", "positions", "shard", "shard_zigzag", "split_sequence", "unshard"]

#: The ways to split a sequence over ranks.
SPLITS = ("zigzag", "contiguous", "documents")


@dataclass(frozen=True)
class SequenceSplit:
    """Which rows of a sequence each rank holds. :func:`split_sequence` makes it; equal splits compare equal."""

    #: Of each rank, the rows ``[first, last)`` of the whole sequence that it holds, in the order in which it
    #: holds them.
    fragments: tuple[tuple[tuple[int, int], ...], ...]
    #: The first row of each packed document, and the end of the last.
    documents: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Plans are kept by split, and a split of many documents has many numbers."""
        return hash((self.fragments, self.documents))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.fragments)

    @property
    def length(self) -> int:
        """The rows of the whole sequence."""
        return self.documents[-1]

    @functools.cached_property
    def rows(self) -> int:
        """The rows of each shard. Shards that have fewer are padded at their end."""
        return max(map(_rows_of, self.fragments))


def split_sequence(length: int, ranks: int, split: str = "zigzag", cu_seqlens: Any = None) -> SequenceSplit:
    """Splits a sequence over ranks.

    Args:
        length: the rows of the whole sequence. It need not be a multiple of anything: shards are padded.
        ranks: the number of ranks.
        split: ``"zigzag"``: the sequence has ``2 * ranks`` chunks, and rank ``r`` holds chunks ``r`` and ``2 * ranks -
            1 - r``, so that causal attention is equal work. ``"contiguous"``: rank ``r`` holds chunk ``r`` of
            ``ranks``: for windows and for attention that is not causal. ``"documents"``: each document is split in
            zigzag; a rank holds the first chunks of all documents, then the second ones.
        cu_seqlens: the first row of each packed document, and the end of the last: integers, or a tensor in host
            memory. None for one document.

    Raises:
        ArgumentError: lengths that do not ascend from 0 to ``length``, an unknown split.
    """
    if not isinstance(length, int) or not 0 <= length < 2**31:
        raise invalid("length", length, "an integer of 0 to 2^31 - 1")
    if not isinstance(ranks, int) or ranks < 1:
        raise invalid("ranks", ranks, "a positive integer")
    if split not in SPLITS:
        raise invalid("split", split, " or ".join(SPLITS))
    if split == "documents" and cu_seqlens is None:
        raise invalid("cu_seqlens", None, "the documents' first rows, which the split 'documents' needs")
    return _split(length, ranks, split, _documents(cu_seqlens, length))


@functools.lru_cache(maxsize=256)
def joined(split: SequenceSplit, together: int) -> SequenceSplit:
    """The split in which each ``together`` neighbouring ranks hold their rows together, in ascending order."""
    groups = (split.fragments[first : first + together] for first in range(0, split.ranks, together))
    return SequenceSplit(tuple(tuple(sorted(sum(group, ()))) for group in groups), split.documents)


def _documents(cu_seqlens: Any, length: int) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (0, length)
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            words = "a tensor in host memory: the split decides what is sent, and reading a GPU would wait for it"
            raise invalid("the device of cu_seqlens", cu_seqlens.device, words)
        cu_seqlens = cu_seqlens.tolist()
    starts = tuple(int(x) for x in cu_seqlens)
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != length or any(a > b for a, b in zip(starts, starts[1:])):
        raise invalid("cu_seqlens", starts, f"ascending integers from 0 to {length}")
    # A document without rows has no query and no key.
    return (0, *(b for a, b in zip(starts, starts[1:]) if a < b)) if length else (0, 0)


@functools.lru_cache(maxsize=256)
def _split(length: int, ranks: int, split: str, documents: tuple[int, ...]) -> SequenceSplit:
    if split == "contiguous":
        of_ranks = [[_chunk((0, length), ranks, rank)] for rank in range(ranks)]
    elif split == "zigzag":
        of_ranks = [[_chunk((0, length), 2 * ranks, i) for i in _pair(ranks, rank)] for rank in range(ranks)]
    else:
        of_ranks = [[] for _ in range(ranks)]
        each = list(enumerate(zip(documents, documents[1:])))
        for half in (0, 1):
            for number, document in each:
                for rank in range(ranks):
                    # Chunks that have a row more go to another rank for each document.
                    chunk = _even_chunk(document, 2 * ranks, _pair(ranks, (rank + number) % ranks)[half])
                    of_ranks[rank].append(chunk)
    return SequenceSplit(tuple(tuple(x for x in each if x[0] < x[1]) for each in of_ranks), documents)


def _pair(ranks: int, rank: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _chunk(rows: tuple[int, int], chunks: int, number: int) -> tuple[int, int]:
    """A chunk; the last ones may be shorter or empty, as those of ``torch.chunk``."""
    first, last = rows
    size = -(-(last - first) // chunks)
    return min(first + number * size, last), min(first + (number + 1) * size, last)


def _even_chunk(rows: tuple[int, int], chunks: int, number: int) -> tuple[int, int]:
    """A chunk; lengths differ by one row at most."""
    first, last = rows
    return first + (last - first) * number // chunks, first + (last - first) * (number + 1) // chunks


def _rows_of(fragments: Sequence[tuple[int, int]]) -> int:
    return sum(last - first for first, last in fragments)


def shard(x: Tensor, split: SequenceSplit, rank: int, dim: int = 1) -> Tensor:
    """The rows of a rank, of a tensor that has those of the whole sequence along ``dim``. Padding is 0.

    Everything that goes with a position is sharded alike: tokens, labels, rotary tables, position numbers
    (:func:`positions`).
    """
    if not 0 <= rank < split.ranks:
        raise invalid("rank", rank, f"0 to {split.ranks - 1}")
    if x.shape[dim] != split.length:
        raise invalid(f"dimension {dim} of x", x.shape[dim], f"{split.length}, the rows of the sequence")
    parts = [x.narrow(dim, first, last - first) for first, last in split.fragments[rank]]
    missing = split.rows - _rows_of(split.fragments[rank])
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        parts.append(x.new_zeros(shape))
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def shard_zigzag(
    x: Tensor, group: dist.ProcessGroup | None = None, *, dim: int = 1, cu_seqlens: Any = None
) -> tuple[Tensor, SequenceSplit]:
    """This rank's rows in zigzag, and the split. With ``cu_seqlens`` each packed document is split in zigzag."""
    kind = "zigzag" if cu_seqlens is None else "documents"
    split = split_sequence(x.shape[dim], dist.get_world_size(group), kind, cu_seqlens)
    return shard(x, split, dist.get_rank(group), dim), split


@torch.no_grad()
def unshard(x: Tensor, split: SequenceSplit, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """The tensor of the whole sequence, on every rank, of the shards of all ranks. It has no gradient."""
    if x.shape[dim] != split.rows:
        raise invalid(f"dimension {dim} of x", x.shape[dim], f"{split.rows}, the rows of a shard")
    if dist.get_world_size(group) != split.ranks:
        raise ArgumentError(f"the split is for {split.ranks} ranks, the group has {dist.get_world_size(group)}")
    x = x.contiguous()
    shards = [torch.empty_like(x) for _ in range(split.ranks)]
    dist.all_gather(shards, x, group=group)
    shape = list(x.shape)
    shape[dim] = split.length
    whole = x.new_empty(shape)
    for part, fragments in zip(shards, split.fragments):
        at = 0
        for first, last in fragments:
            whole.narrow(dim, first, last - first).copy_(part.narrow(dim, at, last - first))
            at += last - first
    return whole


def positions(split: SequenceSplit, rank: int, device: Any = None) -> Tensor:
    """The position of each row of a rank in its document, int64, for rotary embedding. Padding has position 0."""
    whole = torch.cat([torch.arange(last - first) for first, last in zip(split.documents, split.documents[1:])])
    return shard(whole, split, rank, 0).to(device)
