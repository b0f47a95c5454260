"""Routes an existing model's attention to FlashCore.

>>> flashcore_attn.compat.enable()  # torch.nn.functional.scaled_dot_product_attention is FlashCore's from now on
>>> model(x)
>>> flashcore_attn.compat.stats()   # {'calls': 24, 'flashcore': 22, 'fallback': 2, 'reasons': {'dropout_p': 2}}
>>> flashcore_attn.compat.disable()

``torch.nn.attention.flex_attention.flex_attention`` is routed in the same way, except in compiled code:
``torch.compile(flex_attention)`` stays PyTorch's.

Calls that FlashCore does not support (dropout, gradients, a device, type or head dim that it lacks, a function that
cannot be a program) run in PyTorch as before, and are counted with their reason. The same holds for tensors of other
classes than ``torch.Tensor`` (distributed tensors, for example), for calls that ``torch.jit`` and ``torch.fx`` trace,
and for calls where ``torch.nn.attention.sdpa_kernel`` or ``torch.backends.cuda`` excludes flash attention: the user's
choice of a kernel stays in force.

Code is routed if it looks the function up when it calls it: as ``F.scaled_dot_product_attention`` or
``torch.nn.functional.scaled_dot_product_attention`` in any module. Two cases are not routed: a name that was imported
before (``from torch.nn.functional import scaled_dot_product_attention``), and the fused C++ path of
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` in inference, which
``torch.backends.mha.set_fastpath_enabled(False)`` turns off.

``torch.compile`` traces the function that is in place at compile time, and compiles again when that changes. Whether a
compiled call is routed is decided once, during tracing. Compiled calls are not counted.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _features
from ._errors import FlashCoreError, UnsupportedError
from ._flex import flex_attention
from ._functional import _leads_agree, load, scaled_dot_product_attention

__all__ = ["disable", "enable", "enabled", "reset_stats", "stats"]

# Times log2(e) it is finite in float32.
_LARGEST_SCALE = 2e38

_lock = threading.Lock()
_torch: Any = None  # `flashcore_attn._torch` from the first `enable` on
_original: Any = None  # PyTorch's function, while FlashCore's replaces it
_original_flex: Any = None  # its FlexAttention, likewise
_depth = 0  # number of calls of `enable` without a matching `disable`
_served = 0
_fallbacks: Counter[str] = Counter()


def enable() -> None:
    """Replaces ``torch.nn.functional.scaled_dot_product_attention`` by FlashCore, in the whole process,
    whatever its other threads call. Calls nest.

    Raises:
        UnsupportedError: when PyTorch is not installed, or too old.
    """
    global _torch, _original, _original_flex, _depth
    try:
        import torch.nn.attention.flex_attention as flex
        import torch.nn.functional as functional
    except ModuleNotFoundError as error:
        message = "compat stands in for PyTorch's attention, and PyTorch is not installed; pip install torch"
        raise UnsupportedError(message, "torch is missing") from error

    load("_torch")
    from . import _torch as loaded

    loaded.script_as(_attention, "aten::scaled_dot_product_attention")
    with _lock:
        _torch = loaded
        _depth += 1
        # Somebody may have put PyTorch's function back since the last call. Another library's function stays:
        # it may call this one.
        if _original is None or functional.scaled_dot_product_attention is _original:
            _original = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = _attention
        if _original_flex is None or flex.flex_attention is _original_flex:
            _original_flex = flex.flex_attention
            flex.flex_attention = _flex


def disable() -> None:
    """Undoes one :func:`enable`. The last one restores PyTorch's functions. Without one it does nothing."""
    global _original, _original_flex, _depth
    if _depth == 0:  # this case does not need PyTorch
        return
    import torch.nn.attention.flex_attention as flex
    import torch.nn.functional as functional

    with _lock:
        _depth = max(_depth - 1, 0)
        # Another library may have replaced the function after `enable`. Its function stays.
        if _depth == 0 and functional.scaled_dot_product_attention is _attention:
            functional.scaled_dot_product_attention = _original
            _original = None
        if _depth == 0 and flex.flex_attention is _flex:
            flex.flex_attention = _original_flex
            _original_flex = None


@contextmanager
def enabled() -> Iterator[None]:
    """Calls :func:`enable` for the duration of a ``with`` block, in the whole process."""
    enable()
    try:
        yield
    finally:
        disable()


