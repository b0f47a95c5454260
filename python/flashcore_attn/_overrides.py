"""Classes and modes that give PyTorch's functions a meaning of their own, and those that are known to give them none.

Known are exact classes: a subclass of one of them may do more.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

__all__ = ["PLAIN", "is_computed", "is_watched", "meaning_of_its_own", "watching_mode"]

#: Classes of tensors that are their memory and nothing more.
PLAIN = frozenset({Tensor, torch.nn.Parameter})

# Classes by their modules, which are not imported for a comparison.
#: Tensors of a trace. An operator is recorded from them as PyTorch's own functions are.
_TRACED = frozenset({
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
})  # fmt: skip
#: Modes of functions that look at other functions than attention.
_FUNCTION_MODES = frozenset({
    ("torch.utils._device", "DeviceContext"),
    ("torch._export.non_strict_utils", "_NonStrictTorchFunctionHandler"),
    ("torch.export._safeguard", "AutogradStateOpsFailSafeguard"),
    ("torch.fx.experimental.proxy_tensor", "PreDispatchTorchFunctionMode"),
    ("torch.fx.experimental.proxy_tensor", "TorchFunctionMetadataMode"),
})  # fmt: skip
#: Modes of operators that take an operator of any library.
_OPERATOR_MODES = frozenset({
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch._subclasses.functional_tensor", "FunctionalTensorMode"),
    ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode"),
    ("torch.utils.flop_counter", "FlopCounterMode"),
    ("torch.utils.flop_counter", "_FlopCounterMode"),
})  # fmt: skip

_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
_function_mode = getattr(torch._C, "_get_function_stack_at", lambda number: None)
_operator_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_without_override = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def _is_one_of(kind: type, known: frozenset[tuple[str, str]]) -> bool:
    """Whether a class is one of those, and not another one of the same name."""
    named = (kind.__module__, kind.__name__)
    return named in known and getattr(sys.modules.get(named[0]), named[1], None) is kind


def is_computed(kind: type, compiling: bool = False) -> bool:
    """Whether a tensor of a class stands for its elements, in memory or in a trace. ``torch.compile`` shows plain ones
    in place of those of its own trace."""
    return kind in PLAIN or (not compiling and _is_one_of(kind, _TRACED))


def meaning_of_its_own(x: Tensor) -> bool:
    """Whether the class of a tensor overrides PyTorch's functions, so that its memory may mean something else."""
    override = type(x).__torch_function__
    return getattr(override, "__func__", override) not in _without_override


def is_watched() -> bool:
    """Whether a mode sees functions of PyTorch, other than one that sets the default device."""
    modes = _function_modes()
    return bool(modes) and (modes > 1 or type(_function_mode(0)) is not _device.DeviceContext)


def watching_mode(compiling: bool) -> str | None:
    """The class of an active mode that may give PyTorch's attention another meaning, by name. None without one."""
    for number in range(_function_modes()):
        kind = type(_function_mode(number))
        if kind is not _device.DeviceContext and (compiling or not _is_one_of(kind, _FUNCTION_MODES)):
            return kind.__name__
    # The compiler does not trace a mode of operators.
    return None if compiling or not _operator_modes() else _watching_operators()


def _watching_operators() -> str | None:
    stack: Any = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)
    kinds = (type(mode) for mode in stack())
    return next((kind.__name__ for kind in kinds if not _is_one_of(kind, _OPERATOR_MODES)), None)
