"""Results of the ranks of a host over different keys, which each rank merges from where they lie.

The kernel that attends to a rank's keys writes its result into memory that all ranks read. A barrier follows
it, and then the kernel that merges: neither a copy nor a kernel of NCCL lies between them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._merge import merge_states
from ._exchange import answering
from ._peers import SharedMemory, made_by_all, most_of

__all__ = ["ResultMemory", "layout", "place_of", "prepared"]

#: Slots of calls that are made once, which take them in turn. One more is for calls that a graph repeats.
_TURNS = 2


def layout(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """The byte at which the log-sum-exps of a result ``(batch, rows, heads, dim)`` begin, and the bytes of
    both."""
    of_out = -(-math.prod(shape) * dtype.itemsize // 16) * 16
    return of_out, of_out + -(-math.prod(shape[:3]) * 4 // 16) * 16


class ResultMemory(SharedMemory):
    """A result and its log-sum-exp of each rank, in memory of that rank. All ranks read it, only that rank
    writes.

    A call writes this rank's part to a slot (W), waits until all ranks have come there (B), and merges the
    parts in that slot from the memory of all ranks (M). Why W overwrites no part that another rank still
    reads:

    All ranks make the same calls in the same order, repetitions of recorded ones among them, and each rank
    makes one after another. Let j be the last call before i in i's slot. W of i must come after M of j on
    each rank. It does if each rank comes to a barrier after its M of j, and this rank passes that barrier
    before its W of i.

    - Calls that are made once take two slots in turn, and recorded ones take none of these. If i is made
      once, such a call lies between j and i, and its B is that barrier.
    - A recorded call has one slot in all repetitions, also in two that follow each other. So recorded calls
      end with a second barrier. They share a slot of their own: with a slot of the others, a repetition could
      directly follow a call in that slot that has no second barrier.

    A call that failed before B has written to the slot of this turn, which the next call writes again. Memory
    that is too small for a call is replaced. Graphs go on with the old memory, other calls with the new one,
    and the argument holds for each of them. One stream makes a rank's calls one after another; of several, W
    waits for the one with the call before. When graphs are repeated is the user's choice, who must order them
    as collectives of NCCL.
    """

    def __init__(self, group: Any, device: torch.device, part: int) -> None:
        super().__init__(group, device, _TURNS + 1, max(1, part))
        self.turn, self._stream = 0, None  # type: int, Any

    def slot(self, recorded: bool) -> int:
        """The slot of this call."""
        return _TURNS if recorded else self.turn % _TURNS

    def places(self, owners: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Memory of ranks for a result in this call, and for its log-sum-exp."""
        recorded = self.is_recorded()
        if not recorded:
            self.order()
        start = self.slot(recorded) * self.part
        of_lse, behind = (shape[0], shape[2], shape[1]), start + layout(shape, dtype)[0]
        return [(self.at(x, start, shape, dtype), self.at(x, behind, of_lse, torch.float32)) for x in owners]

    def order(self) -> None:
        """The current stream waits for the one of the call before."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def merge(self, out: Tensor, lse: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        """The result over the keys of all ranks. ``out`` may lie in its place already."""
        parts = self.places(range(self.ranks), out.shape, out.dtype)
        recorded = self.is_recorded()
        if recorded:
            _recorded.add(self)
        else:
            self.turn += 1
        for x, place in zip((out, lse), parts[self.rank]):
            if x.data_ptr() != place.data_ptr():
                place.copy_(x)
        with answering(group, "exchange results"):
            self.barrier()
        merged: tuple[Tensor, Tensor] = merge_states(*zip(*parts))
        if recorded:
            self.barrier()
        return merged


# Of each group its memory, or None where ranks cannot reach the memory of each other.
_memories: Any = weakref.WeakKeyDictionary()
# What graphs refer to, which may be repeated until the process ends.
_recorded: set[ResultMemory] = set()


def _known(group: Any, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> ResultMemory | None:
    found: ResultMemory | None = _memories.get(dist.group.WORLD if group is None else group)
    fits = found is not None and found.device == device and found.part >= layout(shape, dtype)[1]
    return found if fits else None


def place_of(group: Any, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Memory for this rank's next result and its log-sum-exp, from which :meth:`ResultMemory.merge` takes
    them; None if there is none, as before the first call."""
    memory = _known(group, device, shape, dtype)
    return None if memory is None else memory.places([memory.rank], shape, dtype)[0]


def prepared(group: Any, out: Tensor, hosts: int) -> ResultMemory | None:
    """Memory for results like ``out``, if ranks reach the memory of each other. All ranks of the group call
    it alike."""
    key, ranks, device = dist.group.WORLD if group is None else group, dist.get_world_size(group), out.device
    found = _known(group, device, out.shape, out.dtype)
    if found is not None or device.type != "cuda" or hosts > 1 or ranks == 1:
        return found
    known, part, most = _memories.get(key), layout(out.shape, out.dtype)[1], most_of(device, _TURNS + 1)
    if (known is None and key in _memories) or part > most or torch.cuda.is_current_stream_capturing():
        return None
    if known is not None:  # larger batches may follow
        part = min(max(part, known.part * 3 // 2), most)
    _memories[key] = made_by_all(group, device, lambda: ResultMemory(group, device, part))
    made: ResultMemory | None = _memories[key]
    return made
