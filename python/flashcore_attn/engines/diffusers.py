"""FlashCore as an attention backend of diffusers, with its ring and Ulysses attention.

>>> import flashcore_attn.engines.diffusers
>>> pipeline.transformer.set_attention_backend("flashcore")

Importing the module registers the backend. Masks are read in place, forward and backward; dropout is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from .._autograd import Saved
from .._functional import flash_attn_func, scaled_dot_product_attention
from . import _calls, _serving

__all__ = ["NAME", "attention", "register"]

#: The value of ``set_attention_backend``.
NAME = "flashcore"


def register() -> None:
    """Registers the backend. Importing the module calls this function.

    diffusers lists its backends in an enumeration, which gets one more member.
    """
    names = dispatch.AttentionBackendName
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    dispatch._AttentionBackendRegistry.register(member, constraints=[], supports_context_parallel=True)(attention)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1), return_lse: bool = False, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    """Attention of ``(batch, sequence, heads, head_dim)``; ``enable_gqa`` needs no copies of keys."""
    _calls.no_dropout(dropout_p)
    if attn_mask is not None:
        if return_lse or _parallel_config is not None or tuple(window_size) != (-1, -1):
            raise _serving.unsupported("attn_mask beside return_lse, a window or a parallel configuration", "None")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale, True).transpose(1, 2)
    if _parallel_config is None:
        return flash_attn_func(
            query,
            key,
            value,
            0.0,
            scale,
            is_causal,
            window_size,
            return_lse=return_lse,
        )
    return dispatch._templated_context_parallel_attention(
        query, key, value, None, 0.0, is_causal, scale, enable_gqa, return_lse,
        forward_op=functools.partial(_forward, window_size=window_size), backward_op=_backward,
        _parallel_config=_parallel_config,
    )  # fmt: skip


def _forward(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    _save_ctx: bool = True, _parallel_config: Any = None, *, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    """A part of the keys: the result, and the log-sum-exp ``(batch, sequence, heads)``."""
    score = _calls.Score(scale, is_causal, window_size)
    out, lse, _ = _calls.forward(query, key, value, (None,) * 4, (None, None), score)
    lse = lse.transpose(1, 2)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.score = score
    return (out, lse) if return_lse else out


def _backward(ctx: Any, grad_out: Tensor, *args: Any, **given: Any) -> tuple[Tensor, ...]:
    """The gradients of a part of the keys. A ring passes the part, and the result over all parts."""
    names = ("query", "key", "value", "out", "lse")
    found = [saved if given.get(name) is None else given[name] for name, saved in zip(names, ctx.saved_tensors)]
    q, k, v, out, lse = found
    saved = Saved(q, k, v, out, lse.transpose(1, 2).contiguous())
    into = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    grad_out = grad_out.to(out.dtype)
    return tuple(_calls.backward(grad_out, saved, into, (None,) * 4, (None, None), ctx.score, True))


register()
