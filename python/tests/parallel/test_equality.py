"""Attention of a sharded sequence equals that of one process, with gradients, for every pair of features."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import cases

FACTORS = {
    "mask": tuple(cases.MASKS),
    "score": cases.SCORES,
    "split": cases.SPLITS,
    "schedule": ("all_gather", "ring", "ulysses", "ulysses_ring"),
    "dtype": tuple(cases.DTYPES),
    "heads_k": (12, 6, 2),
    "slices": (1, 2),
    "ranks": (2, 3, 4),
}


def is_possible(case):
    if case.get("schedule") in ("ring", "ulysses_ring") and "chunk" in case.get("mask", ""):
        return False
    if case.get("schedule") == "ulysses_ring" and case.get("ranks", 4) != 4:
        return False
    if case.get("score") == "alibi of batch" and "documents" in case.get("split", ""):
        return False
    if {"schedule", "heads_k", "ranks"} <= set(case) and case["schedule"] == "ulysses":
        ranks, heads_k = case["ranks"], case["heads_k"]
        return heads_k % ranks == 0 or ranks % heads_k == 0
    return True


def pairs_of(case):
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def every_pair():
    """Cases in which each value of each factor meets each value of each other factor."""
    values = [(name, value) for name, of in FACTORS.items() for value in of]
    missing = [frozenset(p) for p in itertools.combinations(values, 2) if p[0][0] != p[1][0] and is_possible(dict(p))]
    missing = dict.fromkeys(missing)
    while missing:
        case = dict(next(iter(missing)))
        for name, of in FACTORS.items():
            if name in case:
                continue
            possible = [{**case, name: value} for value in of if is_possible({**case, name: value})]
            case = max(possible, key=lambda extended: len(pairs_of(extended) & missing.keys()))
        covered = pairs_of(case) & missing.keys()
        for pair in covered:
            del missing[pair]
        yield case


CASES = [{name: case[name] for name in FACTORS} for case in every_pair()]


def name_of(case):
    return "-".join(str(value).replace(" ", "_") for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair_of_features(ranks, case):
    case = dict(case)
    ranks(case.pop("ranks"), cases.compare, *case.values())


EVERY_SPLIT = [
    (number, split, schedule)
    for number, split, schedule in itertools.product((1, 2, 3, 4), cases.SPLITS, FACTORS["schedule"])
    if is_possible({"schedule": schedule, "ranks": number})
]


@pytest.mark.parametrize(("number", "split", "schedule"), EVERY_SPLIT)
def test_causal_on_every_split(ranks, number, split, schedule):
    ranks(number, cases.compare, "causal", "plain", split, schedule, "float32", 12, 1)
