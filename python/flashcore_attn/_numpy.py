"""Attention of NumPy arrays, and of other arrays on the CPU that NumPy can view."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _dropout, _features, _flashcore, _trace
from ._errors import ArgumentError, DTypeError, UnsupportedError, dimensions, invalid_words
from ._graphs import leave_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._features import Append, Features
    from ._flashcore import DescribedAppend, DescribedFeatures, Terms
    from ._quantize import Options

Array = np.ndarray

# bfloat16 and the 8-bit types are ml_dtypes'.
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", **_FP8}
# As Rust numbers the types.
_DIGITS = {"f16": 0, "bf16": 1, "f32": 2, "e4m3": 3, "e5m2": 4}


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
    """Rejects a mixture of NumPy arrays and others."""
    for name, array in (("k", k), ("v", v)):
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} is a {type(array).__name__}, q a NumPy array; they must be of one kind")


def admit(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The three arrays. From here on only the memory is used: a subclass could report another shape."""
    check_kinds(q, k, v)
    return _unwrapped("q", q), _unwrapped("k", k), _unwrapped("v", v)


def _check_unmasked(name: str, array: np.ndarray[Any, Any]) -> None:
    if type(array) is not Array and isinstance(array, np.ma.MaskedArray):
        expected = "a plain array, as its .data or .filled(...): the mask would be ignored"
        raise UnsupportedError(invalid_words(f"the type of {name}", "MaskedArray", expected), "masked array")


#: What is checked before views of an array are made: NumPy's arrays keep their memory.
check_given = _check_unmasked


def _unwrapped(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory of an array of a subclass."""
    if type(array) is Array:
        return array
    _check_unmasked(name, array)
    return Array.view(array, Array)


def _check(name: str, array: np.ndarray[Any, Any]) -> None:
    _check_unmasked(name, array)
    if array.dtype.name not in _DTYPES or not array.dtype.isnative:
        hint = "; view it as ml_dtypes.bfloat16 if it holds bfloat16" if array.dtype.name == "uint16" else ""
        expected = (
            f"float16, bfloat16, float8_e4m3fn, float8_e5m2 (of ml_dtypes) or float32, in native byte order{hint}"
        )
        raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, expected))


def attend(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any], heads: int, terms: Terms,
    want_lse: bool, features: Features | None = None, append: Append | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:  # fmt: skip
    """Attention of 4-D views whose axis ``heads`` is 1 or 2, and the log-sum-exp ``[batch, heads, sequence]``."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check(name, array)
    q, k, v = admit(q, k, v)
    kind = q.dtype
    if kind.name in _FP8:
        for name, array, accepted in (("k", k, _FP8), ("v", v, {**_FP8, "float16": "", "bfloat16": ""})):
            if array.dtype.name not in accepted:
                expected = f"{', '.join(accepted)} beside q of {kind}"
                raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, expected))
        kind = v.dtype if v.dtype.name not in _FP8 else _bfloat16()
    elif kind.name in ("float16", "bfloat16") and k.dtype.name in _FP8 and v.dtype.name in _FP8:
        pass  # an 8-bit cache
    elif not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal")
    out = np.empty((*q.shape[:3], v.shape[3]), kind)
    batch, sequence = q.shape[0], q.shape[3 - heads]
    lse = np.empty((batch, q.shape[heads], sequence), np.float32) if want_lse else None
    if features is not None and _leaves_rows(features, sequence):
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
    q, k, v = _plain(q), _plain(k), _plain(v)  # copies must live as long as the call
    held: list[Any] = []
    lse_address = None if lse is None else lse.ctypes.data
    address, _, out_strides = _handed(out)
    _flashcore.attend(
        _handed(q),
        _handed(k),
        _handed(v),
        (address, out_strides),
        lse_address,
        heads,
        sum(_DIGITS[_DTYPES[x.dtype.name]] << 4 * i for i, x in enumerate((q, k, v, out))),
        terms,
        (None, 0),
        None if features is None else _described(features),
        None if append is None else _described_append(append, q.dtype if k.dtype.name in _FP8 else k.dtype, held),
    )
    return out, lse


