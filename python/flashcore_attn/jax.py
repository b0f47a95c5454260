"""Attention on JAX arrays, under ``jit``, ``grad`` and ``vmap``: the functions of FlashAttention by name.

Arrays are ``[batch, row, head, dim]``, as those of ``jax.nn.dot_product_attention``. A call is one foreign
function of XLA, on the CPU and on CUDA devices. Errors in shapes are raised when a call runs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _flashcore
from ._errors import ArgumentError, DTypeError, invalid, invalid_words
from ._functional import _band_and_cap, _count, _flag

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_TARGET = "flashcore_attention"

_FLOATS = ("float16", "bfloat16", "float32")
#: The types of keys and values, which may be an 8-bit cache.
_KEYS = (*_FLOATS, "float8_e4m3fn", "float8_e5m2")


@functools.cache
def _register() -> None:
    library = ctypes.CDLL(_flashcore.__file__)
    host, cuda = map(jax.ffi.pycapsule, (library.flashcore_xla_host, library.flashcore_xla_cuda))
    jax.ffi.register_ffi_target(_TARGET, host, platform="cpu")
    jax.ffi.register_ffi_target(_TARGET, cuda, platform="CUDA")


class _Options(NamedTuple):
    """What a call is besides its arrays."""

    items: tuple[str, ...]
    lse: bool
    deterministic: bool


def flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False, *,
    learnable_sink: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of ``q [batch, rows, heads, dim]`` to ``k`` and ``v [batch, keys, kv_heads, dim]``.

    ``heads`` is a multiple of ``kv_heads``. A causal mask and windows are aligned to the last row and the last
    key. ``learnable_sink [heads]`` has gradients, too. With ``return_lse``, the result is ``(out, lse)``, and
    ``lse [batch, heads, rows]`` has gradients, too.
    """
    options = _options(causal, window_size, softmax_scale, softcap, return_lse, deterministic)
    return _attend(options, _arrays(q=q, k=k, v=v, sinks=_float32(learnable_sink)))


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False, *,
    learnable_sink: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention inside packed sequences: ``q``, ``k`` and ``v`` are ``[rows, heads, dim]``.

    Sequence ``i`` has the rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``, integers. The longest lengths are
    hints. The LSE is ``[heads, rows]``.
    """
    options = _options(causal, window_size, softmax_scale, softcap, return_lse, deterministic)
    bounds = (("q", max_seqlen_q), ("k", max_seqlen_k))
    longest = [f"longest_{of}={_count(f'max_seqlen_{of}', n)}" for of, n in bounds if n is not None]
    options = options._replace(items=(*options.items, *longest))
    named = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    lengths = {name: _integers(name, array) for name, array in named}
    return _attend(options, _arrays(q=q, k=k, v=v, sinks=_float32(learnable_sink), **lengths))


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, page_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Attention to a cache: ``(out, k_cache, v_cache)``, or ``(out, lse, k_cache, v_cache)``.

    ``k`` and ``v [batch, new rows, kv_heads, dim]`` are appended at ``cache_seqlens``, the lengths before the
    call: ``[batch]``, or one integer for all. The caches are updated in place if the caller donates them to
    ``jit``. With ``page_table [batch, pages]``, the caches are pools ``[page, row, kv_head, dim]``. The call
    has no gradients.
    """
    for one, a, other, b in (("k", k, "v", v), ("rotary_cos", rotary_cos, "rotary_sin", rotary_sin)):
        if (a is None) != (b is None):
            raise ArgumentError(f"{one} and {other} must both be given, or neither")
    if k is None and rotary_cos is not None:
        raise invalid("rotary_cos", f"a {type(rotary_cos).__name__}", "None without k and v")
    lengths = _integers("cache_seqlens", cache_seqlens)
    if lengths.ndim == 0:
        lengths = jnp.broadcast_to(lengths, jnp.shape(q)[:1])
    options = _options(causal, window_size, softmax_scale, softcap, return_lse, False)
    items = options.items
    if _flag("rotary_interleaved", rotary_interleaved) and rotary_cos is not None:
        items = (*items, "interleaved")
    inputs = _arrays(
        q=q,
        k=k_cache,
        v=v_cache,
        seqused_k=lengths,
        page_table=None if page_table is None else _integers("page_table", page_table),
        k_new=k,
        v_new=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
    )
    results = _results(inputs, return_lse)
    if k is None:
        return (*_call(items, inputs, results), inputs["k"], inputs["v"])
    # The caches are results that alias the arguments, which the call itself does not name.
    results.update(k=inputs["k"], v=inputs["v"])
    given = {("_" if name in ("k", "v") else "") + name: array for name, array in inputs.items()}
    names = list(given)
    aliases = {names.index("_" + name): list(results).index(name) for name in ("k", "v")}
    return _call(items, given, results, aliases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, inputs: dict[str, Any]) -> Any:
    computed = _call(options.items, inputs, _results(inputs, options.lse))
    return computed if options.lse else computed[0]


def _forward(options: _Options, inputs: dict[str, Any]) -> Any:
    out, lse = _call(options.items, inputs, _results(inputs, lse=True))
    return ((out, lse) if options.lse else out), (inputs, out, lse)


