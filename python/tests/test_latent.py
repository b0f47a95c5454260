"""Tests of latent attention: the values are a view of the first columns of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashcore_attn as fa

DIM, VALUE_DIM = 576, 512


def reference(q: Any, pool: Any, table: Any, lengths: Any, scale: float) -> tuple[Any, Any]:
    """Output and log-sum-exp of one row of queries for each sequence, in float64."""
    batch, _, heads, _ = q.shape
    out, lse = np.zeros((batch, 1, heads, VALUE_DIM)), np.full((batch, heads, 1), -np.inf)
    for b, length in enumerate(lengths):
        keys = pool[table[b]].reshape(-1, DIM)[:length].astype(np.float64)
        if length:
            scores = scale * q[b, 0].astype(np.float64) @ keys.T
            lse[b, :, 0] = np.logaddexp.reduce(scores, axis=1)
            out[b, 0] = np.exp(scores - lse[b]) @ keys[:, :VALUE_DIM]
    return out, lse


def made(page: int, lengths: list[int], heads: int, kind: Any) -> Any:
    """Queries, a pool of pages with NaN beyond the lengths, a page table, and the lengths."""
    random = np.random.default_rng(page + heads)
    batch, pages = len(lengths), -(-max(lengths) // page)
    pool = np.full((batch * pages + 2, page, 1, DIM), np.nan, kind)
    table = random.permutation(batch * pages + 2)[: batch * pages].astype(np.int32).reshape(batch, pages)
    for b, length in enumerate(lengths):
        for row in range(length):
            pool[table[b, row // page], row % page] = random.standard_normal((1, DIM))
    q = random.standard_normal((batch, 1, heads, DIM)).astype(kind)
    return q, pool, table, np.array(lengths, np.int32)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("heads", [1, 16, 20])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_values_in_keys(page: int, heads: int, kind: Any) -> None:
    q, pool, table, lengths = made(page, [0, 1, max(page - 1, 1), page, page + 1, 37], heads, kind)
    scale = 192**-0.5
    expected = reference(q, pool, table, lengths, scale)
    call = {"page_table": table, "cache_seqlens": lengths, "softmax_scale": scale, "return_softmax_lse": True}
    out, lse = fa.flash_attn_with_kvcache(q, pool, pool[..., :VALUE_DIM], **call)
    tolerance = 4e-3 if kind == np.float16 else 2e-5
    np.testing.assert_allclose(out, expected[0], atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], atol=tolerance)
    copied, _ = fa.flash_attn_with_kvcache(q, pool, pool[..., :VALUE_DIM].copy(), **call)
    assert np.array_equal(copied, out)
    other = fa.flash_attn_with_kvcache(q, pool, pool[..., 64:], **call)[0]
    assert not np.allclose(other[1:], out[1:], atol=tolerance)


def test_appended_rows_are_values_too() -> None:
    q, pool, table, lengths = made(4, [2, 7], 16, np.float32)
    new = np.random.default_rng(1).standard_normal((2, 1, 1, DIM)).astype(np.float32)
    whole = pool.copy()
    for b, length in enumerate(lengths):
        whole[table[b, length // 4], length % 4] = new[b, 0]
    expected, _ = reference(q, whole, table, lengths + 1, 0.1)
    out = fa.flash_attn_with_kvcache(
        q, pool, pool[..., :VALUE_DIM], new, new[..., :VALUE_DIM], cache_seqlens=lengths, page_table=table,
        softmax_scale=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(pool, whole)
