"""The memory of peers for ranks that are processes or threads on a CPU: a file that all of them map."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist

from flashcore_attn.parallel import _peers, _results

_COUNTS = 64  # numbers of a rank's flags; the last one is that of its barrier


class HostHandle:
    """As a handle of PyTorch's symmetric memory, but a rank's work is done when it is enqueued: what a rank
    would read too late is lost."""

    def __init__(self, path, rank, ranks, size):
        self.rank, self.ranks, self.size, self.barriers = rank, ranks, size, 0
        self._memory = torch.from_file(path + ".rows", True, ranks * size, dtype=torch.uint8)
        self._flags = torch.from_file(path + ".flags", True, ranks * _COUNTS, dtype=torch.int64)

    def get_buffer(self, owner, shape, dtype, offset):
        start, size = offset * dtype.itemsize, math.prod(shape) * dtype.itemsize
        assert start + size <= self.size
        start += owner * self.size
        return self._memory[start : start + size].view(dtype).view(*shape)

    def barrier(self, channel, milliseconds):
        self.barriers += 1
        self._flag(self.rank, _COUNTS - 1).fill_(self.barriers)
        for peer in range(self.ranks):
            until(lambda peer=peer: self._flag(peer, _COUNTS - 1).item() >= self.barriers)

    def put_signal(self, peer, channel, milliseconds):
        self._change(peer, self.rank, channel, 0)

    def wait_signal(self, peer, channel, milliseconds):
        self._change(self.rank, peer, channel, 1)

    def _change(self, owner, source, channel, known):
        flag = self._flag(owner, channel * self.ranks + source)
        until(lambda: flag.item() == known)
        flag.fill_(1 - known)

    def _flag(self, owner, number):
        return self._flags[owner * _COUNTS + number :][:1]


class OnHost:
    """Memory of peers in host memory, of a group or of threads. A test sets whether a graph records a
    call."""

    recorded = False

    def open(self, handle):
        self.rank, self.ranks, self.device, self.turn = handle.rank, handle.ranks, torch.device("cpu"), 0
        self._handle, self._milliseconds = handle, 0

    def is_recorded(self):
        return self.recorded


class HostPeers(OnHost, _peers.PeerMemory):
    """Messages."""

    def __init__(self, group, part):
        self.part, ranks = -(-part // 256) * 256, dist.get_world_size(group)
        self.is_behind = ranks > 2
        self.open(handle_of(group, _peers.SLOTS * self.part * max(1, ranks - 1)))

    @contextlib.contextmanager
    def beside(self):
        yield

    def mark(self):
        return None

    def join(self, mark):
        assert mark is None


class HostResults(OnHost, _results.ResultMemory):
    """Results."""

    def __init__(self, handle):
        self.part, self.in_place = handle.size // (_results._TURNS + 1), 0
        self.open(handle)

    def order(self):
        pass

    def merge(self, out, lse, group):
        place = self.places([self.rank], out.shape, out.dtype)[0]
        self.in_place += all(x.data_ptr() == y.data_ptr() for x, y in zip(place, (out, lse)))
        return super().merge(out, lse, group)


def handle_of(group, size):
    rank = dist.get_rank(group)
    path = [os.path.join(tempfile.mkdtemp(), "peers") if rank == 0 else None]
    dist.broadcast_object_list(path, group=group, group_src=0)
    handle = HostHandle(path[0], rank, dist.get_world_size(group), size)
    dist.barrier(group)
    return handle


def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError("a peer did not come within a minute")
        time.sleep(0)


@contextlib.contextmanager
def through_memory(group, part=1 << 20):
    """Exchanges of the group through memory of peers."""
    with _kept(group, _peers._memories, HostPeers(group, part)) as memory:
        yield memory


@contextlib.contextmanager
def through_results(group, part=1 << 16):
    """Merges of the group from memory of peers."""
    size = part * (_results._TURNS + 1)
    with _kept(group, _results._memories, HostResults(handle_of(group, size))) as memory:
        yield memory


@contextlib.contextmanager
def _kept(group, memories, memory):
    memories[group] = memory
    try:
        yield memory
    finally:
        del memories[group]
        dist.barrier(group)
