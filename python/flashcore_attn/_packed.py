"""FlashAttention's functions for packed tensors: views of the parts, for :func:`flash_attn_func`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import ArgumentError, invalid
from ._functional import backend_of, flash_attn_func, foreign, given, unpacked

__all__ = ["flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of queries, keys and values that lie in one tensor. They are read in place.

    Args:
        qkv: ``(batch, seqlen, 3, heads, head_dim)``: q, k and v in this order.
        dropout_p: this and the others are those of :func:`flash_attn_func`.

    Returns:
        ``(batch, seqlen, heads, head_dim)``, or ``(out, lse, None)``, as :func:`flash_attn_func`.

    Raises:
        ArgumentError: for another shape, and what :func:`flash_attn_func` raises.
    """
    before = (dropout_p, softmax_scale, causal, window_size, softcap)
    after = (deterministic, return_attn_probs)
    if backend_of(qkv) is None:

        def call(qkv: Any, slopes: Any = None) -> Any:
            return flash_attn_qkvpacked_func(qkv, *before, slopes, *after)

        return foreign(call, {"qkv": qkv, **given(alibi_slopes=alibi_slopes)})
    _check_parts("qkv", qkv, 3)
    q, k, v = unpacked(qkv, 2)
    return flash_attn_func(q, k, v, *before, alibi_slopes, *after)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of keys and values that lie in one tensor. They are read in place.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``.
        kv: ``(batch, seqlen_k, 2, heads_k, head_dim)``: k and v in this order.
        dropout_p: this and the others are those of :func:`flash_attn_func`.

    Returns:
        ``(batch, seqlen_q, heads, head_dim)``, or ``(out, lse, None)``, as :func:`flash_attn_func`.

    Raises:
        ArgumentError: for another shape, and what :func:`flash_attn_func` raises.
    """
    before = (dropout_p, softmax_scale, causal, window_size, softcap)
    after = (deterministic, return_attn_probs)
    backend = backend_of(q)
    if backend is None:

        def call(q: Any, kv: Any, slopes: Any = None) -> Any:
            return flash_attn_kvpacked_func(q, kv, *before, slopes, *after)

        return foreign(call, {"q": q, "kv": kv, **given(alibi_slopes=alibi_slopes)})
    if backend_of(kv) is not backend:
        kinds = f"kv is a {type(kv).__name__}, q a {type(q).__name__}"
        raise ArgumentError(f"{kinds}; they must be of one kind")
    _check_parts("kv", kv, 2)
    k, v = unpacked(kv, 2)
    return flash_attn_func(q, k, v, *before, alibi_slopes, *after)


def _check_parts(name: str, tensor: Any, parts: int) -> None:
    backend_of(tensor).check_given(name, tensor)
    if tensor.ndim != 5 or tensor.shape[2] != parts:
        raise invalid(f"the shape of {name}", tuple(tensor.shape), f"(batch, sequence, {parts}, heads, head_dim)")
