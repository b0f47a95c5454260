"""Calls that flash-attn's private functions share: a forward pass with its log-sum-exp, and gradients in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _dropout, _features, _torch
from .._errors import ArgumentError, DTypeError, UnsupportedError, invalid, invalid_words
from .._functional import _band_and_cap, _count
from .._kvcache import flash_attn_with_kvcache
from .._varlen import flash_attn_varlen_func

#: ``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_q`` and ``seqused_k``.
Lengths = tuple[Any, Any, Any, Any]


class Score(NamedTuple):
    """The arguments of a call that change its scores."""

    softmax_scale: float | None
    causal: bool
    window: tuple[Any, Any]
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None


def window_of(left: Any, right: Any, both: Any) -> tuple[Any, Any]:
    """The window, which an older generation of flash-attn passes as one pair."""
    if both is None:
        return left, right
    if (left, right) != (-1, -1):
        raise invalid("window_size", both, "None beside window_size_left and window_size_right")
    before, after = both
    return before, after


def no_dropout(dropout_p: float) -> None:
    """Rejects dropout."""
    if dropout_p:
        raise UnsupportedError(invalid_words("dropout_p", dropout_p, "0.0"), "dropout_p")


def drawn(q: Tensor, dropout_p: float) -> _dropout.Stated:
    """A probability of dropout with a state of the generator, which is of zeros without dropout."""
    p = _dropout.probability(dropout_p)
    return _dropout.Stated(p, _torch.draw_rng_state(q) if p else torch.zeros(4, dtype=torch.int32, device=q.device))


def stated(q: Tensor, dropout_p: float, rng_state: Tensor | None) -> _dropout.Stated:
    """A probability with the state that a forward pass has returned: two integers of 64 bits."""
    p = _dropout.probability(dropout_p)
    if not p:
        return _dropout.Stated(p, None)
    if rng_state is None:
        raise invalid("rng_state", None, "the state that the forward pass has returned, where dropout_p is not 0")
    if rng_state.dtype not in (torch.int64, torch.uint64) or tuple(rng_state.shape) != (2,):
        found = f"{tuple(rng_state.shape)} of {rng_state.dtype}"
        raise invalid("the shape of rng_state", found, "(2,) of torch.int64 or torch.uint64")
    return _dropout.Stated(p, rng_state.contiguous().view(torch.int32))


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, longest: tuple[Any, Any], score: Score,
    dropout: float = 0.0, return_softmax: bool = False, **others: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, its log-sum-exp, and the mask of dropout if it is wanted, else an empty tensor; autograd records
    nothing."""
    if return_softmax and not dropout:
        raise UnsupportedError(invalid_words("return_softmax", True, "False without dropout"), "return_softmax")
    with torch.no_grad():
        out, lse, *mask = flash_attn_varlen_func(
            q, k, v, lengths[0], lengths[1], *longest, dropout, score.softmax_scale, score.causal, score.window,
            score.softcap or 0.0, score.alibi_slopes, seqused_q=lengths[2], seqused_k=lengths[3],
            return_attn_probs=return_softmax, return_lse=True, **others,
        )  # fmt: skip
    return out, lse, mask[0] if mask else q.new_empty(0)


def cached(*tensors: Any, score: Score, **others: Any) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp of attention to a cache."""
    with torch.no_grad():
        made = flash_attn_with_kvcache(
            *tensors, softmax_scale=score.softmax_scale, causal=score.causal, window_size=score.window,
            softcap=score.softcap or 0.0, alibi_slopes=score.alibi_slopes, return_softmax_lse=True, **others,
        )  # fmt: skip
    out, lse = made
    return out, lse


def backward(
    d_out: Tensor,
    saved: _autograd.Saved,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    lengths: Lengths,
    longest: tuple[Any, Any],
    score: Score,
    deterministic: bool,
    dropout: _dropout.Stated | None = None,
) -> list[Tensor]:
    """The gradients of q, k and v, written into the tensors of ``into`` that are given.

    Raises:
        ArgumentError: shapes or devices that do not fit.
        DTypeError: a gradient's memory of another type than its tensor.
        UnsupportedError: gradients that the device does not compute.
    """
    q, k, v, out, lse = saved
    starts = (("q", q, lengths[0]), ("k", k, lengths[1]), ("v", v, lengths[1]))
    for name, x, start in starts:
        _torch.check_given(name, x)
        if x.ndim != (4 if start is None else 3):
            expected = "(batch, sequence, heads, head_dim), or (rows, heads, head_dim) with cumulative lengths"
            raise invalid(f"the shape of {name}", tuple(x.shape), expected)
    packed = lengths[0] is not None
    if packed != (lengths[1] is not None):
        raise ArgumentError("cu_seqlens_q and cu_seqlens_k must both be given, or neither")
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) != rows:
        raise invalid("the shape of softmax_lse", tuple(lse.shape), f"{rows}")
    for name, x, like in (("dout", d_out, out), ("dq", into[0], q), ("dk", into[1], k), ("dv", into[2], v)):
        _check_like(name, x, like)
    features = _features_of(q, k, lengths, longest, score)
    if dropout:
        features = _dropout.with_dropout(features, _torch, q, dropout)
    _autograd.check(q.detach(), k.detach(), v.detach(), features)
    before, after, cap = _band_and_cap(score.causal, score.window, score.softcap or 0.0)
    terms = (False, before, after, score.softmax_scale, cap)
    whole = [x[None] if packed else x for x in (d_out, q, k, v, out, lse)]
    # Memory whose rows are not contiguous gets a copy of the gradient.
    places = [None if x is None or (x.shape[-1] > 1 and x.stride(-1) != 1) else x for x in into]
    memory = tuple(None if x is None else (x[None] if packed else x) for x in places)
    with torch.no_grad():
        found = _autograd.compute(
            whole[0], None, _autograd.Saved(*whole[1:]), 2, terms, features, deterministic=deterministic, into=memory
        )
        grads = [x[0] if packed else x for x in found]
        return [
            grad if given is None or place is not None else given.copy_(grad)
            for grad, given, place in zip(grads, into, places)
        ]


def _check_like(name: str, x: Tensor | None, like: Tensor) -> None:
    if x is None:
        return
    _torch.check_given(name, x)
    if x.shape != like.shape:
        raise invalid(f"the shape of {name}", tuple(x.shape), f"{tuple(like.shape)}")
    if x.dtype != like.dtype:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, str(like.dtype)))
    if x.device != like.device:
        raise ArgumentError(f"{name} is on {x.device}, its tensor on {like.device}; they must be on one device")


def _features_of(q: Tensor, k: Tensor, lengths: Lengths, longest: tuple[Any, Any], score: Score) -> Any:
    packed = lengths[0] is not None
    batch = lengths[0].shape[0] - 1 if packed else q.shape[0]
    arrays = tuple(
        None if x is None else _torch.as_lengths(name, x, _features.length_elements(name, batch))
        for name, x in zip(_features.LENGTHS, (*lengths, None))
    )
    parts = _features.Parts()
    if score.alibi_slopes is not None:
        _features.alibi(parts, _torch, score.alibi_slopes, batch, q.shape[-2])
    names = ("max_seqlen_q", "max_seqlen_k")
    most = [
        x.shape[0 if packed else 1] if given is None else _count(name, given)
        for name, x, given in zip(names, (q, k), longest)
    ]
    return parts.features(lengths=arrays, batch=batch, max_q=most[0], max_k=most[1])
