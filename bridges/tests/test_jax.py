"""`flashcore_attn.jax` beside the same mathematics in JAX's own operations."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashcore_attn import ArgumentError, DTypeError
from flashcore_attn.jax import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

# The reference on a GPU is in f32, too, and not in tf32.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 4)

BATCH, ROWS, KEYS, HEADS, KV_HEADS, DIM = 2, 13, 21, 4, 2, 16
#: Twice the rounding of the results, of values up to about 4.
CLOSE = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}


def drawn(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def inputs(dtype="float32", batch=BATCH):
    shapes = [(batch, ROWS, HEADS, DIM), (batch, KEYS, KV_HEADS, DIM), (batch, KEYS, KV_HEADS, DIM)]
    return [drawn(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def reference(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, sink=None):
    """(out, lse) in f32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    rows, keys = s.shape[-2:]
    offset = jnp.arange(keys)[None] - (jnp.arange(rows)[:, None] + keys - rows)
    before, after = window[0], 0 if causal else window[1]
    seen = (offset >= (-before if before >= 0 else -keys - rows)) & (offset <= (after if after >= 0 else keys))
    s = jnp.where(seen, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    if sink is not None:
        lse = jnp.logaddexp(lse, sink[None, :, None])
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(s - lse[..., None]), v), lse


def same(ours, theirs, dtype="float32"):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=CLOSE[dtype], rtol=0)


def gradients(function, *arguments):
    """The gradients of a weighted sum of the results."""

    def loss(*arguments):
        results = jax.tree.leaves(function(*arguments))
        return sum((drawn(9 + i, *x.shape) * x.astype(jnp.float32)).sum() for i, x in enumerate(results))

    return jax.grad(loss, argnums=tuple(range(len(arguments))))(*arguments)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "causal window": {"causal": True, "window": (4, -1)},
    "softcap": {"softcap": 1.5, "scale": 0.4},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_and_gradients_are_those_of_jax(case, dtype):
    named = dict(CASES[case])
    ours = {"softmax_scale": named.get("scale"), "window_size": named.get("window", (-1, -1))}
    ours |= {name: named[name] for name in ("causal", "softcap") if name in named}
    arrays = inputs(dtype)
    call = jax.jit(lambda *a: flash_attn_func(*a, **ours))
    out = call(*arrays)
    assert out.dtype == arrays[0].dtype
    same(out, reference(*arrays, **named)[0], dtype)
    theirs = gradients(lambda *a: reference(*a, **named)[0], *arrays)
    computed = gradients(call, *arrays)
    assert [g.dtype for g in computed] == [a.dtype for a in arrays]
    same(computed, theirs, dtype)


def test_half_precision_and_one_kv_head():
    q, k, v = drawn(0, 1, 5, 4, 64, dtype="float16"), *(drawn(i, 1, 7, 1, 64, dtype="float16") for i in (1, 2))
    same(flash_attn_func(q, k, v, causal=True), reference(q, k, v, causal=True)[0], "float16")


def test_the_lse_and_sinks_have_gradients():
    sink = drawn(7, HEADS)

    def ours(q, k, v, sink):
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True, deterministic=True)

    arrays = [*inputs(), sink]
    same(ours(*arrays), reference(*inputs(), causal=True, sink=sink))
    theirs = gradients(lambda q, k, v, sink: reference(q, k, v, causal=True, sink=sink), *arrays)
    same(gradients(ours, *arrays), theirs)


def test_packed_sequences_are_apart():
    q, k, v = (x[0] for x in inputs(batch=1))
    starts_q, starts_k = jnp.array([0, 4, 4, ROWS]), jnp.array([0, 9, 10, KEYS])

    def theirs(q, k, v):
        parts = []
        for (a, b), (c, d) in zip([(0, 4), (4, ROWS)], [(0, 9), (10, KEYS)]):
            parts.append(reference(q[None, a:b], k[None, c:d], v[None, c:d], causal=True))
        return jnp.concatenate([out[0] for out, _ in parts]), jnp.concatenate([lse[0] for _, lse in parts], axis=1)

    def ours(q, k, v):
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, 9, 11, causal=True, return_lse=True)

    same(jax.jit(ours)(q, k, v), theirs(q, k, v))
    same(gradients(ours, q, k, v), gradients(theirs, q, k, v))


