"""Routes an existing model's attention to FlashCore.

>>> flashcore_attn.compat.enable()  # torch.nn.functional.scaled_dot_product_attention is FlashCore's from now on
>>> model(x)
>>> flashcore_attn.compat.stats()   # {'calls': 24, 'flashcore': 22, 'fallback': 2, 'reasons': {'attn_mask': 2}}
>>> flashcore_attn.compat.disable()

``torch.nn.attention.flex_attention.flex_attention`` is routed in the same way, except in compiled code:
``torch.compile(flex_attention)`` stays PyTorch's.

Calls that FlashCore does not support (gradients that the device does not compute, a device, type or head dim
that it lacks, a function that cannot be a program) run in PyTorch as before, and are counted with their reason. The
same holds for tensors of other classes than ``torch.Tensor`` (distributed tensors and ``torch.nn.attention.bias``,
for example), for calls under a ``TorchFunctionMode`` or a ``TorchDispatchMode`` that is not known to leave attention
alone (the default device and the counter of FLOP are known), for calls that ``torch.jit`` and
``torch.fx.symbolic_trace`` trace, and for calls where ``torch.nn.attention.sdpa_kernel`` or ``torch.backends.cuda``
excludes flash attention: the user's choice of a kernel stays in force. While a class or a mode decides about a call,
PyTorch's function is in place, for all threads.

Code is routed if it looks the function up when it calls it: as ``F.scaled_dot_product_attention`` or
``torch.nn.functional.scaled_dot_product_attention`` in any module. The fused C++ path of ``nn.MultiheadAttention`` and
``nn.TransformerEncoder`` in inference calls no Python function: :func:`enable` turns it off, and the last
:func:`disable` on again. A name that was imported before (``from torch.nn.functional import
scaled_dot_product_attention``) is not routed. Where nothing was counted, :func:`stats` says why.

``torch.compile`` traces the function that is in place at compile time, and compiles again when that changes. Whether a
compiled call is routed is decided once, during tracing. Compiled calls are not counted. ``torch.export`` and
``make_fx`` record FlashCore's operator; a call of theirs is counted when it is traced.

The function in place has the name, module, documentation, signature and pickle of PyTorch's. One that another library
has put there is not replaced: ``enable`` raises an error that names it. Enabled first, FlashCore is what the other
library's function calls.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _features, _uncounted
from ._broadcast import leads_agree
from ._errors import FlashCoreError, UnsupportedError
from ._flex import flex_attention
from ._functional import load, scaled_dot_product_attention
from ._replaced import Replacement

__all__ = ["disable", "enable", "enabled", "reset_stats", "stats"]

# Times log2(e) it is finite in float32.
_LARGEST_SCALE = 2e38

_lock = threading.Lock()
_torch: Any = None  # `flashcore_attn._torch` from the first `enable` on
_overrides: Any = None  # `flashcore_attn._overrides`, likewise
_served = 0
_fallbacks: Counter[str] = Counter()
_turned_off = False  # whether `enable` has turned PyTorch's fast path off
_was_enabled = False  # whether `enable` was called since the counts began


def __dir__() -> list[str]:
    return sorted(__all__)


def enable() -> None:
    """Replaces ``torch.nn.functional.scaled_dot_product_attention`` by FlashCore, in the whole process,
    whatever its other threads call, and turns PyTorch's fast path of ``nn.MultiheadAttention`` off. Calls nest.

    Raises:
        UnsupportedError: when PyTorch is not installed, or too old, or when another library has replaced the function.
    """
    global _torch, _overrides, _was_enabled
    try:
        importlib.import_module("torch.nn.attention.flex_attention")
    except ModuleNotFoundError as error:
        message = "compat stands in for PyTorch's attention, and PyTorch is not installed; pip install torch"
        raise UnsupportedError(message, "torch is missing") from error

    load("_torch")
    from . import _overrides as overrides
    from . import _torch as loaded

    loaded.script_as(_attention, "aten::scaled_dot_product_attention")
    _torch, _overrides = loaded, overrides
    for function in _functions:
        function.check()
    for function in _functions:
        function.enable()
    _was_enabled = True
    _turn_fast_path_off()


def disable() -> None:
    """Undoes one :func:`enable`. The last one restores PyTorch's functions. Without one it does nothing."""
    for function in _functions:
        function.disable()
    if not _attention.active:
        _turn_fast_path_on()


def _turn_fast_path_off() -> None:
    """Turns the fused path off that calls no Python function."""
    global _turned_off
    import torch

    with _lock:
        if torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            _turned_off = True


