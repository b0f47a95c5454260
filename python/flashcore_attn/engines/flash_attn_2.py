"""The private functions of ``flash_attn.flash_attn_interface`` (FlashAttention-2), for libraries that call them.

TransformerEngine, Megatron, ring-flash-attn and yunchang (USP) call these functions by position or by name, and merge
results of parts of the keys by themselves. :func:`flashcore_attn.engines.flash_attn.install` puts this module into
the place of flash-attn's.

The arguments are those of flash-attn 2.7 and 2.8. ``window_size=(left, right)`` in place of ``window_size_left`` and
``window_size_right`` asks for the results of 2.6 and before, which had more elements. ``softmax_lse`` is
``(batch, heads, seqlen_q)``, of packed sequences ``(heads, total_q)``, float32. ``rng_state`` is the state of dropout's
generator, which the backward pass takes, and ``S_dmask`` has 1 where a weight is kept and -1 where it is dropped.
``softmax_d``, a by-product of flash-attn's kernel, is empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import Saved
from .._dropout import Stated
from .._functional import flash_attn_func
from .._kvcache import flash_attn_with_kvcache
from .._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .._varlen import flash_attn_varlen_func
from . import _calls

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False, *, window_size: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``(out, softmax_lse, S_dmask, rng_state)``; with ``window_size``,
    ``(out, q, k, v, out, softmax_lse, S_dmask, rng_state)``."""
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, causal, window, softcap, alibi_slopes)
    dropout = _calls.drawn(q, dropout_p)
    made = _calls.forward(q, k, v, (None,) * 4, (None, None), score, dropout, return_softmax)
    return _results(q, k, v, made, dropout, window_size)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0, *, window_size: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As :func:`_flash_attn_forward`, of packed sequences. Rows of no sequence are 0 in any case."""
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, causal, window, softcap, alibi_slopes)
    dropout = _calls.drawn(q, dropout_p)
    made = _calls.forward(
        q, k, v, (cu_seqlens_q, cu_seqlens_k, None, seqused_k), (max_seqlen_q, max_seqlen_k), score, dropout,
        return_softmax, block_table=block_table, leftpad_k=leftpad_k,
    )  # fmt: skip
    return _results(q, k, v, made, dropout, window_size)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None, *,
    window_size: Any = None,
) -> Any:  # fmt: skip
    """Writes dq, dk and dv, and returns ``softmax_d``; with ``window_size``, ``(dq, dk, dv, softmax_d)``.

    ``out`` and ``softmax_lse`` may be those of more keys than ``k`` has, as in a ring: the gradients are those of
    these keys' share.
    """
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, causal, window, softcap, alibi_slopes)
    saved, dropout = Saved(q, k, v, out, softmax_lse), _calls.stated(q, dropout_p, rng_state)
    grads = _calls.backward(dout, saved, (dq, dk, dv), (None,) * 4, (None, None), score, deterministic, dropout)
    return _gradients(q, grads, window_size)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None, zero_tensors: bool = False, *,
    window_size: Any = None,
) -> Any:  # fmt: skip
    """As :func:`_flash_attn_backward`, of packed sequences."""
    window = _calls.window_of(window_size_left, window_size_right, window_size)
    score = _calls.Score(softmax_scale, causal, window, softcap, alibi_slopes)
    grads = _calls.backward(
        dout, Saved(q, k, v, out, softmax_lse), (dq, dk, dv), (cu_seqlens_q, cu_seqlens_k, None, None),
        (max_seqlen_q, max_seqlen_k), score, deterministic, _calls.stated(q, dropout_p, rng_state),
    )  # fmt: skip
    return _gradients(q, grads, window_size)


def _results(
    q: Tensor, k: Tensor, v: Tensor, made: tuple[Tensor, ...], dropout: Stated, window_size: Any
) -> tuple[Tensor, ...]:
    (out, lse, mask), state = made, dropout.state.view(torch.int64)
    return (out, lse, mask, state) if window_size is None else (out, q, k, v, out, lse, mask, state)


def _gradients(q: Tensor, grads: list[Tensor], window_size: Any) -> Any:
    empty = q.new_empty(0, dtype=torch.float32)
    return empty if window_size is None else (*grads, empty)
