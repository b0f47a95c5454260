"""Extreme numbers and sizes: many batch entries, scales and caps of any size, and NaN in keys that rows do not see."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOLERANCE, every_kind, reference

import flashcore_attn


def drawn(tensors, shape, dtype, factors=(1, 1, 1)):
    """Q, K and V of normal values, each multiplied by its factor."""
    draws = [factor * np.random.default_rng(seed).standard_normal(shape) for seed, factor in enumerate(factors)]
    return [tensors.of(draw.astype(np.float32), dtype) for draw in draws]


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000)])
def test_more_entries_than_a_grid_has_in_y(tensors, dtype, batch, heads):
    q, k, v = drawn(tensors, (batch, heads, 2, 16), dtype)
    out = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True)
    want, _ = reference(*map(tensors.array, (q, k, v)), causal=True)
    assert np.abs(tensors.array(out) - want).max() < 2 * TOLERANCE[dtype]


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [129.0, 1e6, 9e15, -9e15])
def test_a_scale_of_any_size_with_small_inputs(tensors, dtype, scale):
    size = abs(scale) ** -0.5
    if dtype == "float16" and size < 1e-3:
        pytest.skip("f16 has no such numbers")
    q, k, v = drawn(tensors, (1, 2, 70, 64), dtype, (size / 2, size / 2, 1))
    out = flashcore_attn.scaled_dot_product_attention(q, k, v, scale=scale)
    want, _ = reference(*map(tensors.array, (q, k, v)), scale=scale)
    assert np.abs(tensors.array(out) - want).max() < 4 * TOLERANCE[dtype]


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [2e3, 9e15, 1e30])
def test_a_scale_of_any_size_with_large_inputs(tensors, dtype, scale):
    q, k, v = tensors.three(70, 70, 2, 2, 64, dtype, batch=1)
    out = flashcore_attn.flash_attn_func(q, k, v, softmax_scale=scale)
    rows = [tensors.array(x).transpose(0, 2, 1, 3) for x in (q, k, v)]
    want, _ = reference(*rows, scale=scale)
    assert np.abs(tensors.array(out).transpose(0, 2, 1, 3) - want).max() < TOLERANCE[dtype]


@every_kind
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_a_bias_is_added_and_a_mask_hides(tensors, number, where):
    """`docs/src/guide/bias.md` has the table."""
    draws = [np.random.default_rng(seed).standard_normal((1, 2, 70, 64)).astype(np.float32) for seed in range(3)]
    hidden = np.zeros((70, 70), bool)
    hidden[:50, 40] = True
    bias = tensors.of(np.where(hidden, -np.inf, 0.0).astype(np.float32), "float16")
    mask = tensors.of(~hidden, "bool")

    def call(attn_mask):
        q, k, v = (tensors.of(draw, "float16") for draw in draws)
        return tensors.array(flashcore_attn.scaled_dot_product_attention(q, k, v, attn_mask))[:, :, :50]

    def equal(x, y):
        """Within two roundings to float16: another kernel may compute inputs that a bfloat16 pair cannot hold."""
        return np.abs(x - y).max() <= 1e-3

    clean = call(mask)
    assert equal(clean, call(bias))
    draws[where][:, :, 40, 3] = number
    masked, biased = call(mask), call(bias)
    on_cpu = tensors.kind != "cuda"
    if where == 1:
        assert equal(masked, clean)
        assert np.isnan(biased).all() if np.isnan(number) else np.isnan(biased).any()
    else:
        others = np.arange(64) != 3
        assert equal(masked[..., others], clean[..., others])
        assert equal(masked, clean) if on_cpu else np.isnan(masked[..., 3]).any()
        assert equal(biased[..., others], clean[..., others])
        assert np.isnan(biased[..., 3]).all()
