"""Tests of ``invariant``: a row has equal bits in every batch, and in decode and prefill."""

from __future__ import annotations

import numpy as np
import pytest

import flashcore_attn
from flashcore_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, HEADS_K, DIM, PAGE = 6, 2, 64, 16
LENGTHS = [333, 1, 90, 257, 64]
OPTIONS = {"causal": True, "softcap": 30.0, "invariant": "phase"}


def rows(sequence, heads, seed):
    """The rows of a sequence: the same ones in every call."""
    generator = np.random.default_rng([sequence, seed])
    return generator.standard_normal((LENGTHS[sequence], heads, DIM)).astype(np.float16)


def whole(sequence):
    return rows(sequence, HEADS, 0), rows(sequence, HEADS_K, 1), rows(sequence, HEADS_K, 2)


def starts(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def prefill(sequence, **options):
    return flash_attn_func(*(x[None] for x in whole(sequence)), **{**OPTIONS, **options})[0]


def test_a_packed_batch_has_the_rows_of_its_sequences():
    every = [whole(sequence) for sequence in range(len(LENGTHS))]
    for invariant in ("batch", "phase"):
        alone = [prefill(sequence, invariant=invariant) for sequence in range(len(LENGTHS))]
        for order in ([0, 1, 2, 3, 4], [3, 0], [4, 2, 1, 0, 3] * 3):
            ends = starts([LENGTHS[sequence] for sequence in order])
            packed = (np.concatenate([every[sequence][i] for sequence in order]) for i in range(3))
            out = flash_attn_varlen_func(*packed, ends, ends, **{**OPTIONS, "invariant": invariant})
            for place, sequence in enumerate(order):
                assert np.array_equal(out[ends[place] : ends[place + 1]], alone[sequence]), (order, sequence)


def cache(sequences, longest):
    """Pools of pages, in the opposite order of their numbers, and the page table."""
    each = -(-longest // PAGE)
    pools = [np.full((len(sequences) * each, PAGE, HEADS_K, DIM), np.nan, np.float16) for _ in range(2)]
    table = np.arange(len(sequences) * each, dtype=np.int32)[::-1].reshape(len(sequences), each).copy()
    for entries, sequence in zip(table, sequences):
        for pool, x in zip(pools, whole(sequence)[1:]):
            for row, values in enumerate(x):
                pool[entries[row // PAGE], row % PAGE] = values
    return pools, table


def test_decode_from_pages_has_the_rows_of_the_prefill():
    sequences, alone = [2, 0, 3], {sequence: prefill(sequence) for sequence in range(len(LENGTHS))}
    pools, table = cache(sequences, max(LENGTHS))
    for chunk in (1, 5):
        for back in (0, 1, 40):
            lengths = [LENGTHS[sequence] - back for sequence in sequences]
            q = np.stack([whole(s)[0][length - chunk : length] for s, length in zip(sequences, lengths)])
            used = np.array(lengths, np.int32)
            out = flash_attn_with_kvcache(q, *pools, cache_seqlens=used, page_table=table, **OPTIONS)
            for place, (sequence, length) in enumerate(zip(sequences, lengths)):
                assert np.array_equal(out[place], alone[sequence][length - chunk : length])


def test_without_it_bits_differ():
    """The comparison can fail: with few rows the default plan is another one."""
    q, k, v = (x[None] for x in whole(0))
    last = flash_attn_func(q[:, -1:], k, v, causal=True)
    assert not np.array_equal(last, flash_attn_func(q, k, v, causal=True)[:, -1:])


@pytest.mark.parametrize("wrong", ["Phase", "", True, 1, np.array(["batch"])])
def test_other_values_are_refused(wrong):
    q = np.zeros((1, 4, 2, 32), np.float32)
    ends = np.array([0, 4], np.int32)
    for call in (
        lambda: flash_attn_func(q, q, q, invariant=wrong),
        lambda: flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, invariant=wrong),
        lambda: flash_attn_with_kvcache(q, q, q, invariant=wrong),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=r"for invariant: expected 'batch', 'phase' or None$"):
            call()


def test_operators_carry_it(monkeypatch):
    """Compiled code, calls that autograd records, and appends to a cache."""
    torch = pytest.importorskip("torch")
    from flashcore_attn import _flashcore

    seen = []
    compute = _flashcore.attend

    def attend(*call):
        features = call[9] if len(call) > 9 else None
        seen.append(features[11] if features else "")
        return compute(*call)

    monkeypatch.setattr(_flashcore, "attend", attend)
    q, k, v = (torch.from_numpy(x)[None].float() for x in whole(2))
    compiled = torch.compile(lambda q: flash_attn_func(q, k, v, invariant="phase"), backend="aot_eager")
    leaf = q.clone().requires_grad_()
    new = k[:, :1].clone()
    lengths = torch.tensor([9], dtype=torch.int32)
    for call in (
        lambda: flash_attn_func(q, k, v, invariant="phase"),
        lambda: compiled(q),
        lambda: flash_attn_func(leaf, k, v, invariant="phase"),
        lambda: torch.func.vjp(lambda q: flash_attn_func(q, k, v, invariant="phase"), q),
        lambda: flash_attn_with_kvcache(
            q[:, :1], k.clone(), v.clone(), new, new, cache_seqlens=lengths, invariant="phase"
        ),
    ):
        seen.clear()
        call()
        assert seen[:1] == ["phase"]
    flash_attn_func(leaf, k, v, invariant="phase").sum().backward()
    assert leaf.grad.isfinite().all()
    torch.library.opcheck(
        torch.ops.flashcore_attn.attention_with.default,
        (q[:, :5], k, v, 2, False, -1, 0, None, 0.0, True, *flashcore_attn._torch._flat(
            flashcore_attn._features.Features(invariant="batch")
        )),
    )  # fmt: skip
