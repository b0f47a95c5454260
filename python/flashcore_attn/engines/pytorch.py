"""FlashCore as PyTorch's flash attention, for SDPA, ``varlen_attn`` and PyTorch's context parallelism.

>>> import flashcore_attn.engines.pytorch
>>> torch.nn.attention.activate_flash_attention_impl("FLASHCORE")
>>> with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch may prefer cuDNN otherwise
...     model(x)
>>> torch.nn.attention.restore_flash_attention_impl()

Importing the module registers the name. PyTorch's operators of flash attention run FlashCore from the activation on,
forward and backward, for CUDA tensors, in eager mode and in compiled graphs. A call that FlashCore does not support
(a type or head dim that it lacks) runs in PyTorch's own kernel, with one warning for each reason.
``varlen_attn`` takes pages of any size with ``block_table``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._autograd import Saved
from .._errors import UnsupportedError
from . import _calls

__all__ = ["NAME", "register"]

#: The name for ``torch.nn.attention.activate_flash_attention_impl``.
NAME = "FLASHCORE"


def register() -> None:
    """Registers the implementation. Importing the module calls this function.

    Raises:
        UnsupportedError: this release of PyTorch takes no implementation of flash attention.
    """
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None or not hasattr(torch.library, "get_kernel"):
        words = f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl"
        raise UnsupportedError(f"{words}; use flashcore_attn.compat", "register_flash_attention_impl")
    add(NAME, register_fn=install)


class Installed:
    """The overrides that are in force until :meth:`remove`."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def remove(self) -> None:
        """Restores PyTorch's kernels."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def install(key: str = "CUDA") -> Installed:
    """Overrides PyTorch's operators for a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _OVERRIDES.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, _override(name, function, key), key, with_keyset=True)
    return Installed(library)


def _override(name: str, ours: Callable[..., Any], key: str) -> Callable[..., Any]:
    """A kernel that calls FlashCore, and PyTorch's kernel for what FlashCore does not support."""
    try:
        theirs = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:  # the operator has no kernel for this key
        theirs = None
    told: set[str] = set()

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except UnsupportedError as error:
            if theirs is None:
                raise
            if error.reason not in told:
                told.add(error.reason)
                warnings.warn(f"aten::{name} runs in PyTorch's own kernel: {error}", stacklevel=2)
        return theirs.call_boxed(keyset, *args, **kwargs)

    return kernel


def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    score = _calls.Score(scale, is_causal, (window_size_left, window_size_right), 0.0, alibi_slopes)
    dropout = _calls.drawn(query, dropout_p)
    out, lse, mask = _calls.forward(
        query, key, value, (cum_seq_q, cum_seq_k, None, seqused_k), (max_q, max_k), score, dropout,
        return_debug_mask, block_table=block_table,
    )  # fmt: skip
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, dropout.state.view(torch.uint64), unused, mask


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    made, lse, *_ = _flash_attention_forward(*args, **kwargs)
    out.copy_(made)
    return lse


def _scaled_dot_product_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, keys = query.shape[2], key.shape[2]
    made = _flash_attention_forward(
        q, k, v, None, None, rows, keys, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return (made[0].transpose(1, 2), made[1], None, None, rows, keys, *made[2:])


def _flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dropout = _calls.stated(query, dropout_p, rng_state)
    score = _calls.Score(scale, is_causal, (window_size_left, window_size_right))
    saved = Saved(query, key, value, out, logsumexp)
    into = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    deterministic = torch.are_deterministic_algorithms_enabled()
    lengths = (cum_seq_q, cum_seq_k, None, None)
    return tuple(_calls.backward(grad_out, saved, into, lengths, (max_q, max_k), score, deterministic, dropout))


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    rows = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in _flash_attention_backward(*rows, *args, **kwargs))


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_no_dropout_inplace,
    "_scaled_dot_product_flash_attention": _scaled_dot_product_flash_attention,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_flash_attention_backward,
}

register()
