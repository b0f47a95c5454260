"""FlashAttention's function for sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _dropout, _features, _functional
from ._errors import ArgumentError
from ._functional import (
    _band_and_cap,
    _check_number,
    _check_rank,
    _count,
    _either,
    _flag,
    _foreign,
    _kind,
    _longest,
    _of_scale,
    _parts_of_heads,
    _probability,
    _with_scales,
    backend_of,
    given,
    with_determinism,
    with_invariant,
)

__all__ = ["flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None, *, seqused_q: Any = None,
    seqused_k: Any = None, leftpad_k: Any = None, learnable_sink: Any = None, attention_chunk: int = 0,
    return_lse: bool = False, qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    descale_q: Any = None, descale_k: Any = None, descale_v: Any = None, num_splits: int = 1,
    pack_gqa: bool | None = None, sm_margin: int = 0, page_table: Any = None, invariant: str | None = None,
) -> Any:  # fmt: skip
    """FlashAttention's function for sequences of different lengths, with the arguments of FlashAttention-2 in its
    order, and those that FlashAttention-3 and -4 add by name.

    Args:
        q: ``(total_q, heads, head_dim)``, the sequences of all batch entries one after the other; without
            ``cu_seqlens_q``, ``(batch, seqlen_q, heads, head_dim)``.
        k: ``(total_k, heads_k, head_dim)``; without ``cu_seqlens_k``, ``(batch, seqlen_k, heads_k, head_dim)``.
        v: ``(total_k, heads_k, head_dim_v)``; without ``cu_seqlens_k``, ``(batch, seqlen_k, heads_k, head_dim_v)``.
        cu_seqlens_q: ``(batch + 1,)``, int32 or int64: the first row of each sequence of q, and the end of the last.
            Rows after that end are padding, and 0 in the result.
        cu_seqlens_k: ``(batch + 1,)``: the same for k and v.
        max_seqlen_q: the longest sequence of q, or more; None means ``total_q``. It bounds the work and does not
            change the result.
        max_seqlen_k: the longest sequence of k, or more; None means ``total_k``. A tensor is read as None in compiled
            code.
        dropout_p: as in :func:`flash_attn_func`. The mask of a sequence is that of a batch entry.
        softmax_scale: as in :func:`flash_attn_func`, as are ``causal``, ``window_size``, ``softcap``,
            ``alibi_slopes``, ``learnable_sink`` and ``attention_chunk``. Positions are counted in each sequence.
        return_attn_probs: return ``(out, lse, None)`` as FlashAttention-2 does; ``lse`` is ``(heads, total_q)``, or
            ``(batch, heads, seqlen_q)`` without ``cu_seqlens_q``.
        return_lse: return ``(out, lse)`` as FlashAttention-4 does.
        seqused_q: ``(batch,)``: the rows that are used of each sequence of q. The others are 0 in the result,
            their ``lse`` minus infinity.
        seqused_k: ``(batch,)``: the rows that are used of each sequence of k and v.
        leftpad_k: ``(batch,)``: the rows before the first key of each sequence. They count in ``seqused_k``.
        deterministic: as in :func:`flash_attn_func`. ``num_splits``, ``pack_gqa`` and ``sm_margin`` change no result.
        block_table: ``(batch, pages of a sequence)``, int32: k and v are pools of pages,
            ``(pages, page_size, heads_k, head_dim)``. ``page_table`` is another name. Without ``seqused_k``,
            ``cu_seqlens_k`` gives the lengths.
        invariant: as in :func:`flash_attn_func`. With either value, prefills and decodes in one launch have equal bits.
        qv: only None.
        descale_q, descale_k, descale_v: factors of 8-bit q, k and v as in :func:`flash_attn_func`, ``(batch, heads_k)``
            or ``(batch, heads_k, blocks)``: as many blocks as ``max_seqlen_q`` or ``max_seqlen_k`` rows have. Blocks
            are counted from the first row of each sequence.
        q_descale, k_descale, v_descale: FlashAttention-3's names of ``descale_q``, ``descale_k`` and ``descale_v``.

    Returns:
        O in the shape of q, with v's head dim. A row that sees no key is 0, its ``lse`` minus infinity or the sink.

    Lengths of CPU tensors are checked. On a GPU they are read by the kernel alone, so that nothing is synchronised
    and a CUDA graph serves other lengths: lengths that reach outside a tensor are cut to it.

    Raises:
        ArgumentError: lengths that do not ascend, exceed their tensor or have the wrong number; what
            :func:`flash_attn_func` raises.
        DTypeError: lengths of another type than int32 and int64; what :func:`flash_attn_func` raises.
    """
    torch = _functional._torch
    if torch is not None and not torch.is_dynamo_compiling() and torch.eager is not None:
        made = None
        plain = descale_q is descale_k is descale_v is q_descale is k_descale is v_descale is None
        if plain and block_table is page_table is qv is invariant is None:
            made = torch.eager.varlen(
                q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k), (max_seqlen_q, max_seqlen_k),
                (dropout_p, softmax_scale, causal, window_size, softcap), alibi_slopes, learnable_sink,
                attention_chunk, deterministic, (return_attn_probs, return_lse),
            )  # fmt: skip
        if made is not None:
            return made
    dropout_p = _probability(dropout_p, qv=qv)
    table = _either("block_table", block_table, "page_table", page_table)
    return_attn_probs = _flag("return_attn_probs", return_attn_probs)
    return_lse = _flag("return_lse", return_lse)
    factors = (
        _either("descale_q", descale_q, "q_descale", q_descale),
        _either("descale_k", descale_k, "k_descale", k_descale),
        _either("descale_v", descale_v, "v_descale", v_descale),
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
    backend = backend_of(q)
    if backend is None:
        named = {**dict(zip(_features.LENGTHS, lengths)), **dict(zip(_features.SCALES, factors))}
        others = given(alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, block_table=table, **named)
        options = {
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "softmax_scale": softmax_scale,
            "causal": causal, "window_size": window_size, "softcap": softcap, "attention_chunk": attention_chunk,
            "return_attn_probs": return_attn_probs, "return_lse": return_lse, "dropout_p": dropout_p,
            "invariant": invariant,
        }  # fmt: skip
        return _foreign(flash_attn_varlen_func, {"q": q, "k": k, "v": v, **others}, options)
    backend.check_kinds(q, k, v)
    if table is not None and cu_seqlens_k is not None:
        if seqused_k is None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
        lengths = (cu_seqlens_q, None, seqused_q, seqused_k, leftpad_k)
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    for name, tensor, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
        _check_rank(name, tensor, packed)
    if table is None:
        batch = _batch(q, k, cu_seqlens_q, cu_seqlens_k)
    else:
        batch = _batch(q, q, cu_seqlens_q, cu_seqlens_q)
        table = backend.as_pages(table, batch)
    arrays = tuple(
        None if array is None else backend.as_lengths(name, array, _features.length_elements(name, batch))
        for name, array in zip(_features.LENGTHS, lengths)
    )
    heads = q.shape[1] if packed_q else q.shape[2]
    _check_number("softmax_scale", softmax_scale)
    before, after, cap = _band_and_cap(causal, window_size, softcap)
    chunk = _count("attention_chunk", attention_chunk)
    parts, sink = _parts_of_heads(backend, batch, heads, alibi_slopes, learnable_sink, chunk)
    max_q, max_k = q.shape[0 if packed_q else 1], k.shape[0 if packed_k else 1]
    max_q = _longest("max_seqlen_q", max_seqlen_q, max_q)
    if table is None:
        max_k = _longest("max_seqlen_k", max_seqlen_k, max_k)
    else:
        held = max_k * table.shape[1]
        max_k = min(_longest("max_seqlen_k", max_seqlen_k, held), held)
    features = parts.features(lengths=arrays, batch=batch, max_q=max_q, max_k=max_k, sink=sink, page_table=table)
    if any(factor is not None for factor in factors):
        heads_k = k.shape[1] if packed_k else k.shape[2]
        features = _with_scales(features, backend, (batch, heads_k), (max_q, max_k, max_k), factors)
    if deterministic is not False:
        features = with_determinism(features, deterministic)
    if dropout_p:
        features = _dropout.with_dropout(features, backend, q, dropout_p)
    features = with_invariant(features, invariant)
    named_tensors = (("q", q), ("k", k), ("v", v))
    try:
        q, k, v = (x[None] if packed else x for x, packed in ((q, packed_q), (k, packed_k), (v, packed_k)))
    except RuntimeError:  # PyTorch's, of a view of memory that was released
        for name, tensor in named_tensors:
            backend.check_given(name, tensor)
        raise
    try:
        out, lse = backend.attend(
            q, k, v, 2, (False, before, after, softmax_scale, cap), return_attn_probs or return_lse, features
        )
    except (ValueError, TypeError, OverflowError) as error:
        if (told := _of_scale(error, "softmax_scale", softmax_scale)) is not None:
            raise told from None
        raise
    if packed_q:
        out, lse = out[0], None if lse is None else lse[0]
    if return_attn_probs:
        mask = backend.dropout_mask(features, q, (batch, heads, max_q, max_k)) if dropout_p else None
        return out, lse, mask
    return (out, lse) if return_lse else out


def _batch(q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
    """The number of batch entries: an integer, also one that varies in a compiled graph."""
    for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if array is None:
            continue
        if not hasattr(array, "shape"):
            raise ArgumentError(f"{name} is {_kind(array)}; expected a tensor of 1 dimension")
        if len(array.shape) != 1 or array.shape[0] == 0:
            raise ArgumentError(f"{name} has shape {tuple(array.shape)}; expected (batch + 1,)")
    of_q = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    of_k = cu_seqlens_k.shape[0] - 1 if cu_seqlens_k is not None else k.shape[0]
    if of_q != of_k:
        on_q = "q" if cu_seqlens_q is None else "cu_seqlens_q"
        on_k = "k" if cu_seqlens_k is None else "cu_seqlens_k"
        raise ArgumentError(
            f"{on_k} has {of_k} sequence{'' if of_k == 1 else 's'}, {on_q} has {of_q}; the numbers must be equal"
        )
    return of_q