def _backward(options: _Options, saved: Any, gradient: Any) -> Any:
    inputs, out, lse = saved
    read = {**inputs, "out": out, "lse": lse}
    read.update(dict(zip(("d_out", "d_lse"), gradient)) if options.lse else {"d_out": gradient})
    of = {"q": "dq", "k": "dk", "v": "dv", "sinks": "d_sinks"}
    results = {of[name]: array for name, array in inputs.items() if name in of}
    items = ("backward", *(["deterministic"] if options.deterministic else []), *options.items)
    computed = dict(zip(results, _call(items, read, results)))
    return (
        {
            name: _sharded(computed[of[name]], array) if name in of else np.zeros(array.shape, jax.dtypes.float0)
            for name, array in inputs.items()
        },
    )


def _sharded(gradient: Any, array: Any) -> Any:
    """The gradient on the devices of its array, where the mesh has explicit axes."""
    wanted = jax.typeof(array).sharding
    return gradient if jax.typeof(gradient).sharding == wanted else jax.sharding.reshard(gradient, wanted)


_attend.defvjp(_forward, _backward)


def _call(
    items: tuple[str, ...],
    inputs: dict[str, Any],
    results: dict[str, Any],
    aliases: dict[int, int] | None = None,
) -> tuple[Any, ...]:
    """The custom call. The names of all arrays and the items are the text that describes it."""
    _register()
    names = ("_" if name.startswith("_") else name for name in (*inputs, *results))
    text = "; ".join([" ".join(names), *items])
    # The results are on the mesh of the arrays, and inside of `shard_map` vary as they do.
    kind = jax.typeof(next(iter(inputs.values())))
    whole = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole, manual_axis_type=kind.manual_axis_type)
        for x in results.values()
    ]
    # Dense arrays of several calls are a larger batch. Lengths and sinks belong to one call.
    dense = {"q", "k", "v", "out", "lse", "d_out", "d_lse"}
    method = "broadcast_all" if dense.issuperset(inputs) else "sequential"
    run = jax.ffi.ffi_call(_TARGET, shapes, vmap_method=method, input_output_aliases=aliases)
    return tuple(run(*inputs.values(), call=text))


def _results(inputs: dict[str, Any], lse: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """The results of a forward pass."""
    q, v = inputs["q"], inputs["v"]
    *batch, rows, heads, _ = q.shape
    results = {"out": jax.ShapeDtypeStruct((*batch, rows, heads, v.shape[-1]), q.dtype)}
    if lse:
        results["lse"] = jax.ShapeDtypeStruct((*batch, heads, rows), jnp.float32)
    return results


def _arrays(**named: Any) -> dict[str, Any]:
    """The arrays that a call has. Those of attention have rows, heads and dims."""
    for name in ("q", "k", "v"):
        if named[name] is None:
            raise invalid(name, None, "an array")
    arrays = {name: _array(name, array) for name, array in named.items() if array is not None}
    for name, accepted in (("q", _FLOATS), ("k", _KEYS), ("v", _KEYS)):
        if arrays[name].dtype.name not in accepted:
            raise DTypeError(invalid_words(f"the dtype of {name}", arrays[name].dtype, ", ".join(accepted)))
        if arrays[name].ndim not in (3, 4):
            raise ArgumentError(
                f"invalid value '{arrays[name].ndim}' for the number of dimensions of {name}: expected 4: "
                "batch, row, head, dim; or 3 without the batch"
            )
    return _varying(arrays)


def _varying(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, which inside of `shard_map` all vary over the axes over which one of them varies. The gradient of
    an array that did not is the sum over these axes."""
    axes = {name: jax.typeof(array).manual_axis_type.varying for name, array in arrays.items()}
    whole = frozenset().union(*axes.values())
    missing = {name: tuple(sorted(whole - own)) for name, own in axes.items() if whole != own}
    return {
        name: jax.lax.pcast(array, missing[name], to="varying") if name in missing else array
        for name, array in arrays.items()
    }


def _float32(array: Any) -> Any:
    return None if array is None else _array("learnable_sink", array, jnp.float32)


def _array(name: str, array: Any, dtype: Any = None) -> Any:
    try:
        return jnp.asarray(array, dtype)
    except (TypeError, ValueError, OverflowError):
        raise invalid(f"the type of {name}", type(array).__name__, "an array") from None


def _integers(name: str, array: Any) -> Any:
    """Lengths or pages of 32 bits. Larger ones fit no array, and stay as large as possible."""
    if array is None:
        raise invalid(name, None, "integers")
    array = _array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, "an integer type"))
    if array.dtype.itemsize < 4:
        return array.astype(jnp.int32)
    return array.clip(max=2**31 - 1).astype(jnp.int32)


def _options(
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    return_lse: bool,
    deterministic: bool,
) -> _Options:
    before, after, cap = _band_and_cap(causal, window_size, softcap)
    items = [f"{name}={keys}" for name, keys in (("keys_before", before), ("keys_after", after)) if keys >= 0]
    if softmax_scale is not None:
        try:
            items.append(f"scale={float(softmax_scale)!r}")
        except (TypeError, ValueError, OverflowError):
            raise invalid("softmax_scale", softmax_scale, "a number that is not traced, or None") from None
    if cap:
        items.append(f"softcap={cap!r}")
    return _Options(tuple(items), _flag("return_lse", return_lse), _flag("deterministic", deterministic))