def append_and_attend(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any], terms: Terms, want_lse: bool,
    features: Features, append: Append,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:  # fmt: skip
    """Attention to a cache ``(batch, rows, heads, dim)`` or pages, to which keys and values are appended first."""
    for name, array in (("k_cache", k), ("v_cache", v)):
        if not array.flags.writeable or _plain(array) is not array:
            raise ArgumentError(f"{name} is read-only, misaligned or not contiguous in its last dimension")
    return attend(q, k, v, 2, terms, want_lse, features, append)


def equal_lengths(q: Any, batch: int, length: int) -> np.ndarray[Any, Any]:
    """The lengths of sequences that have one length."""
    return np.full((batch,), length, np.int32)


def merge_states(
    outs: list[np.ndarray[Any, Any]], lses: list[np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The result over the keys of all parts."""
    kind = outs[0].dtype
    for i, (out, lse) in enumerate(zip(outs, lses)):
        _check(f"outs[{i}]", out)
        if out.dtype != kind or kind.name in _FP8:
            expected = "float16, bfloat16 or float32, equal to that of outs[0]"
            raise DTypeError(invalid_words(f"the dtype of outs[{i}]", out.dtype, expected))
        if lse.dtype != np.float32:
            raise DTypeError(invalid_words(f"the dtype of lses[{i}]", lse.dtype, "float32"))
    outs = [np.ascontiguousarray(_whole(_unwrapped("outs", out))) for out in outs]
    lses = [np.ascontiguousarray(_whole(_unwrapped("lses", lse))) for lse in lses]
    merged, sums = np.empty_like(outs[0]), np.empty_like(lses[0])
    _flashcore.merge_states(
        [(out.ctypes.data, lse.ctypes.data) for out, lse in zip(outs, lses)],
        (merged.ctypes.data, sums.ctypes.data),
        (math.prod(merged.shape[:-3]), *merged.shape[-3:]),
        _DTYPES[kind.name],
        (None, 0),
    )
    return merged, sums


def _described_append(append: Append, dtype: np.dtype[Any], held: list[Any]) -> DescribedAppend:
    """Addresses, types, shapes and strides of what is appended, for Rust. ``held`` keeps copies."""

    def plain(name: str, array: np.ndarray[Any, Any], dtypes: tuple[np.dtype[Any], ...]) -> np.ndarray[Any, Any]:
        _check(name, array)
        if array.dtype not in dtypes:
            raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, " or ".join(map(str, dtypes))))
        held.append(_plain(_unwrapped(name, array)))
        found: np.ndarray[Any, Any] = held[-1]
        return found

    k, v = plain("k", append.k, (dtype,)), plain("v", append.v, (dtype,))
    rotary: Any = None
    if append.rotary is not None:
        cos, sin, interleaved, positions = append.rotary
        cos = plain("rotary_cos", cos, (dtype, np.dtype(np.float32)))
        tables = [(x.ctypes.data, strides(x)[0]) for x in (cos, plain("rotary_sin", sin, (cos.dtype,)))]
        at = None if positions is None else positions.ctypes.data
        rotary = (tables, _TABLE_CODES[cos.dtype.name], cos.shape, interleaved, at)
    starts = None if append.starts is None else append.starts.ctypes.data
    return _handed(k), _handed(v), starts, rotary


def _leaves_rows(features: Features, rows: int) -> bool:
    """Whether some rows may belong to no sequence."""
    starts, _, used, _, _ = features.lengths
    return used is not None or (starts is not None and (starts[0] != 0 or starts[-1] != rows))


def quantize(
    tensors: tuple[np.ndarray[Any, Any], ...], heads: int, options: Options
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Codes and factors of q, k and v."""
    try:
        import ml_dtypes
    except ImportError as error:
        message = "8-bit NumPy arrays need the package ml_dtypes; install it with: pip install ml_dtypes"
        raise UnsupportedError(message, "ml_dtypes") from error

    return [
        _quantized(name, array, heads, options, np.dtype(getattr(ml_dtypes, options.dtype)))
        for name, array in zip("qkv", tensors)
    ]


def _quantized(
    name: str, array: np.ndarray[Any, Any], heads: int, options: Options, dtype: np.dtype[Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    _check(name, array)
    if array.dtype.name in _FP8:
        expected = "float16, bfloat16 or float32, in native byte order"
        raise DTypeError(invalid_words(f"the dtype of {name}", array.dtype, expected))
    array = _plain(_unwrapped(name, array))
    batch, rows, _, dim = array.shape
    codes = np.empty((batch, array.shape[2], rows, dim), dtype)
    factors = np.ones(options.factors(batch, heads, rows), np.float32)
    if array.size:
        _flashcore.quantize_cpu(
            name,
            _rows_of_heads(array),
            heads,
            _DTYPES[array.dtype.name],
            (_DTYPES[options.dtype], options.rows, options.seed, options.smooth_keys),
            (codes.ctypes.data, factors.ctypes.data),
        )
    return codes.transpose(0, 2, 1, 3), factors


def _bfloat16() -> np.dtype[Any]:
    """The dtype of outputs of 8-bit inputs. It is a dtype of ml_dtypes, as the inputs' dtype is."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


_TABLE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3, "uint8": 4, "bool": 4}
_CONVERTED = {"float64": np.float32, "int64": np.int32, "int16": np.int32, "int8": np.int32}


def as_table(name: str, x: Any, floating: bool = False, like: Any = None) -> np.ndarray[Any, Any]:
    """An array that a program reads, in a supported type. A mask ``like`` q has bool, q's type or float32."""
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a NumPy array")
    _check_unmasked(name, x)
    kind = x.dtype.name
    if like is not None and kind in ("int64", "int32"):  # a tokenizer's
        _check_range(name, x, _features.check_truth)
        return x.astype(np.bool_)
    if like is not None and kind not in ("bool", "float32", "float64", like.dtype.name):
        of_q = "" if like.dtype.name in ("float32", "float64") else f", {like.dtype.name}"
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, f"bool{of_q}, float32 or float64"))
    if floating and not is_floating(x):
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "a floating-point type"))
    if kind == "int64":
        _check_range(name, x, _features.check_integer)
    if kind in _CONVERTED:
        return x.astype(_CONVERTED[kind])
    if kind not in _TABLE_CODES or not x.dtype.isnative:
        expected = "float32, float16, bfloat16, float64, bool, uint8, or a signed integer"
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, expected))
    return _whole(x)


