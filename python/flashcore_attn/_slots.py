"""Writing keys and values to slots of a cache, as engines do it before attention."""

from __future__ import annotations

from typing import Any

from ._errors import ArgumentError, DTypeError, UnsupportedError, dimensions, invalid, invalid_words
from ._functional import backend_of

__all__ = ["reshape_and_cache"]

_CACHES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Writes keys and values to slots of a cache in place: vLLM's ``reshape_and_cache_flash``.

    Args:
        key: ``(rows, heads_k, head_dim)``, PyTorch's tensor of float16, bfloat16 or float32, with any strides between
            rows. Rows beyond those of ``slot_mapping`` are padding.
        value: as ``key``, with v's head dim.
        key_cache: ``(pages, page_size, heads_k, head_dim)`` with any strides between rows, of key's type, or of 8-bit
            floats: ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, or ``torch.uint8`` with ``kv_cache_dtype``.
        value_cache: as ``key_cache``.
        slot_mapping: ``(rows,)``, int64 or int32: row ``slot % page_size`` of page ``slot // page_size``. A negative
            slot is left out.
        kv_cache_dtype: ``"auto"``: the caches' own type; ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``.
        k_scale: ``()``, ``(1,)`` or ``(heads_k,)``, float32, for 8-bit caches: an element is divided by the factor and
            rounded. None stands for 1.
        v_scale: the factors of the values.

    On the CPU, a slot outside of the cache is refused before anything is written. On a GPU, slots are read by the
    kernel alone, which leaves such a slot out; the call may be captured in a graph.

    Raises:
        ArgumentError: shapes that do not fit; a slot outside of the cache, on the CPU.
        DTypeError: element types that differ or are not supported.
        UnsupportedError: arrays of other kinds than PyTorch's.
    """
    backend = backend_of(key)
    if not hasattr(backend, "reshape_and_cache"):
        kind = invalid_words("the type of key", type(key).__name__, "a PyTorch tensor")
        raise UnsupportedError(kind, "kind of arrays")
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in _CACHES:
        raise invalid("kv_cache_dtype", kv_cache_dtype, ", ".join(_CACHES))
    named = (("key", key, 3), ("value", value, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    for name, x, wanted in (*named, ("slot_mapping", slot_mapping, 1)):
        backend.check_array(name, x)
        if x.ndim != wanted:
            raise ArgumentError(f"{name} has {dimensions(x.ndim)}; it takes {wanted}")
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            backend.check_array(name, factor)
    backend.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def check_types(key: str, cache: str, kv_cache_dtype: str) -> str:
    """The type of the caches' elements, by the names of the dtypes."""
    wanted = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(kv_cache_dtype)
    if wanted is not None and cache in ("uint8", wanted):
        return wanted
    if wanted is None and cache in (key, "float8_e4m3fn", "float8_e5m2"):
        return cache
    expected = f"{key}, float8_e4m3fn or float8_e5m2" if wanted is None else f"uint8 or {wanted}"
    raise DTypeError(
        invalid_words("the dtype of key_cache", cache, f"{expected}, with kv_cache_dtype={kv_cache_dtype!r}")
    )
