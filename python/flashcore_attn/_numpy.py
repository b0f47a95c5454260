"""Attention of NumPy arrays, and of other arrays on the CPU that NumPy can view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _flashcore
from ._errors import ArgumentError, DTypeError, UnsupportedError, invalid_words

if TYPE_CHECKING:
    from ._flashcore import Terms

Array = np.ndarray

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}  # bfloat16 is ml_dtypes'


def view(array: Any) -> np.ndarray[Any, Any]:
    """Another library's array on the CPU, over the same memory."""
    # DLPack comes last: JAX offers bfloat16 through `__array__`, and NumPy's DLPack does not support it.
    known = hasattr(array, "__array__") or hasattr(array, "__array_interface__")
    seen: np.ndarray[Any, Any] = np.asarray(array) if known else np.from_dlpack(array)
    return seen


def expand(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A view of ``shape``. Repeated dimensions have stride 0."""
    return np.broadcast_to(array, shape)


def reshape(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A view if possible, else a copy."""
    return array.reshape(shape)


def check_kinds(q: Any, k: Any, v: Any) -> None:
    """Refuses a mixture of NumPy arrays and others."""
    for name, array in (("k", k), ("v", v)):
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} is a {type(array).__name__}, q a NumPy array; they must be of one kind")


def admit(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The three arrays as they are."""
    check_kinds(q, k, v)
    return q, k, v


def _check(name: str, array: np.ndarray[Any, Any]) -> None:
    if type(array) is not Array and isinstance(array, np.ma.MaskedArray):
        expected = "a plain array, as its .data or .filled(...): the mask would be ignored"
        raise UnsupportedError(invalid_words(f"the type of {name}", "MaskedArray", expected), "masked array")
    if array.dtype.name not in _DTYPES or not array.dtype.isnative:
        hint = "; view it as ml_dtypes.bfloat16 if it holds bfloat16" if array.dtype.name == "uint16" else ""
        expected = f"float16, bfloat16 (of ml_dtypes) or float32, in native byte order{hint}"
        raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, expected))


def attend(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    heads: int,
    terms: Terms,
    want_lse: bool,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Attention of 4-D views whose axis ``heads`` is 1 or 2, and the log-sum-exp ``[batch, heads, sequence]``."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check(name, array)
    # From here on only the memory counts. A subclass could report another shape.
    q, k, v = (array if type(array) is Array else Array.view(array, Array) for array in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal")
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    batch, sequence = q.shape[0], q.shape[3 - heads]
    lse = np.empty((batch, q.shape[heads], sequence), np.float32) if want_lse else None
    q, k, v = _plain(q), _plain(k), _plain(v)  # copies must live as long as the call
    lse_address = None if lse is None else lse.ctypes.data
    _flashcore.attention_cpu(
        _describe(q, heads),
        _describe(k, heads),
        _describe(v, heads),
        _describe(out, heads),
        lse_address,
        _DTYPES[q.dtype.name],
        terms,
    )
    return out, lse


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself, or a copy if its last dimension is strided or its elements are misaligned."""
    size = array.itemsize
    contiguous = array.shape[-1] <= 1 or array.strides[-1] == size
    if contiguous and array.flags.aligned and all(stride % size == 0 for stride in array.strides):
        return array
    return array.copy(order="C")


def _describe(
    array: np.ndarray[Any, Any], heads: int
) -> tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]]:
    if array.ndim != 4:
        raise ArgumentError(f"an array of shape {array.shape} has {array.ndim} dimensions; attention takes 4")
    batch, head, row, dim = (0, heads, 3 - heads, 3)
    shape, strides = array.shape, [stride // array.itemsize for stride in array.strides]
    return (
        array.ctypes.data,
        (shape[batch], shape[head], shape[row], shape[dim]),
        (strides[batch], strides[head], strides[row], strides[dim]),
    )
