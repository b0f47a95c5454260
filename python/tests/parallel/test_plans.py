"""Plans of calls and of messages, without processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashcore_attn import parallel  # noqa: E402
from flashcore_attn.parallel import _calls, _cost, _plan, _stages  # noqa: E402

BANDS = [(-1, -1, 0), (-1, 0, 0), (7, 0, 0), (3, 4, 0), (-1, 5, 0), (9, -1, 0), (0, 0, 0)]
BANDS += [(-1, -1, 8), (-1, 0, 8), (5, 2, 8)]
DOCUMENTS = [None, (0, 1, 2, 9, 30, 31, 41), (0, 20, 41)]


def splits():
    for ranks in (1, 2, 3, 4, 5):
        for kind in ("zigzag", "contiguous", "documents"):
            for documents in DOCUMENTS:
                if documents or kind != "documents":
                    yield parallel.split_sequence(41, ranks, kind, documents)


def seen_by_definition(split, band):
    i, j = np.arange(split.length)[:, None], np.arange(split.length)[None]
    document = np.searchsorted(split.documents, np.arange(split.length), side="right") - 1
    start = np.asarray(split.documents)[document]
    seen = document[:, None] == document[None]
    if band.before >= 0:
        seen &= j >= i - band.before
    if band.after >= 0:
        seen &= j <= i + band.after
    if band.chunk:
        seen &= (i - start[:, None]) // band.chunk == (j - start[None]) // band.chunk
    return seen


def seen_in_calls(split, rank, plan, band, counts, owns):
    """Adds 1 for each pair that a call computes, and checks the positions that calls see."""
    held = [row for first, last in split.fragments[rank] for row in range(first, last)]
    buffer = np.full(plan.rows, -1)
    for piece in plan.pieces:
        theirs = [row for first, last in split.fragments[piece.rank] for row in range(first, last)]
        assert (buffer[piece.buffer : piece.buffer + piece.rows] == -1).all(), "a key is received twice"
        buffer[piece.buffer : piece.buffer + piece.rows] = theirs[piece.shard : piece.shard + piece.rows]
    assert (buffer >= 0).all(), "a key is missing"
    for call in plan.calls:
        ends = (*call.starts_q[1:], call.rows[1] - call.rows[0])
        for first, end, key, used in zip(call.starts_q, ends, call.starts_k, call.used_k):
            rows = np.array(held[call.rows[0] + first : call.rows[0] + end])
            keys = buffer[call.keys[0] + key : call.keys[0] + key + used]
            i, j = np.arange(len(rows))[:, None], np.arange(used)[None]
            aligned = i + used - len(rows)
            seen = np.ones((len(rows), used), bool)
            if call.before >= 0:
                seen &= j >= aligned - call.before
            if call.after >= 0:
                seen &= j <= aligned + call.after
            if band.is_positional:
                assert (rows[:, None] - keys[None] == aligned - call.shift - j).all(), "a distance is wrong"
            if band.chunk:
                seen &= (aligned - call.shift) // band.chunk == j // band.chunk
            counts[np.ix_(rows, keys)] += seen
            owns[rows] += call.own
            if call.own:
                assert set(rows) <= set(keys)


@pytest.mark.parametrize("numbers", BANDS, ids=str)
@pytest.mark.parametrize("scored", [False, True])
def test_calls_compute_each_visible_pair_once(numbers, scored):
    band = _plan.GlobalBand(*numbers, scored)
    for split in splits():
        right = seen_by_definition(split, band)
        for ring in (False, True):
            if ring and band.chunk:
                continue
            counts = np.zeros((split.length, split.length), int)
            owns = np.zeros(split.length, int)
            for rank in range(split.ranks):
                plans = _plan.ring_plans(split, rank, band) if ring else [_plan.gather_plan(split, rank, band)]
                for plan in plans:
                    seen_in_calls(split, rank, plan, band, counts, owns)
            assert (counts == right).all(), split
            assert (owns == 1).all(), "a row sees its own key in one call"


@pytest.mark.parametrize("numbers", BANDS[:7], ids=str)
def test_pairs_are_counted(numbers):
    band = _plan.GlobalBand(*numbers, False)
    for split in splits():
        plans = [_plan.gather_plan(split, rank, band) for rank in range(split.ranks)]
        counted = sum(_cost._pairs(call) for plan in plans for call in plan.calls)
        assert counted == seen_by_definition(split, band).sum()


def work(split, band):
    return [sum(map(_cost._pairs, _plan.gather_plan(split, rank, band).calls)) for rank in range(split.ranks)]


def test_work_is_balanced():
    causal = _plan.GlobalBand(-1, 0, 0, False)
    for ranks in (2, 4, 8):
        even = work(parallel.split_sequence(16 * ranks * ranks, ranks), causal)
        assert max(even) == min(even)
        draw = np.random.default_rng(ranks)
        documents = [0, *np.cumsum(draw.integers(1, 900, 40)).tolist()]
        split = parallel.split_sequence(documents[-1], ranks, "documents", documents)
        of_ranks = work(split, causal)
        assert max(of_ranks) <= 1.02 * sum(of_ranks) / ranks
        rows = [sum(last - first for first, last in each) for each in split.fragments]
        assert split.rows <= 1.02 * sum(rows) / ranks


def test_few_calls_and_few_bytes():
    causal = _plan.GlobalBand(-1, 0, 0, False)
    split = parallel.split_sequence(64, 2)
    for rank in range(2):
        assert len(_plan.gather_plan(split, rank, causal).calls) == 2 - rank, "rank 1 holds the middle"
        assert [len(plan.calls) for plan in _plan.ring_plans(split, rank, causal)] == [1, 1]
        assert [len(plan.pieces) for plan in _plan.ring_plans(split, rank, causal)] == [1, 1]
    window = _plan.GlobalBand(7, 0, 0, False)
    split = parallel.split_sequence(64, 4, "contiguous")
    for rank in range(4):
        away = [piece for piece in _plan.gather_plan(split, rank, window).pieces if piece.rank != rank]
        assert [(piece.rank, piece.rows) for piece in away] == ([(rank - 1, 7)] if rank else [])
    packed = parallel.split_sequence(64, 4, "documents", range(0, 65, 8))
    for rank in range(4):
        assert len(_plan.gather_plan(packed, rank, causal).calls) == 2, "sequences of all documents are one call"


def posted(split, rank, band, schedule):
    """The messages of a forward and backward pass, by rank, in the order in which this rank posts them."""
    job = _calls.ParallelCall(None, rank, split, band, None, 0.0, schedule, 1)
    stages = _stages.stages_of(job, 2)
    sends, receives = [[[] for _ in range(split.ranks)] for _ in range(2)]

    def post(stage, to_holder):
        for peer, piece in stage.sends:
            (receives if to_holder else sends)[peer].append((to_holder, piece.rows))
        for piece in stage.plan.pieces:
            if piece.rank != rank:
                (sends if to_holder else receives)[piece.rank].append((to_holder, piece.rows))

    post(stages[0], False)
    for i, stage in enumerate(stages):
        if i + 1 < len(stages):
            post(stages[i + 1], False)
        post(stage, True)
    return sends, receives


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
def test_two_ranks_post_their_messages_in_one_order(schedule):
    for split in splits():
        for numbers in BANDS[:7]:
            each = [posted(split, rank, _plan.GlobalBand(*numbers, False), schedule) for rank in range(split.ranks)]
            for (a, (sends, _)), (b, (_, receives)) in itertools.product(enumerate(each), repeat=2):
                assert sends[b] == receives[a], (split, numbers, a, b)


def test_shards_hold_each_row_once():
    x = torch.arange(41)
    for split in splits():
        shards = [parallel.shard(x, split, rank, 0) for rank in range(split.ranks)]
        assert {len(shard) for shard in shards} == {split.rows}
        held = [row for each in split.fragments for first, last in each for row in range(first, last)]
        assert sorted(held) == x.tolist()
        starts = np.asarray(split.documents)
        for rank, shard in enumerate(shards):
            used = sum(last - first for first, last in split.fragments[rank])
            of_rank = parallel.positions(split, rank)
            for row, position in zip(shard[:used].tolist(), of_rank[:used].tolist()):
                assert position == row - starts[np.searchsorted(starts, row, side="right") - 1]


def test_bad_splits_are_refused():
    import flashcore_attn

    for arguments, words in (
        ((-1, 2), "length"),
        ((8, 0), "ranks"),
        ((8, 2, "stripes"), "split"),
        ((8, 2, "documents"), "cu_seqlens"),
        ((8, 2, "zigzag", (0, 9)), "cu_seqlens"),
        ((8, 2, "zigzag", (0, 5, 4, 8)), "cu_seqlens"),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=f"for {words}: expected"):
            parallel.split_sequence(*arguments)


def test_heads_of_few_tiles_are_not_halved_on_a_gpu():
    split = parallel.split_sequence(1 << 16, 2)
    job = _calls.ParallelCall(None, 0, split, _plan.GlobalBand(-1, 0, 0, False), None, 0.0, "ring", 1)
    stages = _stages.stages_of(job, 8)
    heads = [slice(0, 4), slice(0, 8), slice(4, 8)]
    for keys, expected in ((None, heads), (8192, heads[1:2] * 2), (16384, heads)):
        assert [stage.heads for stage in _stages._in_backward(stages, keys)] == expected