def test_vmap_is_a_larger_batch():
    q, k, v = (drawn(i, 3, *x.shape) for i, x in enumerate(inputs()))
    ours = jax.vmap(jax.vmap(lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_lse=True)))
    expected = jax.vmap(lambda q, k, v: reference(q, k, v, causal=True))(q, k, v)
    # The inner function sees three dimensions.
    same(ours(q, k, v), expected)
    # Keys that all share.
    shared = jax.vmap(lambda q: flash_attn_func(q, k[0], v[0]))(q)
    same(shared, jax.vmap(lambda q: reference(q, k[0], v[0])[0])(q))
    # Lengths belong to one call each: they run one after the other.
    starts = jnp.array([[0, 4, ROWS], [0, 9, ROWS]])
    packed = jax.vmap(lambda q, starts: flash_attn_varlen_func(q, q, q, starts, starts))(q[0], starts)
    each = [flash_attn_varlen_func(x, x, x, s, s) for x, s in zip(q[0], starts)]
    same(packed, jnp.stack(each))


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_devices_of_a_mesh(axes):
    kinds = (getattr(jax.sharding.AxisType, axes),) * 2
    mesh = jax.make_mesh((2, 2), ("batch", "head"), axis_types=kinds, devices=jax.devices("cpu"))
    rows, every = jax.P("batch", None, "head", None), jax.P("batch", None, None, None)
    (q, k, v), sink = inputs(), drawn(7, HEADS)
    k, v = k[:, :, :1], v[:, :, :1]
    places = (rows, every, every, jax.P("head"))
    arrays = [jax.device_put(x, jax.NamedSharding(mesh, place)) for x, place in zip((q, k, v, sink), places)]

    def ours(q, k, v, sink):
        return flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)

    def summed(*arrays):
        return jax.lax.psum(ours(*arrays)[0], "batch")

    expected = reference(q, k, v, causal=True, sink=sink)
    theirs = gradients(lambda q, k, v, sink: reference(q, k, v, causal=True, sink=sink), q, k, v, sink)
    with jax.set_mesh(mesh):
        if axes == "Explicit":
            same(jax.jit(ours)(*arrays), expected)
            same(jax.jit(lambda *a: gradients(ours, *a))(*arrays), theirs)
            return
        lse = jax.P("batch", "head", None)
        sharded = jax.shard_map(ours, in_specs=places, out_specs=(rows, lse))
        same(jax.jit(sharded)(*arrays), expected)
        same(jax.jit(lambda *a: gradients(sharded, *a))(*arrays), theirs)
        over_batches = jax.shard_map(summed, in_specs=places, out_specs=jax.P(None, None, "head", None))
        same(jax.jit(over_batches)(*arrays), expected[0].sum(0, keepdims=True))


def test_a_cache_is_updated_in_place():
    room, page = 32, 8
    lengths = jnp.array([5, 11])
    q, k, v = (drawn(i, BATCH, 1, heads, DIM) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    caches = [drawn(5 + i, BATCH, room, KV_HEADS, DIM) for i in range(2)]
    full = [cache.at[jnp.arange(BATCH), lengths].set(new[:, 0]) for cache, new in zip(caches, (k, v))]
    expected = jnp.concatenate([
        reference(q[b, None], full[0][b, None, : n + 1], full[1][b, None, : n + 1])[0] for b, n in enumerate((5, 11))
    ])  # fmt: skip

    step = jax.jit(
        lambda q, k_cache, v_cache, k, v: flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths),
        donate_argnums=(1, 2),
    )
    given = [cache.copy() for cache in caches]
    before = [cache.unsafe_buffer_pointer() for cache in given]
    out, *after = step(q, *given, k, v)
    same(out, expected)
    same(after, full)
    assert [cache.unsafe_buffer_pointer() for cache in after] == before
    # Pages of a pool in another order, and a call that appends nothing.
    table = jnp.array([[3, 0, 7, 1], [2, 6, 5, 4]])
    pool = [jnp.zeros((8, page, KV_HEADS, DIM)).at[table].set(c.reshape(2, 4, page, KV_HEADS, DIM)) for c in full]
    out, lse, *_ = flash_attn_with_kvcache(
        q, *pool, cache_seqlens=lengths + 1, page_table=table, return_lse=True, causal=True
    )
    same(out, expected)
    assert lse.shape == (BATCH, HEADS, 1)


