"""The functions for TVM-FFI in the wheel's library, called from JAX through `jax-tvm-ffi`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_tvm_ffi
import numpy as np
import pytest
import tvm_ffi

import flashcore_attn
from flashcore_attn.jax import flash_attn_func

LIBRARY = tvm_ffi.load_module(flashcore_attn._flashcore.__file__)


def test_a_call_of_jax_reaches_the_same_attention():
    jax_tvm_ffi.register_ffi_target("attention", LIBRARY.attention, ["attrs.call", "args", "rets"], platform="cpu")
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 9, 4, 16)) for i in range(3))
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((2, 4, 9), jnp.float32)]

    @jax.jit
    def call(q, k, v):
        return jax.ffi.ffi_call("attention", shapes)(q, k, v, call="q k v out lse; causal; scale=0.5")

    expected = flash_attn_func(q, k, v, 0.5, causal=True, return_lse=True)
    for ours, theirs in zip(call(q, k, v), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(Exception, match="k is missing: the problem has it"):
        jax.ffi.ffi_call("attention", shapes[:1])(q, v, call="q v out")[0].block_until_ready()


def test_numpy_arrays_are_written_in_place():
    q = np.random.default_rng(0).normal(size=(1, 5, 2, 16)).astype(np.float32)
    out = np.empty_like(q)
    LIBRARY.attention("q k v out", *map(tvm_ffi.from_dlpack, (q, q, q, out)))
    np.testing.assert_allclose(out, flash_attn_func(q, q, q), atol=1e-6)