def _check_range(name: str, x: np.ndarray[Any, Any], check: Callable[[str, int], None]) -> None:
    """Rejects elements that do not fit."""
    for value in (x.min(), x.max()) if x.size else ():
        check(name, int(value))


def _whole(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself, or a copy if it is misaligned or a stride is negative or not of whole elements."""
    aligned = x.flags.aligned and all(stride >= 0 and stride % x.itemsize == 0 for stride in x.strides)
    return x if aligned else x.copy(order="C")


def as_sink(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Sinks in float32, contiguous."""
    return np.ascontiguousarray(as_table(name, x, floating=True), np.float32)


def as_scale(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Descale factors in float32, with any strides that are whole elements and not negative."""
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a NumPy array")
    _check_unmasked(name, x)
    if x.dtype != np.float32:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "float32"))
    return _whole(x)


def as_lengths(name: str, x: Any, elements: int) -> np.ndarray[Any, Any]:
    """An array of lengths: int32 and contiguous. One of int64 is converted."""
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a NumPy array")
    _check_unmasked(name, x)
    if x.dtype == np.int64:
        _check_range(name, x, _features.check_integer)
        x = x.astype(np.int32)
    elif x.dtype != np.int32:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "int32 or int64"))
    _features.check_length_array(name, x, elements)
    return np.ascontiguousarray(_whole(x))


def least_on_host(lengths: np.ndarray[Any, Any]) -> int | None:
    """The smallest length."""
    return int(lengths.min()) if lengths.size else None


def as_pages(x: Any, batch: int) -> np.ndarray[Any, Any]:
    """A page table: int32 and contiguous."""
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"page_table is a {type(x).__name__}; expected a NumPy array")
    _check_unmasked("page_table", x)
    if x.dtype != np.int32:
        raise DTypeError(invalid_words("the dtype of page_table", x.dtype, "int32"))
    _features.check_page_table(x, batch)
    return np.ascontiguousarray(_whole(x))


class Tracing:
    """The parts of NumPy that tracing a score or mask function uses."""

    name = "numpy"
    device = "cpu"
    remembers = True

    def __init__(self, q: Any) -> None:
        leave_graph("flex_attention of NumPy arrays")

    def given(self, recorder: _trace.Trace, tracer: _trace.Tracer) -> Any:
        """What the function gets in place of a tracer."""
        return tracer

    def kind(self, array: Any) -> str:
        """The kind of an array's elements in a program."""
        return self.kind_of_dtype(array.dtype) or _trace.INT

    def kind_of_dtype(self, dtype: Any) -> str | None:
        """The kind of a dtype's numbers; None if the argument is not a dtype."""
        if dtype is None or isinstance(dtype, (bool, int, float)):
            return None
        try:
            found = np.dtype(dtype)
        except TypeError:
            return None
        return {"b": _trace.BOOL, "i": _trace.INT, "u": _trace.INT}.get(found.kind, _trace.FLOAT)

    def dtype_of_kind(self, kind: str) -> Any:
        """The dtype that stands for a kind."""
        return {_trace.FLOAT: np.float32, _trace.INT: np.int32, _trace.BOOL: np.bool_}[kind]

    def recording(self, recorder: _trace.Trace) -> Any:
        """Does nothing: tracers record NumPy's functions by themselves."""
        return contextlib.nullcontext()


def strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def is_floating(array: np.ndarray[Any, Any]) -> bool:
    """Whether the elements are floating point."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def draw_rng_state(q: Any) -> np.ndarray[Any, Any]:
    """A state of dropout's generator, drawn from NumPy's global one."""
    return np.random.randint(-(2**31), 2**31, 4, dtype=np.int32)


def dropout_mask(features: Features, q: Any, shape: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """1 where a weight is kept, and -1 where it is dropped, of q's type."""
    made: np.ndarray[Any, Any] = _dropout.mask(features, shape, np.arange, np.where).astype(q.dtype)
    return made


def is_direct(*_: Any) -> bool:
    """Whether a call goes straight to Rust: always, since NumPy records nothing."""
    return True


def is_traced() -> bool:
    """Whether later calls repeat this one with other arrays. NumPy has no such recorder."""
    return False


def _described(features: Features) -> DescribedFeatures:
    """Addresses, types, shapes and strides of features, for Rust."""
    lengths, batch, max_q, max_k, _, score, mask, floats, ints, tables, scales, blocks, pages, *_ = features
    address = [None if x is None else x.ctypes.data for x in lengths]
    factors: list[Any] = [
        None if x is None else (x.ctypes.data, (*strides(x), 0)[:3], rows) for x, rows in zip(scales, blocks)
    ]
    return (
        (batch, max_q, max_k, address) if features.uneven else None,
        [(operand, x.ctypes.data) for operand, _, x in features.of_heads()],
        score,
        mask,
        floats,
        ints,
        [(x.ctypes.data, _TABLE_CODES[x.dtype.name], x.shape, strides(x)) for x in tables],
        factors,
        None if pages is None else (pages.ctypes.data, *pages.shape),
        None,
        None if features.rng_state is None else (features.dropout_p, features.rng_state.ctypes.data),
        features.invariant,
    )


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself, or a copy if its last dimension is strided or its elements are misaligned."""
    size = array.itemsize
    contiguous = array.shape[-1] <= 1 or array.strides[-1] == size
    if contiguous and array.flags.aligned and all(stride % size == 0 for stride in array.strides):
        return array
    return array.copy(order="C")


def _handed(array: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides in elements."""
    if array.ndim != 4:
        raise ArgumentError(f"an array of shape {array.shape} has {dimensions(array.ndim)}; attention takes 4")
    return array.ctypes.data, array.shape, strides(array)


def _rows_of_heads(array: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides of an array ``(batch, sequence, heads, dim)`` as of one with the heads first."""
    address, shape, steps = _handed(array)
    return address, tuple(shape[i] for i in (0, 2, 1, 3)), tuple(steps[i] for i in (0, 2, 1, 3))
