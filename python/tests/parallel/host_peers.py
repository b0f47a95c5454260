"""The memory of peers for ranks that are processes on a CPU: a file that all of them map."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist

from flashcore_attn.parallel import _peers

_COUNTS = 64  # numbers of a rank's flags and of its barrier


class HostPeers(_peers.PeerMemory):
    """As on GPUs, but a rank's work is done when it is enqueued: what a rank would read too late is lost."""

    def __init__(self, group, part):
        self.part = -(-part // 256) * 256
        self.rank, self.ranks, self.turn = dist.get_rank(group), dist.get_world_size(group), 0
        self.is_behind, self.barriers = self.ranks > 2, 0
        path = [os.path.join(tempfile.mkdtemp(), "peers") if self.rank == 0 else None]
        dist.broadcast_object_list(path, group=group, group_src=0)
        self._bytes = _peers.SLOTS * self.part * max(1, self.ranks - 1)
        size = self.ranks * self._bytes
        self._memory = torch.from_file(path[0] + ".rows", True, size, dtype=torch.uint8)
        self._flags = torch.from_file(path[0] + ".flags", True, self.ranks * _COUNTS, dtype=torch.int64)
        dist.barrier(group)

    def view(self, owner, source, at, shape, dtype):
        number = source - (source > owner)
        start = owner * self._bytes + (self.slot * (self.ranks - 1) + number) * self.part + at
        size = math.prod(shape) * dtype.itemsize
        return self._memory[start : start + size].view(dtype).view(*shape)

    @contextlib.contextmanager
    def beside(self):
        yield

    def mark(self):
        return None

    def join(self, mark):
        assert mark is None

    def is_recorded(self):
        return False

    def barrier(self):
        self.barriers += 1
        own = self.rank * _COUNTS + _peers.SLOTS * self.ranks
        self._flags[own] += 1
        mine = self._flags[own].item()
        for peer in range(self.ranks):
            until(lambda peer=peer: self._flags[peer * _COUNTS + _peers.SLOTS * self.ranks].item() >= mine)

    def flag(self, owner, source, slot):
        at = owner * _COUNTS + slot * self.ranks + source
        return self._flags[at : at + 1]

    def signal(self, peer, slot):
        flag = self.flag(peer, self.rank, slot)
        until(lambda: flag.item() == 0)
        flag.fill_(1)

    def wait(self, peer, slot):
        flag = self.flag(self.rank, peer, slot)
        until(lambda: flag.item() == 1)
        flag.fill_(0)


def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError("a peer did not come within a minute")
        time.sleep(0)


@contextlib.contextmanager
def through_memory(group, part=1 << 20):
    """Exchanges of the group through memory of peers."""
    memory = HostPeers(group, part)
    _peers._memories[group] = memory
    try:
        yield memory
    finally:
        del _peers._memories[group]
        dist.barrier(group)