def stats() -> dict[str, Any]:
    """The number of calls, of those that ran on FlashCore, of those that fell back, and the reasons.

    Returns:
        ``{"calls": int, "flashcore": int, "fallback": int, "reasons": {reason: int}}`` since the process began or
        since :func:`reset_stats`. Calls in compiled code are not counted.
    """
    with _lock:
        fallback = sum(_fallbacks.values())
        return {"calls": _served + fallback, "flashcore": _served, "fallback": fallback, "reasons": dict(_fallbacks)}


def reset_stats() -> None:
    """Sets all counts to 0."""
    global _served
    with _lock:
        _served = 0
        _fallbacks.clear()


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    import torch

    original = _original  # once: `disable` in another thread may take it away at any time
    if original is None:
        original = torch._C._nn.scaled_dot_product_attention

    def fall_back() -> Any:
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    if _depth == 0:  # a caller kept this function after `disable` had restored PyTorch's
        return fall_back()
    reason = _unsupported_reason(torch, query, key, value, attn_mask, dropout_p)
    if torch.compiler.is_compiling():  # nothing is tried twice, and the call is not counted
        if reason is None:
            reason = _refused(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if reason is not None:
            return fall_back()
        return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)

    def ours() -> Any:
        return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)

    return _counted(ours, fall_back, reason)


def _counted(ours: Any, fall_back: Any, reason: str | None) -> Any:
    """The result of ``ours`` or, if there is a reason, of ``fall_back``; counts both."""
    global _served
    if reason is None:
        try:
            out = ours()
        except UnsupportedError as error:
            reason = error.reason
        except FlashCoreError as error:  # PyTorch may accept the call, or raises its own error
            reason = _argument(error)
        else:
            with _lock:
                _served += 1
            return out
    with _lock:
        _fallbacks[reason] += 1
    return fall_back()


# "invalid value '3' for the shape of attn_mask: expected …", "k has batch = 2, but …"
_NAMED = re.compile(
    r"^invalid value .* for (?:the [a-z ]+ of )?(\w+)[^:]*: expected|^(\w+) (?:is|has|ends) ", re.DOTALL
)


def _argument(error: FlashCoreError) -> str:
    """The argument that an error names; the error's class if it names none."""
    found = _NAMED.match(str(error))
    return (found[1] or found[2]) if found else type(error).__name__


def _flex(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **others: Any,
) -> Any:
    import torch
    import torch.nn.attention.flex_attention as flex

    original = _original_flex or flex.flex_attention

    def fall_back() -> Any:
        return original(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
        )  # fmt: skip

    if _depth == 0 or torch.compiler.is_compiling():
        return fall_back()
    reason = _unsupported_reason(torch, query, key, value, None, 0.0)

    def ours() -> Any:
        return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, **others)

    return _counted(ours, fall_back, reason)


def _refused(query: Any, key: Any, value: Any, mask: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> str | None:
    """The argument for which a call would raise an error while it is compiled, where PyTorch may accept it."""
    if mask is not None and is_causal:
        return "is_causal"
    if isinstance(scale, (int, float)) and not -_LARGEST_SCALE < scale < _LARGEST_SCALE:
        return "scale"
    if query.ndim < 2 or query.shape[-1] == 0 or value.shape[-1] == 0:
        return "head_dim"
    agree = _leads_agree(query, key, value, enable_gqa)
    if enable_gqa and not agree:
        heads, heads_k, heads_v = (x.shape[-3] if x.ndim > 2 else 0 for x in (query, key, value))
        if heads_k != heads_v or heads_k == 0 or heads % heads_k:
            return "enable_gqa"
    if mask is None:
        return None
    # Leading dimensions that differ and broadcast are checked by PyTorch in any case.
    lead = query.shape[:-2] if agree else _torch.broadcast_leads(query, key, value, enable_gqa)
    fits = _features.broadcasts(mask.shape, (*lead, query.shape[-2], key.shape[-2]))
    return None if fits and _torch.takes_mask(mask, query) else "attn_mask"


def _unsupported_reason(torch: Any, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float) -> str | None:
    """The reason for a call that is known to fail. A compiled call cannot fall back after it has failed."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for x in tensors:
        if type(x) not in _torch.PLAIN:
            return f"type {type(x).__name__}"
    if dropout_p or dropout_p is None:
        return "dropout_p"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "requires_grad"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward_ad"
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        return "tracing"
    if attn_mask is not None and attn_mask.ndim < 2:  # some of PyTorch's implementations refuse such masks
        return "attn_mask"
    if _torch.flash_is_left_out():
        return "sdpa_kernel"
    return _torch.lacks(query, key, value)
