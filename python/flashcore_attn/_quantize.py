"""Quantisation to 8-bit floats, for every kind of tensor."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

from . import _features, _functional
from ._errors import DTypeError, invalid, invalid_words
from ._graphs import outside_graphs

__all__ = ["Options", "Quantized", "quantize"]

#: Names of the 8-bit types, and the codes that Rust knows them by.
TYPES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


class Quantized(NamedTuple):
    """8-bit tensors and their descale factors, under the names that :func:`flash_attn_func` has for them."""

    q: Any
    k: Any
    v: Any
    descale_q: Any
    descale_k: Any
    descale_v: Any


class Options(NamedTuple):
    """How tensors are quantised."""

    #: A key of :data:`TYPES`.
    dtype: str
    #: Rows that share a factor; 0 for one factor per KV head.
    rows: int
    seed: int | None
    smooth_keys: bool

    def factors(self, batch: int, heads: int, rows: int) -> tuple[int, ...]:
        """The shape of the factors of a tensor."""
        return (batch, heads, -(-rows // self.rows)) if self.rows else (batch, heads)


@outside_graphs
def quantize(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Any = None,
    rows: int | None = None,
    hadamard: int | None = None,
    smooth_keys: bool = False,
) -> Quantized:
    """8-bit floats with descale factors for :func:`flash_attn_func`.

    >>> out = flash_attn_func(**quantize(q, k, v)._asdict(), causal=True)  # doctest: +SKIP

    A factor is the largest finite magnitude of its rows divided by the largest number of the type, so that
    this element becomes that number. Rows of zeros have factor 1. NaN stays NaN, and infinities become the
    largest number.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, float16, bfloat16 or float32: a NumPy array, a PyTorch
            tensor on the CPU or a GPU, or an array with DLPack.
        k: ``(batch, seqlen_k, heads_k, head_dim)``; ``heads_k`` divides ``heads``.
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``.
        dtype: ``float8_e4m3fn`` (the default) or ``float8_e5m2``, of PyTorch or of ml_dtypes, or its name.
        rows: one factor for each block of 64 or 128 rows; None for one factor per batch entry and KV head, as
            FlashAttention-3 takes them. Attention on a GPU takes only the latter.
        hadamard: rotates the rows of q and k by a Hadamard matrix with random signs, of which this integer
            from 0 to 2^64 - 1 is the seed; None for no rotation. The rotation spreads outliers over the head
            dim. It does not change the products of q and k. Its blocks have the size of the largest power of
            two that divides ``head_dim``.
        smooth_keys: subtracts the mean of a head's keys from each of them. It changes neither the softmax nor
            the output, but the log-sum-exp and the effect of a softcap, a sink, ALiBi or another change of the
            scores: attention of smoothed keys must have none of them. A NaN in a column of k makes the column
            NaN in all keys of the head.

    Returns:
        The 8-bit tensors ``q``, ``k`` and ``v`` of the shapes given, of q's kind and on its device, and the
        float32 factors ``descale_q``, ``descale_k`` and ``descale_v``: ``(batch, heads_k)``, or ``(batch,
        heads_k, blocks)`` with ``rows``. Query heads that share a key head share a factor. In memory, the
        tensors are ``(batch, heads, seqlen, head_dim)``. Codes and factors are the same, to the last bit, on
        the CPU and on a GPU.

    On a GPU (sm_89 or later; head dims that are multiples of 16, up to 576) kernels for each tensor are
    enqueued on PyTorch's current stream, nothing is synchronised, and a CUDA graph may capture them. Tensors
    whose rows do not begin at multiples of 16 bytes are copied first.

    Raises:
        ArgumentError: (a ValueError) shapes or devices that do not fit each other, or an option with another
            value.
        DTypeError: (a TypeError) another element type, or a dtype that is not one of the two.
        UnsupportedError: (a NotImplementedError) gradients, fake tensors, what the GPU's kernels do not have.
        DeviceError: (a RuntimeError) the GPU or its driver refused.
    """
    options = Options(_name(dtype), _rows(rows), _seed(hadamard), _functional._flag("smooth_keys", smooth_keys))
    backend = _functional.backend_of(q)
    if backend is None:
        named = {"dtype": options.dtype, "rows": rows, "hadamard": options.seed, "smooth_keys": options.smooth_keys}
        return Quantized(*_functional.foreign(quantize, {"q": q, "k": k, "v": v}, **named))
    backend.check_kinds(q, k, v)
    _functional._check_dims(q, k, v)
    _features.check_shapes(q, k, v, 2)
    heads = k.shape[2]
    (a, descale_q), (b, descale_k), (c, descale_v) = backend.quantize((q, k, v), heads, options)
    return Quantized(a, b, c, descale_q, descale_k, descale_v)


def _name(dtype: Any) -> str:
    """The name of an 8-bit type of PyTorch or ml_dtypes."""
    if dtype is None:
        return "float8_e4m3fn"
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in TYPES:
        raise DTypeError(invalid_words("dtype", name, "float8_e4m3fn or float8_e5m2"))
    return name


def _rows(rows: Any) -> int:
    if rows is None:
        return 0
    number = _integer(rows)
    if number not in _features.ROWS:
        raise invalid("rows", rows, "64, 128, or None for one factor per KV head")
    return number


def _seed(seed: Any) -> int | None:
    if seed is None:
        return None
    number = _integer(seed)
    if not 0 <= number < 2**64:
        raise invalid("hadamard", seed, "None, or the seed of the signs: an integer from 0 to 2^64 - 1")
    return number


def _integer(value: Any) -> int:
    """An integer of 0 or more; -1 for other values. True could mean "rotate" as well as the seed 1."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    return -1