def _turn_fast_path_on() -> None:
    """Restores the fused path, if `enable` has turned it off."""
    global _turned_off
    with _lock:
        if _turned_off:
            sys.modules["torch"].backends.mha.set_fastpath_enabled(True)
            _turned_off = False


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
        since :func:`reset_stats`. Calls that ``torch.compile`` traces are not counted. With 0 calls, ``"why"`` lists
        what this process shows of the reasons, a sentence each.
    """
    with _lock:
        fallback = sum(_fallbacks.values())
        counts: dict[str, Any] = {"calls": _served + fallback, "flashcore": _served, "fallback": fallback}
        counts["reasons"] = dict(_fallbacks)
    if not counts["calls"]:
        counts["why"] = _uncounted.reasons(_functions, _was_enabled)
    return counts


def reset_stats() -> None:
    """Sets all counts to 0."""
    global _served, _was_enabled
    with _lock:
        _served = 0
        _fallbacks.clear()
        _was_enabled = _attention.active


class _Attention(Replacement):
    def __call__(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if self.active and not _torch.is_dynamo_compiling() and _torch.eager is not None:
            out = _torch.eager.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, True)
            if out is not None:
                _count()
                return out
        import torch

        def theirs() -> Any:
            return self.original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )  # fmt: skip

        def ours() -> Any:
            return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

        if not self.active:  # a caller kept this function after `disable` had restored PyTorch's
            return theirs()
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        if type(is_causal) is not bool or type(enable_gqa) is not bool:  # PyTorch refuses other truth values
            return _counted(ours, theirs, "is_causal" if type(is_causal) is not bool else "enable_gqa")
        others = [x for x in tensors if type(x) not in _overrides.PLAIN]
        override = _override(others)
        if override is not None:
            return self._overridden(override, theirs)
        reason = _unsupported_reason(torch, tensors, dropout_p)
        if reason is None and (others or torch.compiler.is_compiling()):  # nothing is tried twice in a graph
            reason = _refused(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        return _counted(ours, theirs, reason)

    def _overridden(self, override: str, theirs: Any) -> Any:
        """PyTorch's function, where a class or a mode decides what it means."""
        import torch.nn.functional as functional

        if not _torch.is_dynamo_compiling():
            with self.lent():
                return _counted(theirs, theirs, override)
        if functional.scaled_dot_product_attention is not self:
            return theirs()
        functional.scaled_dot_product_attention = self.original
        try:
            return theirs()
        finally:
            functional.scaled_dot_product_attention = self


def _count() -> None:
    """Counts a call that FlashCore has computed."""
    global _served
    with _lock:
        _served += 1


def _counted(ours: Any, theirs: Any, reason: str | None) -> Any:
    """The result of ``ours`` or, if there is a reason, of ``theirs``; counts both."""
    if _torch.is_dynamo_compiling():  # which neither counts nor catches
        return ours() if reason is None else theirs()
    if reason is None:
        try:
            out = ours()
        except UnsupportedError as error:
            reason = error.reason
        except FlashCoreError as error:  # PyTorch may accept the call, or raises its own error
            reason = _argument(error)
        else:
            _count()
            return out
    with _lock:
        _fallbacks[reason] += 1
    return theirs()


# "invalid value '3' for the shape of attn_mask: expected …", "k has batch = 2, but …"
_NAMED = re.compile(
    r"^invalid value .* for (?:the [a-z ]+ of )?(\w+)[^:]*: expected|^(\w+) (?:is|has|ends) ", re.DOTALL
)


def _argument(error: FlashCoreError) -> str:
    """The argument that an error names; the error's class if it names none."""
    found = _NAMED.match(str(error))
    return (found[1] or found[2]) if found else type(error).__name__


class _Flex(Replacement):
    def __call__(
        self, query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
        scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
        **others: Any,
    ) -> Any:  # fmt: skip
        import torch

        def theirs() -> Any:
            return self.original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
            )  # fmt: skip

        def ours() -> Any:
            return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, **others)

        if not self.active or torch.compiler.is_dynamo_compiling():
            return theirs()
        tensors = (query, key, value)
        override = _override([x for x in tensors if type(x) not in _overrides.PLAIN])
        if override is not None:
            with self.lent():
                return _counted(ours, theirs, override)
        return _counted(ours, theirs, _unsupported_reason(torch, tensors, 0.0))


def _refused(query: Any, key: Any, value: Any, mask: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> str | None:
    """The argument for which a call would raise an error while it is compiled, where PyTorch may accept it."""
    if mask is not None and is_causal:
        return "is_causal"
    if isinstance(scale, (int, float)) and not -_LARGEST_SCALE < scale < _LARGEST_SCALE:
        return "scale"
    if query.ndim < 2 or query.shape[-1] == 0 or value.shape[-1] == 0:
        return "head_dim"
    agree = leads_agree(query, key, value, enable_gqa)
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


def _override(others: list[Any]) -> str | None:
    """A class of one of the tensors that are not plain, or an active mode, that may give PyTorch's function another
    meaning."""
    compiling = _torch.is_dynamo_compiling()
    for x in others:
        if not _overrides.is_computed(type(x), compiling):
            return f"type {type(x).__name__}"
    mode = _overrides.watching_mode(compiling)
    return None if mode is None else f"mode {mode}"


def _unsupported_reason(torch: Any, tensors: tuple[Any, ...], dropout_p: float) -> str | None:
    """The reason for a call that is known to fail. A compiled call cannot fall back after it has failed."""
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        return "dropout_p"
    if _torch.is_dynamo_compiling() and _torch.is_differentiated():  # graphs differentiate operators of PyTorch's only
        return "requires_grad"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward_ad"
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        return "tracing"
    if any(mask.ndim < 2 for mask in tensors[3:]):  # some of PyTorch's implementations refuse such masks
        return "attn_mask"
    if _torch.flash_is_left_out():
        return "sdpa_kernel"
    return _torch.lacks(*tensors)


def _is_own(function: Any) -> bool:
    import torch

    return function is torch._C._nn.scaled_dot_product_attention


def _is_own_flex(function: Any) -> bool:
    import torch.nn.attention.flex_attention as flex

    return getattr(function, "__globals__", None) is vars(flex)


_attention = _Attention("torch.nn.functional", "scaled_dot_product_attention", _is_own)
_flex = _Flex("torch.nn.attention.flex_attention", "flex_attention", _is_own_flex)
_functions = (_attention, _flex)
