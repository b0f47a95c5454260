"""Rows of tensors that are sent between ranks, and what all ranks must agree on before.

Sends and receives are posted together and waited for on the stream that reads the rows: with NCCL the host does not
wait. A rank that never answers is an error on the others after the time-out of the group.
"""

from __future__ import annotations

import hashlib
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import ArgumentError, FlashCoreError, GroupError, invalid
from ._peers import Landing, PeerExchange, memory_of

__all__ = ["Exchange", "RankSubset", "agree", "answering", "number"]


@contextmanager
def answering(group: Any, what: str) -> Iterator[None]:
    """Turns errors of the group into one that says what this rank was doing."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, FlashCoreError):
            raise
        rank = dist.get_rank(group)
        words = f"rank {rank} could not {what}: another rank ended, failed, or did not answer within the time-out"
        raise GroupError(f"{words} of the group ({error})") from error


class RankSubset(NamedTuple):
    """Some ranks of a process group, in an order of their own."""

    group: Any
    ranks: tuple[int, ...]


class Exchange:
    """Messages of contiguous rows that are under way. The tensors must not change before :meth:`wait`.

    Where the group's ranks reach the memory of each other, all of them make the exchange, also without
    messages. ``received`` has the messages, of which a :class:`Landing` is valid until the third exchange
    after this one. With ``ahead``, an earlier exchange of this rank may not have been read yet.
    """

    def __init__(
        self, group: Any, sends: list[tuple[Tensor, int]], receives: Sequence[tuple[Tensor | Landing, int]], what: str,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        base, members = (group.group, group.ranks) if isinstance(group, RankSubset) else (group, None)
        memory = memory_of(base)
        self._peers: PeerExchange | None = None
        if isinstance(group, RankSubset):
            sends, receives = ([(x, group.ranks[peer]) for x, peer in messages] for messages in (sends, receives))
            group = group.group
        self._group, self._what = group, what
        self._works: list[Any] = []
        if memory is not None:
            others = [peer for peer in members or range(memory.ranks) if peer != memory.rank]
            with answering(group, f"exchange {what}"):
                self._peers = PeerExchange(memory, others, sends, list(receives), ahead)
            self.received = self._peers.received
            return
        places = [(x.made() if isinstance(x, Landing) else x, peer) for x, peer in receives]
        self.received = [x for x, _ in places]
        operations = []
        # Messages of two ranks arrive in the order in which both of them post them.
        for function, messages in ((dist.isend, sends), (dist.irecv, places)):
            for x, peer in messages:
                if x.numel():
                    operations.append(dist.P2POp(function, x, _global(group, peer), group))
        self._kept = (sends, places)
        if operations:
            with answering(group, f"exchange {what}"):
                self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        """The current stream waits for all messages. In host memory the caller waits."""
        with answering(self._group, f"exchange {self._what}"):
            if self._peers is not None:
                self._peers.wait()
            for work in self._works:
                work.wait()
        self._works, self._kept = [], ([], [])


def _global(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


#: Numbers in a header: a flag, the rows of a shard, extents, and hashes. Also the hash of the host's name.
_HEADER = 16
_NAMES = (
    "refused", "the dtype", "the batch", "the rows of a shard", "the heads of q", "the heads of k", "the head_dim of q",
    "the head_dim of v", "the split", "the options", "the schedule", "whether gradients are recorded",
)  # fmt: skip


def number(value: object) -> int:
    """A number for a value, equal on all hosts."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


# Of each group, the headers that its ranks have agreed on, with the number of hosts.
_agreements: Any = weakref.WeakKeyDictionary()


# Where headers are compared in each call: reading them costs no wait for a device there.
_EACH_TIME = {"cpu"}


def agree(group: Any, device: torch.device, header: list[int], refusal: FlashCoreError | None = None) -> int:
    """Compares a header over all ranks, on a GPU the first time that this rank has it alone, and returns the number of
    hosts.

    Args:
        group: the process group.
        device: where its tensors are.
        header: what must be equal on all ranks, in the order of the names.
        refusal: the error with which this rank refuses its arguments. It is raised, and other ranks raise another one.

    Raises:
        ArgumentError: ranks differ, or another rank refused its arguments.
        GroupError: a rank did not answer.
    """
    known = _agreements.setdefault(dist.group.WORLD if group is None else group, {})
    key = tuple(header)
    if refusal is not None or key not in known or device.type in _EACH_TIME:
        try:
            told = _headers(group, device, [int(refusal is not None), *header])
        except GroupError:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        _compare(told)
        known[key] = len({theirs[-1] for theirs in told})
    hosts: int = known[key]
    return hosts


def _headers(group: Any, device: torch.device, own: list[int]) -> list[list[int]]:
    """The headers of all ranks."""
    own += [0] * (_HEADER - 1 - len(own)) + [number(socket.gethostname())]
    mine = torch.tensor(own, dtype=torch.int64).to(device)
    all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with answering(group, "agree on the arguments"):
        dist.all_gather(all_of, mine, group=group)
        return torch.stack(all_of).tolist()


def _compare(told: list[list[int]]) -> None:
    for rank, theirs in enumerate(told):
        if theirs[0]:
            raise ArgumentError(f"rank {rank} refused its arguments; its error says why")
    for i, name in enumerate(_NAMES):
        for rank, theirs in enumerate(told):
            if theirs[i] == told[0][i]:
                continue
            # Hashes say nothing to a reader.
            is_hash = i == 1 or i > 7
            value = f"another one on rank {rank} than on rank 0" if is_hash else f"{theirs[i]} on rank {rank}"
            raise invalid(name, value, "one on all ranks" if is_hash else f"{told[0][i]}, that of rank 0")