def test_rotary_embedding_is_applied_to_new_keys_and_queries():
    lengths, angles = jnp.array([3, 6]), drawn(3, 16, DIM // 2)
    q, k, v = (drawn(i, BATCH, 1, heads, DIM) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    caches = [drawn(5 + i, BATCH, 16, KV_HEADS, DIM) for i in range(2)]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turned(x):
        (a, b), c, s = (x[..., ::2], x[..., 1::2]), *(t[lengths][:, None, None] for t in (cos, sin))
        return jnp.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)

    out, *after = flash_attn_with_kvcache(q, *caches, k, v, cos, sin, lengths)
    expected, *written = flash_attn_with_kvcache(turned(q), *caches, turned(k), v, cache_seqlens=lengths)
    same((out, after), (expected, written))


def test_what_is_wrong_is_named():
    q, k, v = inputs()
    with pytest.raises(Exception, match="INVALID_ARGUMENT: v has heads = 2, but k has 3"):
        flash_attn_func(q, drawn(0, BATCH, KEYS, 3, DIM), v).block_until_ready()
    named = {
        "softcap": -1.0, "window_size": (-2, 0), "softmax_scale": "x", "causal": "no", "return_lse": 2,
        "deterministic": None,
    }  # fmt: skip
    for name, value in named.items():
        with pytest.raises(ArgumentError, match=f"{re.escape(str(value))}' for {name}: expected"):
            flash_attn_func(q, k, v, **{name: value})
    with pytest.raises(ArgumentError, match="'None' for k"):
        flash_attn_func(q, None, v)
    with pytest.raises(ArgumentError, match="'str' for the type of learnable_sink: expected an array"):
        flash_attn_func(q, k, v, learnable_sink="x")
    with pytest.raises(DTypeError, match="'int32' for the dtype of q: expected float16, bfloat16, float32"):
        flash_attn_func(q.astype(int), k, v)
    with pytest.raises(ArgumentError, match="'-1' for max_seqlen_q"):
        flash_attn_varlen_func(q[0], k[0], v[0], [0, ROWS], [0, KEYS], -1)
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        with pytest.raises(ArgumentError, match=f"{one} and {other} must both be given, or neither"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=3, **{other: k})
    with pytest.raises(ArgumentError, match="for rotary_cos: expected None without k and v"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=3, rotary_cos=k, rotary_sin=k)
    with pytest.raises(ValueError, match="'2' for the number of dimensions of q: expected 4: batch, row, head, dim"):
        flash_attn_func(q[0, 0], k, v)
    with pytest.raises(ValueError, match="'None' for cache_seqlens"):
        flash_attn_with_kvcache(q, k, v)
    with pytest.raises(DTypeError, match="'float32' for the dtype of cu_seqlens_q: expected an integer type"):
        starts = jnp.array([0.0, 4.0])
        flash_attn_varlen_func(q[0], k[0], v[0], starts, starts)


def test_integers_of_64_bits_and_one_length_for_all():
    q, k, v = inputs()
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=jnp.array([3, 3]))[0]
    same(flash_attn_with_kvcache(q, k, v, cache_seqlens=3)[0], expected)
    with jax.enable_x64(True):
        starts = [jnp.array([0, n]) for n in (ROWS, KEYS)]
        assert starts[0].dtype == jnp.int64
        same(flash_attn_varlen_func(q[0], k[0], v[0], *starts), flash_attn_func(q[:1], k[:1], v[:1])[0])
        with pytest.raises(Exception, match=f"'2147483647' for cu_seqlens_q.0.: expected 0 to {ROWS}"):
            flash_attn_varlen_func(q[0], k[0], v[0], starts[0] + 2**40, starts[1]).block_until_ready()


def test_the_handler_for_cuda_devices_reads_frames_of_xla(tmp_path):
    fake = Path(__file__).resolve().parents[2] / "crates/driver/tests/fake/libcuda.rs"
    rustc = ["rustc", "--edition", "2024", "--crate-type", "cdylib", "--check-cfg", "cfg(lacking)", fake, "-o"]
    subprocess.run([*rustc, tmp_path / "libcuda.so.1"], check=True)
    compiler = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*compiler, Path(__file__).with_name("xla_cuda.c"), "-ldl", "-o", tmp_path / "program"], check=True)
    library = next(Path(os.environ["FLASHCORE_HUB"]).glob("build/*cpu*/libflashcore.so"))
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "FLASHCORE_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run([tmp_path / "program", library], capture_output=True, text=True, env=os.environ | paths)
    assert ran.returncode == 0, ran.stderr
    without_address, other_type = ran.stdout.splitlines()
    assert "q" in without_address and "0" in without_address
    assert other_type.startswith("invalid value 'XLA's 12' for the type of k: expected f32, f16, bf16")


def test_the_example_trains():
    example = Path(__file__).resolve().parents[1] / "examples/jax_train.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True)
    assert re.fullmatch(r"loss with FlashCore (\S+) to \S+, with JAX \1 to \S+\n", ran.stdout), ran.stderr
