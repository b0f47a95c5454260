"""Memory of the other ranks of a host, into which a rank copies rows itself.

The copy engines of a GPU move them. No multiprocessor takes part, so that they move beside a kernel that
fills the GPU; the kernel with which NCCL moves rows waits until such a kernel ends.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Landing", "PeerExchange", "PeerMemory", "SharedMemory", "made_by_all", "may_reach", "memory_of", "most_of",
    "prepare",
]  # fmt: skip

_Memory = TypeVar("_Memory", bound="SharedMemory")

#: The bytes to a multiple of which a message begins.
_ALIGNMENT = 256
#: The most of a device's memory for messages, and the exchanges that have memory at once.
_SHARE, SLOTS = 1 / 8, 3


class SharedMemory:
    """Memory of each rank of a group, which all of them reach: slots of ``part`` bytes or more."""

    def __init__(self, group: Any, device: torch.device, slots: int, part: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        #: Bytes of a slot.
        self.part = -(-part // _ALIGNMENT) * _ALIGNMENT
        named = dist.group.WORLD if group is None else group
        self.rank, self.ranks, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._memory = symmetric.empty(slots * self.part, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, named.group_name)
        self._milliseconds = _time_out(named, device)

    def at(self, owner: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of ``owner`` from a byte on."""
        found: Tensor = self._handle.get_buffer(owner, list(shape), dtype, start // dtype.itemsize)
        return found

    def is_recorded(self) -> bool:
        """Whether a graph records the work, which it then repeats in one slot."""
        return torch.cuda.is_current_stream_capturing()

    def barrier(self) -> None:
        """The current stream waits until all ranks have come here."""
        self._handle.barrier(0, self._milliseconds)


class PeerMemory(SharedMemory):
    """Memory for messages of each rank, which the other ranks write. Exchanges take three slots in turn: two
    are under way in the backward pass while one is read. Each has room for the messages of each other
    rank."""

    def __init__(self, group: Any, device: torch.device, part: int) -> None:
        ranks = dist.get_world_size(group)
        super().__init__(group, device, SLOTS * (ranks - 1), part)
        self.turn, self.is_behind, self._stream = 0, ranks > 2, torch.cuda.Stream(device)

    @property
    def slot(self) -> int:
        """The slot of this turn."""
        return self.turn % SLOTS

    def view(self, owner: int, source: int, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of ``owner`` for a message of ``source`` in this turn, ``at`` bytes after its first one."""
        number = source - (source > owner)
        return self.at(owner, (self.slot * (self.ranks - 1) + number) * self.part + at, shape, dtype)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work after that of the current stream, which later work of this stream does not wait for."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """An event after the work beside the current stream."""
        return self._stream.record_event()

    def join(self, mark: Any) -> None:
        """The current stream waits for the work before an event."""
        torch.cuda.current_stream().wait_event(mark)

    def signal(self, peer: int, slot: int) -> None:
        """Tells a rank that its messages in a slot are written, once it has seen the last such signal."""
        self._handle.put_signal(peer, 1 + slot, self._milliseconds)

    def wait(self, peer: int, slot: int) -> None:
        """Waits for a rank's signal."""
        self._handle.wait_signal(peer, 1 + slot, self._milliseconds)


def _time_out(group: Any, device: torch.device) -> int:
    """The milliseconds after which the group gives up."""
    try:
        return int(group._get_backend(device).options._timeout.total_seconds() * 1e3)
    except (AttributeError, RuntimeError):
        return 600_000


# Of each group its memory, or None where ranks cannot reach the memory of each other.
_memories: Any = weakref.WeakKeyDictionary()


def memory_of(group: Any) -> PeerMemory | None:
    """The memory of a group's ranks, if there is any."""
    found: PeerMemory | None = _memories.get(dist.group.WORLD if group is None else group)
    return found


def may_reach(group: Any, device: torch.device, hosts: int) -> bool:
    """Whether ranks write into the memory of each other, as far as is known."""
    known = _memories.get(dist.group.WORLD if group is None else group, ())
    return device.type == "cuda" and hosts <= 1 and known is not None


def prepare(group: Any, device: torch.device, hosts: int, part: int) -> None:
    """Makes room for messages of ``part`` bytes of each rank. All ranks of the group call it alike."""
    key, ranks = dist.group.WORLD if group is None else group, dist.get_world_size(group)
    if device.type != "cuda" or hosts > 1 or ranks == 1:
        return
    known = _memories.get(key)
    if key in _memories and (known is None or known.part >= part):
        return
    most = most_of(device, SLOTS * (ranks - 1))
    if part <= most and known is not None:  # longer sequences may follow
        part = min(max(part, known.part * 3 // 2), most)
    if part > most or torch.cuda.is_current_stream_capturing():
        _memories.pop(key, None)  # its slots are too small
        return

    def make() -> PeerMemory:
        _memories.pop(key, None)
        return PeerMemory(group, device, part)

    _memories[key] = made_by_all(group, device, make)


def most_of(device: torch.device, slots: int) -> int:
    """The most bytes of a slot."""
    return int(torch.cuda.get_device_properties(device).total_memory * _SHARE) // slots


def made_by_all(group: Any, device: torch.device, make: Callable[[], _Memory]) -> _Memory | None:
    """What all ranks could make, or None on each of them."""
    torch.cuda.synchronize(device)  # no rank reaches any more for memory that is given back
    dist.barrier(group)
    try:
        made: _Memory | None = make()
    except (ImportError, RuntimeError, AttributeError):
        made = None
    reached = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(reached, dist.ReduceOp.MIN, group)
    return made if reached.item() else None


class Landing(NamedTuple):
    """A message whose memory the exchange chooses."""

    shape: tuple[int, ...]
    like: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.like.dtype

    def made(self) -> Tensor:
        """New memory for it."""
        return self.like.new_empty(self.shape)


class _Places:
    """The places of messages that follow each other in the memory of a rank."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory, self._next = memory, {}  # type: PeerMemory, dict[tuple[int, int], int]

    def take(self, owner: int, source: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        at = self._next.get((owner, source), 0)
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if at + size > self._memory.part:
            raise AssertionError(f"messages of {at + size} bytes for {self._memory.part}")
        self._next[owner, source] = at + size
        return self._memory.view(owner, source, at, shape, dtype)


class PeerExchange:
    """Messages that this rank writes into the memory of others, and theirs. ``others`` are the ranks that take part.

    A :class:`Landing` is received in memory that a later exchange overwrites. That one must not begin before
    all ranks have read it. With two ranks, the signals of the exchanges between them say so, unless one was
    made ``ahead``, before the reads of the one before it. Else there is a barrier.
    """

    def __init__(
        self, memory: PeerMemory, others: Sequence[int], sends: list[tuple[Tensor, int]],
        receives: list[tuple[Tensor | Landing, int]], ahead: bool,
    ) -> None:  # fmt: skip
        self._memory, self._others, self._kept = memory, others, sends
        memory.turn += 1
        self._slot = memory.slot
        self.received: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        places, rank = _Places(memory), memory.rank
        for to, peer in receives:
            if not math.prod(to.shape):
                self.received.append(to if isinstance(to, Tensor) else to.made())
                continue
            place = places.take(rank, peer, to.shape, to.dtype)
            self.received.append(to if isinstance(to, Tensor) else place)
            if isinstance(to, Tensor):
                self._copies.append((to, place))
        with memory.beside():
            if ahead or memory.is_behind or memory.is_recorded():
                memory.barrier()
            memory.is_behind = ahead or memory.ranks > 2
            for x, peer in sends:
                if x.numel():
                    places.take(peer, rank, x.shape, x.dtype).copy_(x)
            for peer in others:
                memory.signal(peer, self._slot)
        self._mark = memory.mark()

    def wait(self) -> None:
        """The current stream waits for all messages."""
        for peer in self._others:
            self._memory.wait(peer, self._slot)
        self._memory.join(self._mark)
        for to, place in self._copies:
            to.copy_(place)
        self._copies, self._kept = [], []
