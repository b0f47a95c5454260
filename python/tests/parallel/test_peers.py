"""Rows that ranks write into the memory of each other, instead of messages."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import others

CASES = [
    (ranks, mask, split, schedule, heads_k, slices)
    for (ranks, schedule, slices), (mask, split), heads_k in itertools.product(
        ((2, "ring", 1), (2, "all_gather", 1), (2, "all_gather", 2), (2, "ulysses", 1), (3, "ring", 1),
         (3, "all_gather", 2), (4, "ulysses_ring", 1)),
        (("causal", "zigzag"), ("left", "contiguous"), ("full", "zigzag of documents"), ("causal", "documents")),
        (12, 2),
    )
]  # fmt: skip


@pytest.mark.parametrize(("number", "mask", "split", "schedule", "heads_k", "slices"), CASES)
def test_rows_arrive_in_the_memory_of_peers(ranks, number, mask, split, schedule, heads_k, slices):
    ranks(number, others.through_peers, mask, split, schedule, heads_k, slices)


def test_a_message_larger_than_its_room_is_refused(ranks):
    ranks(2, others.a_large_message)
