"""Results that ranks merge from the memory of each other."""

from __future__ import annotations

import os
import threading
import time

import pytest

pytest.importorskip("torch")

import host_peers
import others
import torch

from flashcore_attn.parallel import _results

#: Whether a graph repeats each of the calls.
CALLS = (False, False, False, True, True, False, True, False, False, True, True, False)
LATE = 0.02  # seconds
SHAPE = (1, 2, 4, 8)


class Late(host_peers.HostHandle):
    """One rank comes late to each barrier, and another leaves it late: it reads parts when an early rank may
    already make its next call."""

    def barrier(self, channel, milliseconds):
        if self.rank == 1:
            time.sleep(LATE)
        super().barrier(channel, milliseconds)
        if self.rank == 0:
            time.sleep(3 * LATE)


class WithoutBarrier(host_peers.HostResults):
    def barrier(self):
        if self.rank == 1:
            time.sleep(LATE)


class WithoutSecondBarrier(host_peers.HostResults):
    def merge(self, out, lse, group):
        self.barriers = 0
        return super().merge(out, lse, group)

    def barrier(self):
        self.barriers += 1
        if self.barriers == 1:
            super().barrier()


class WithOneSlot(host_peers.HostResults):
    def slot(self, recorded):
        return _results._TURNS if recorded else 0


class WithASharedSlot(host_peers.HostResults):
    def slot(self, recorded):
        return 0 if recorded else super().slot(recorded)


def merged(path, kind, ranks, calls):
    """The calls after which each rank, a thread, has a wrong result."""
    wrong, failed = [[] for _ in range(ranks)], []

    def run(rank):
        try:
            memory = kind(Late(os.path.join(path, "results"), rank, ranks, 3 << 10))
            for call, memory.recorded in enumerate(calls):
                # Late to write, too.
                if rank == 1:
                    time.sleep(LATE)
                out = torch.full(SHAPE, float((ranks + 1) ** 2 * call + rank))
                made, lse = memory.merge(out, torch.zeros(1, 4, 2), None)
                right = (ranks + 1) ** 2 * call + (ranks - 1) / 2
                exact = torch.full_like(lse, ranks).log()
                if (made - right).abs().max() > 1e-3 or (lse - exact).abs().max() > 1e-5:
                    wrong[rank].append(call)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_late_ranks_merge_the_parts_of_their_call(tmp_path, ranks):
    assert merged(tmp_path, host_peers.HostResults, ranks, CALLS) == [[]] * ranks


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (WithoutBarrier, (False,) * 4),
        (WithOneSlot, (False,) * 4),
        (WithoutSecondBarrier, (True,) * 4),
        (WithASharedSlot, (False, True, False, True)),
    ],
)
def test_each_part_of_the_protocol_is_needed(tmp_path, kind, calls):
    assert any(merged(tmp_path, kind, 2, calls)), "a rank merged parts of another call"


@pytest.mark.parametrize("number", [2, 4])
def test_decoding_writes_its_result_where_peers_read_it(ranks, number):
    told = ranks(number, others.of_decoding_in_place, (24, 5, 0))
    assert len({bits for bits, *_ in told}) == 1, "all ranks have equal bits"
    # Of three calls all; a result made elsewhere, and one that is too large for the memory, are not in place.
    assert [(turns, in_place) for _, turns, in_place in told] == [(4, 3)] * number
