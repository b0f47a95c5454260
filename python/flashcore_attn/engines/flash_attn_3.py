"""The private functions of ``flash_attn_interface`` (FlashAttention-3), for libraries that call them.

See :mod:`flashcore_attn.engines.flash_attn_2`. TransformerEngine passes the arguments by position. The names ``out``
and ``window_size=(left, right)`` of earlier revisions are taken beside ``out_``, ``window_size_left`` and
``window_size_right``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import Saved
from .._errors import UnsupportedError, invalid_words
from .._functional import _either, _kind, flash_attn_func
from .._kvcache import flash_attn_with_kvcache
from .._packed import flash_attn_qkvpacked_func
from .._varlen import flash_attn_varlen_func
from . import _calls

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
    *, out: Tensor | None = None, window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(out, softmax_lse, out_accum, softmax_lse_accum)``; the last two are empty."""
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, causal, window, softcap)
    descale = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if page_table is None and k_new is kv_batch_idx is rotary_cos is None:
        made, lse, _ = _calls.forward(
            q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (max_seqlen_q, max_seqlen_k), score,
            0.0, False, leftpad_k=leftpad_k, qv=qv, attention_chunk=attention_chunk, **descale,
        )  # fmt: skip
    else:
        for name, x in (("cu_seqlens_k", cu_seqlens_k), ("seqused_q", seqused_q)):
            if x is not None:
                raise UnsupportedError(invalid_words(name, _kind(x), "None beside a cache"), name)
        made, lse = _calls.cached(
            q, k, v, k_new, v_new, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table,
            score=score, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
            rotary_seqlens=seqlens_rotary, rotary_interleaved=rotary_interleaved, qv=qv,
            attention_chunk=attention_chunk, **descale,
        )  # fmt: skip
    into = _either("out_", out_, "out", out)
    empty = q.new_empty(0, dtype=torch.float32)
    return made if into is None else into.copy_(made), lse, empty, empty


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0, *,
    causal: bool | None = None, window_size: Any = None,
) -> Any:  # fmt: skip
    """Writes dq, dk and dv, and returns ``softmax_d``; with ``window_size``, ``(dq, dk, dv, softmax_d)``.

    ``causal`` is the name of ``is_causal`` in earlier revisions.
    """
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, is_causal if causal is None else causal, window, softcap)
    grads = _calls.backward(
        dout, Saved(q, k, v, out, softmax_lse), (dq, dk, dv), (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k),
        (max_seqlen_q, max_seqlen_k), score, deterministic,
    )  # fmt: skip
    empty = q.new_empty(0, dtype=torch.float32)
    return empty if window_size is None else (*grads, empty)
