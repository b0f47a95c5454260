"""FlashAttention's functions for packed tensors: views of the parts, for :func:`flash_attn_func` and
:func:`flash_attn_varlen_func`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import ArgumentError, invalid
from ._functional import _kind, backend_of, flash_attn_func, foreign, given, unpacked
from ._varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` of queries, keys and values that lie in one tensor. They are read in place.

    Args:
        qkv: ``(batch, seqlen, 3, heads, head_dim)``: q, k and v in this order.
        dropout_p: this and the others are those of :func:`flash_attn_func`.

    Returns:
        ``(batch, seqlen, heads, head_dim)``, or ``(out, lse, None)``, as :func:`flash_attn_func`.

    Raises:
        ArgumentError: for another shape, and what :func:`flash_attn_func` raises.
    """
    before, after = (dropout_p, softmax_scale, causal, window_size, softcap), (deterministic, return_attn_probs)

    def attend(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return flash_attn_func(q, k, v, *before, slopes, *after)

    return _with_parts(attend, {"qkv": qkv}, 2, alibi_slopes=alibi_slopes)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
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
    before, after = (dropout_p, softmax_scale, causal, window_size, softcap), (deterministic, return_attn_probs)

    def attend(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return flash_attn_func(q, k, v, *before, slopes, *after)

    return _with_parts(attend, {"q": q, "kv": kv}, 2, alibi_slopes=alibi_slopes)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: Any = None, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_varlen_func` of queries, keys and values that lie in one tensor. They are read in place.

    Args:
        qkv: ``(total, 3, heads, head_dim)``: q, k and v in this order.
        cu_seqlens: ``(batch + 1,)``, of all three.
        max_seqlen: the longest sequence, or more.
        dropout_p: this and the others are those of :func:`flash_attn_varlen_func`.
    """
    before, after = (dropout_p, softmax_scale, causal, window_size, softcap), (deterministic, return_attn_probs)

    def attend(q: Any, k: Any, v: Any, starts: Any, slopes: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, starts, starts, max_seqlen, max_seqlen, *before, slopes, *after)

    return _with_parts(attend, {"qkv": qkv}, 1, cu_seqlens=cu_seqlens, alibi_slopes=alibi_slopes)


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_varlen_func` of keys and values that lie in one tensor. They are read in place.

    Args:
        q: ``(total_q, heads, head_dim)``.
        kv: ``(total_k, 2, heads_k, head_dim)``: k and v in this order.
        cu_seqlens_q: this and the others are those of :func:`flash_attn_varlen_func`.
    """
    before, after = (dropout_p, softmax_scale, causal, window_size, softcap), (deterministic, return_attn_probs)

    def attend(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, slopes: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, of_q, of_k, max_seqlen_q, max_seqlen_k, *before, slopes, *after)

    arrays = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes}
    return _with_parts(attend, {"q": q, "kv": kv}, 1, **arrays)


def _with_parts(attend: Any, tensors: dict[str, Any], axis: int, **arrays: Any) -> Any:
    """``attend(q, k, v, *arrays)``, in which views of the last of ``tensors``, along ``axis``, take the place of it."""
    *of_q, packed = tensors.values()
    name, parts = list(tensors)[-1], 3 - len(of_q)
    backend = backend_of(of_q[0] if of_q else packed)
    if backend is None:
        present = given(**arrays)

        def call(*views: Any) -> Any:
            viewed = dict(zip((*tensors, *present), views))
            return _with_parts(attend, {each: viewed.pop(each) for each in tensors}, axis, **{**arrays, **viewed})

        return foreign(call, {**tensors, **present})
    if backend_of(packed) is not backend:
        raise ArgumentError(f"{name} is {_kind(packed)}, q {_kind(of_q[0])}; they must be of one kind")
    backend.check_given(name, packed)
    if packed.ndim != axis + 3 or packed.shape[axis] != parts:
        rows = "batch, sequence" if axis == 2 else "rows"
        raise invalid(f"the shape of {name}", tuple(packed.shape), f"({rows}, {parts}, heads, head_dim)")
    return attend(*of_q, *unpacked(packed, axis), *arrays.values())
