"""FlashAttention's function for a cache of keys and values, which may lie in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _features
from ._errors import ArgumentError, UnsupportedError, dimensions, invalid, invalid_words
from ._functional import (
    _band_and_cap,
    _check_number,
    _check_rank,
    _count,
    _either,
    _flag,
    _kind,
    _longest,
    _of_scale,
    _parts_of_heads,
    _probability,
    _with_scales,
    backend_of,
    with_invariant,
)
from ._varlen import _batch

__all__ = ["attend_to_cache", "flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: Any = None, *,
    block_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    learnable_sink: Any = None, s_aux: Any = None, attention_chunk: int = 0, rotary_interleaved: bool = True,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, qv: Any = None,
    scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False, invariant: str | None = None,
) -> Any:  # fmt: skip
    """Attention to a cache, to which the call may append keys and values first: FlashAttention-3's function.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``; with ``cu_seqlens_q``, ``(total_q, heads, head_dim)``.
        k_cache: ``(batch_cache, seqlen_cache, heads_k, head_dim)``; with ``page_table``, a pool of pages,
            ``(pages, page_size, heads_k, head_dim)``. Any page size and any strides between rows.
        v_cache: as ``k_cache``, with v's head dim. It may be a view of ``k_cache``'s first columns, as in latent
            attention: a GPU then reads each row once.
        k: ``(batch, seqlen_new, heads_k, head_dim)``, keys that are written to the cache in place from row
            ``cache_seqlens`` on; with ``cu_seqlens_k_new``, ``(total_new, heads_k, head_dim)``.
        v: the values of these keys.
        rotary_cos: ``(positions, rotary_dim / 2)``, of q's type or float32: rotates k, and q, whose memory is kept.
            Dims from ``rotary_dim`` on are not rotated. With a causal mask or a window, row ``i`` of q has position
            ``cache_seqlens + i``; else all rows have position ``cache_seqlens``.
        rotary_sin: as ``rotary_cos``.
        cache_seqlens: ``(batch,)``, int32, or an integer: keys in the cache before the call. None means all rows.
        cache_batch_idx: ``(batch,)``, int32: the batch entry of the cache, or the row of ``page_table``, for each of q.
        cache_leftpad: ``(batch,)``, int32: the rows before the first key. They count in ``cache_seqlens``.
        page_table: ``(batch, pages of a sequence)``, int32. ``block_table`` is another name.
        cu_seqlens_k_new: ``(batch + 1,)``, int32: the first new row of each sequence, and the end of the last.
        rotary_seqlens: ``(batch,)``, int32: positions in place of ``cache_seqlens``. Not read without ``rotary_cos``.
        causal: this and ``softmax_scale``, ``window_size``, ``softcap``, ``alibi_slopes``, ``attention_chunk`` and the
            descale factors are those of :func:`flash_attn_func`; ``s_aux`` is another name of ``learnable_sink``.
        rotary_interleaved: whether dims ``2 i`` and ``2 i + 1`` form a pair; else ``i`` and ``i + rotary_dim / 2`` do.
        scheduler_metadata: accepted, as are ``num_splits``, ``pack_gqa`` and ``sm_margin``, which change no result.
        invariant: as in :func:`flash_attn_func`.
        return_softmax_lse: return ``(out, lse)``, ``lse`` of shape ``(batch, heads, seqlen_q)`` or
            ``(heads, total_q)``.

    Lengths and page tables of CPU tensors are checked before anything is written: a refused call leaves the cache
    as it was. On a GPU they are read by the kernels alone, so that a captured graph serves later lengths: a new row
    without a place in the cache is left out. Where two sequences append to one row of the cache, the later one is
    kept, on a GPU either of them.

    Raises:
        ArgumentError: shapes, lengths, positions or pages that do not fit the cache.
        DTypeError: arrays of another type than int32; element types that differ.
        UnsupportedError: other kinds of arrays than PyTorch's and NumPy's.
    """
    return attend_to_cache(
        None, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        _either("page_table", page_table, "block_table", block_table), cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q,
        rotary_seqlens, softmax_scale, causal, window_size, softcap, alibi_slopes,
        _either("learnable_sink", learnable_sink, "s_aux", s_aux), attention_chunk, rotary_interleaved, q_descale,
        k_descale, v_descale, qv, return_softmax_lse, invariant,
    )  # fmt: skip


def attend_to_cache(
    into: Any, q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    learnable_sink: Any = None, attention_chunk: int = 0, rotary_interleaved: bool = True, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, qv: Any = None, return_softmax_lse: bool = False,
    invariant: str | None = None,
) -> Any:  # fmt: skip
    """:func:`flash_attn_with_kvcache`. ``into`` may be memory for the result and the log-sum-exp of PyTorch
    tensors, if the call appends nothing; it is written without gradients."""
    _probability(0.0, qv=qv)
    want_lse = _flag("return_softmax_lse", return_softmax_lse)
    backend = backend_of(q)
    if backend is None:
        expected = "a PyTorch tensor or a NumPy array, beside a cache that is written in place"
        raise UnsupportedError(invalid_words("the type of q", type(q).__name__, expected), "kind of arrays")
    packed = cu_seqlens_q is not None
    _check_kinds(backend, q, k_cache, v_cache, packed)
    batch = _batch(q, q, cu_seqlens_q, cu_seqlens_q)
    indexed = False  # whether the page table is that of entries
    if cache_batch_idx is not None:
        entries = backend.as_lengths("cache_batch_idx", cache_batch_idx, batch)
        indexed = page_table is None
        # A batch entry of a cache without pages is a page of all its rows.
        page_table = entries.reshape((batch, 1)) if indexed else _rows_of(backend, page_table, entries)
    elif page_table is not None:
        page_table = backend.as_pages(page_table, batch)
    elif k_cache.shape[0] != batch:
        raise ArgumentError(f"k_cache has batch = {k_cache.shape[0]}, but q has {batch}; they must be equal")
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    used = _lengths(backend, q, cache_seqlens, batch)
    arrays = (cu_seqlens_q, None, None, used, cache_leftpad)
    names = ("cu_seqlens_q", "", "", "cache_seqlens", "cache_leftpad")
    lengths = tuple(
        None if array is None else backend.as_lengths(name, array, _features.length_elements(name, batch))
        for name, array in zip(names, arrays)
    )
    append = _append(
        backend, (q, k_cache, v_cache), (k, v, cu_seqlens_k_new), used, batch,
        (rotary_cos, rotary_sin, _flag("rotary_interleaved", rotary_interleaved), rotary_seqlens),
    )  # fmt: skip
    _check_number("softmax_scale", softmax_scale)
    before, after, cap = _band_and_cap(causal, window_size, softcap)
    heads, rows = (q.shape[1], q.shape[0]) if packed else (q.shape[2], q.shape[1])
    chunk = _count("attention_chunk", attention_chunk)
    parts, sink = _parts_of_heads(backend, batch, heads, alibi_slopes, learnable_sink, chunk)
    rows = _longest("max_seqlen_q", max_seqlen_q, rows)
    features = parts.features(
        lengths=lengths, batch=batch, max_q=rows, max_k=capacity, sink=sink, page_table=page_table
    )
    factors = (q_descale, k_descale, v_descale)
    if any(factor is not None for factor in factors):
        features = _with_scales(features, backend, (batch, k_cache.shape[2]), (rows, capacity, capacity), factors)
    features = with_invariant(features, invariant)
    terms = (False, before, after, softmax_scale, cap)
    whole = q[None] if packed else q
    try:
        if into is not None:
            out, lse = into
            backend.attend_into(out, q, k_cache, v_cache, terms, want_lse, features, lse)
        elif append is None:
            out, lse = backend.attend(whole, k_cache, v_cache, 2, terms, want_lse, features)
        else:
            out, lse = backend.append_and_attend(whole, k_cache, v_cache, terms, want_lse, features, append)
    except (ValueError, TypeError, OverflowError) as error:
        if (told := _of_scale(error, "softmax_scale", softmax_scale)) is not None:
            raise told from None
        if isinstance(error, ArgumentError):
            raise ArgumentError(_renamed(str(error), indexed)) from None
        raise
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if want_lse else out


def _check_kinds(backend: Any, q: Any, k_cache: Any, v_cache: Any, packed: bool) -> None:
    """Rejects a mixture of libraries, and extents that do not fit."""
    backend.check_kinds(q, k_cache, v_cache)
    backend.check_given("q", q)
    _check_rank("q", q, packed)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        backend.check_given(name, tensor)
        if tensor.ndim != 4:
            raise ArgumentError(
                f"{name} has {dimensions(tensor.ndim)}; it takes 4: batch or page, row, heads, head_dim"
            )
    if k_cache.shape[3] != q.shape[-1]:
        raise invalid("the head_dim of k_cache", k_cache.shape[3], f"{q.shape[-1]}, that of q")
    if tuple(v_cache.shape[:3]) != tuple(k_cache.shape[:3]):
        raise invalid("the shape of v_cache", tuple(v_cache.shape), f"{tuple(k_cache.shape[:3])} and a head_dim")


def _rows_of(backend: Any, page_table: Any, entries: Any) -> Any:
    """The rows of a page table, for each of q. On a GPU, where the rows are not checked, those outside are cut."""
    rows = page_table.shape[0] if hasattr(page_table, "shape") and page_table.ndim else 0
    page_table = backend.as_pages(page_table, rows)
    bounds = (backend.least_on_host(entries), backend.least_on_host(-entries))
    for found in () if bounds[0] is None else (bounds[0], -bounds[1]):
        if not 0 <= found < rows:
            raise invalid("cache_batch_idx", found, f"0 to {rows - 1}, the rows of page_table")
    return page_table[entries.clip(0, max(rows - 1, 0))]


def _lengths(backend: Any, q: Any, cache_seqlens: Any, batch: Any) -> Any:
    """The array of lengths; an integer is the length of all sequences."""
    # Compiled code cannot ask a number that varies whether it has a shape.
    if cache_seqlens is None or (not isinstance(cache_seqlens, int) and hasattr(cache_seqlens, "shape")):
        return cache_seqlens
    return backend.equal_lengths(q, batch, _count("cache_seqlens", cache_seqlens))


def _append(
    backend: Any, tensors: tuple[Any, Any, Any], new: tuple[Any, Any, Any], used: Any, batch: Any,
    rotary: tuple[Any, Any, bool, Any],
) -> _features.Append | None:  # fmt: skip
    """What the call appends; None if it only reads."""
    k, v, starts = new
    cos, sin, interleaved, positions = rotary
    if (k is None) != (v is None):
        raise ArgumentError("k and v must both be given, or neither")
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_cos and rotary_sin must both be given, or neither")
    if k is None:
        for name, value in (("rotary_cos", cos), ("cu_seqlens_k_new", starts)):
            if value is not None:
                raise invalid(name, _kind(value), "None without k and v")
        return None
    if used is None:
        raise ArgumentError("cache_seqlens is missing: the row of the cache where k and v begin")
    q, k_cache, v_cache = tensors
    backend.check_kinds(q, k, v)
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        backend.check_given(name, tensor)
        _check_rank(name, tensor, starts is not None)
        if tuple(tensor.shape[-2:]) != tuple(cache.shape[-2:]):
            expected = f"(..., {cache.shape[-2]}, {cache.shape[-1]}), heads and head_dim of the cache"
            raise invalid(f"the shape of {name}", tuple(tensor.shape), expected)
    if tuple(v.shape[:-2]) != tuple(k.shape[:-2]) or (starts is None and k.shape[0] != batch):
        expected = f"the rows of k, {tuple(k.shape[:-2])}, with batch = {batch}"
        raise invalid("the shape of v", tuple(v.shape), expected)
    if starts is not None:
        starts = backend.as_lengths("cu_seqlens_k_new", starts, batch + 1)
        k, v = k[None], v[None]
    if cos is None:
        return _features.Append(k, v, starts, None)
    backend.check_kinds(q, cos, sin)
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.ndim != 2 or tuple(table.shape) != tuple(cos.shape):
            raise invalid(f"the shape of {name}", tuple(table.shape), "(positions, rotary_dim / 2) of both tables")
    if not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise invalid("the columns of rotary_cos", cos.shape[1], f"1 to {q.shape[-1] // 2}, half of head_dim")
    if positions is not None:
        positions = backend.as_lengths("rotary_seqlens", positions, batch)
    return _features.Append(k, v, starts, _features.Rotary(cos, sin, interleaved, positions))


def _renamed(message: str, indexed: bool) -> str:
    """A message of Rust in the words of this function."""
    message = message.replace("seqused_k", "cache_seqlens").replace("leftpad_k", "cache_leftpad")
    if indexed and "page_table[" in message:
        message = message.replace("page_table", "cache_batch_idx").replace("[0]:", ":")
    return message
