"""Attention of a batch of sequences that begin with the same keys."""

from __future__ import annotations

from typing import Any

from ._errors import ArgumentError, UnsupportedError, dimensions, invalid, invalid_words
from ._functional import _count, _either, _flag, _kind, backend_of
from ._kvcache import flash_attn_with_kvcache
from ._merge import merge_states

__all__ = ["flash_attn_with_shared_prefix"]


def flash_attn_with_shared_prefix(
    q: Any, k_cache: Any, v_cache: Any, prefix_len: int, cache_seqlens: Any, page_table: Any = None, *,
    block_table: Any = None, cu_seqlens_q: Any = None, max_seqlen_q: Any = None, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, learnable_sink: Any = None, s_aux: Any = None, k_descale: Any = None,
    v_descale: Any = None, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention to a cache in pages whose sequences all begin with the same pages, which are read once for the batch.

    The result is that of :func:`flash_attn_with_kvcache`, rounded once more. All query rows see the whole prefix, so
    the rows of all sequences attend to it as one sequence, each sequence attends to its own keys, and
    :func:`merge_states` joins both (cascade inference).

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``; with ``cu_seqlens_q``, ``(total_q, heads, head_dim)``.
        k_cache: a pool of pages, ``(pages, page_size, heads_k, head_dim)``, into which all keys have been written.
        v_cache: as ``k_cache``, with v's head dim.
        prefix_len: the number of keys that the sequences share, a multiple of ``page_size``.
        cache_seqlens: ``(batch,)``, int32: the keys of each sequence, the prefix included.
        page_table: ``(batch, pages of a sequence)``, int32; the first row has the pages of the prefix, and those of
            the other rows are not read. ``block_table`` is another name.
        causal: this and what follows are those of :func:`flash_attn_with_kvcache`. With a causal mask, a sequence
            has at least ``seqlen_q`` keys of its own.
        k_descale: ``(batch, heads_k)``; the first row holds for the prefix.
        v_descale: as ``k_descale``.

    Returns:
        The output in q's shape, or ``(out, lse)``.

    On a CPU, lengths are checked. On a GPU they are read by the kernels alone.

    Raises:
        ArgumentError: a prefix that is not in whole pages, or is longer than a sequence.
        UnsupportedError: other kinds of arrays than PyTorch's and NumPy's.
    """
    page_table = _either("page_table", page_table, "block_table", block_table)
    want_lse = _flag("return_softmax_lse", return_softmax_lse)
    causal, prefix = _flag("causal", causal), _count("prefix_len", prefix_len)
    backend = backend_of(q)
    if backend is None:
        kinds = "a PyTorch tensor or a NumPy array"
        raise UnsupportedError(invalid_words("the type of q", type(q).__name__, kinds), "kind of arrays")
    if page_table is None or cache_seqlens is None:
        missing = "page_table" if page_table is None else "cache_seqlens"
        raise ArgumentError(f"{missing} is missing: a shared prefix lies in the first pages of every sequence")
    packed = cu_seqlens_q is not None
    for name, x, wanted in (("q", q, 3 if packed else 4), ("k_cache", k_cache, 4), ("page_table", page_table, 2)):
        if backend_of(x) is not backend:
            raise ArgumentError(f"{name} is {_kind(x)}, q {_kind(q)}; they must be of one kind")
        backend.check_given(name, x)
        if x.ndim != wanted:
            raise ArgumentError(f"{name} has {dimensions(x.ndim)}; it takes {wanted}")
    page, most = k_cache.shape[1], k_cache.shape[1] * page_table.shape[1]
    if page == 0 or prefix % page or prefix > most:
        raise invalid("prefix_len", prefix, f"a multiple of the page size {page}, at most {most}")
    lengths = backend.as_lengths("cache_seqlens", cache_seqlens, page_table.shape[0])
    own = 0 if packed or not causal else q.shape[1]
    least = backend.least_on_host(lengths)
    if least is not None and least < prefix + own:
        raise ArgumentError(
            f"a sequence of cache_seqlens has {least} keys; expected at least {prefix + own}: prefix_len"
            + (f" and the {own} rows of q" if own else "")
        )
    shared: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache,
        cache_seqlens=lengths - prefix, page_table=page_table[:, prefix // page :],
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=causal,
        learnable_sink=learnable_sink, s_aux=s_aux, k_descale=k_descale, v_descale=v_descale, **shared,
    )  # fmt: skip
    if prefix:
        rows = q.reshape((1, -1, *q.shape[-2:]))
        first = [None if factors is None else factors[:1] for factors in (k_descale, v_descale)]
        of_prefix, lse_of_prefix = flash_attn_with_kvcache(
            rows, k_cache, v_cache, page_table=page_table[:1, : prefix // page],
            k_descale=first[0], v_descale=first[1], **shared,
        )  # fmt: skip
        of_prefix = of_prefix.reshape(out.shape)
        # (1, heads, rows) in the shape of the other part
        lse_of_prefix = lse_of_prefix[0]
        if not packed:
            batch, seqlen, heads, _ = out.shape
            lse_of_prefix = lse_of_prefix.reshape((heads, batch, seqlen)).swapaxes(0, 1)
        out, lse = merge_states([out, of_prefix], [lse, lse_of_prefix])
    return (out, lse) if want_lse else out
