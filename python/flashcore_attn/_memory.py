"""Where the elements of PyTorch tensors lie. Every address that leaves the package comes from here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._errors import ArgumentError, UnsupportedError

_DISPATCH = Tensor.__torch_dispatch__
_tracing = getattr(torch._C, "_get_tracing_state", lambda: None)
_functorch = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def address(name: str, x: Tensor, held: list[Any]) -> int:
    """The address of a tensor's first element. Rejects elements that do not lie in memory: the storage was released or
    cut, or never had memory, as that of the zeros of forward-mode derivatives.

    ``held`` keeps the memory: another thread may give the tensor a new storage during the call.
    """
    storage = x.untyped_storage()
    held.append(storage)
    first, end = _span(x)
    if end > storage.nbytes():
        raise _outside(name, end, storage.nbytes())
    try:
        start = storage.data_ptr()
    except RuntimeError:  # PyTorch's own refusal of a storage without memory
        start = 0
    if start == 0 and end:
        words = f"{name} has elements but no memory"
        raise ArgumentError(f"{words}; expected a tensor with memory, as torch.zeros_like makes")
    return start + first


def check(name: str, x: Tensor) -> None:
    """Rejects elements outside the tensor's storage, which PyTorch would read to copy or convert the tensor.

    Tensors of transforms other than ``torch.vmap``, and of classes that dispatch by themselves, are left to PyTorch:
    what it makes of them has an :func:`address` of its own.
    """
    if torch.compiler.is_compiling() or _tracing() is not None:
        return
    if _functorch() is not None:
        while torch._C._functorch.is_batchedtensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
    if type(x).__torch_dispatch__ is not _DISPATCH or x.is_nested or x.layout is not torch.strided:
        return
    with torch._C.DisableTorchFunctionSubclass():
        try:
            end, size = _span(x)[1], x.untyped_storage().nbytes()
        except NotImplementedError:
            words = f"{name} is a tensor without memory, as is_grads_batched and vectorize of torch.autograd make them"
            raise UnsupportedError(f"{words}; use torch.vmap or torch.func.jacrev", "batched gradients") from None
    if end > size:
        raise _outside(name, end, size)


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes of a storage before a tensor's first element and up to the end of its last one; (0, 0) if it has
    none."""
    elements, size = x.numel(), x.element_size()
    if elements == 0:
        return 0, 0
    if not x.is_contiguous():
        elements = 1
        for extent, stride in zip(x.shape, x.stride()):
            elements += (extent - 1) * stride
    first = x.storage_offset() * size
    return first, first + elements * size


def _outside(name: str, end: int, size: int) -> ArgumentError:
    words = f"{name} ends at byte {end} of its storage, which has {size} bytes"
    return ArgumentError(f"{words}; expected a tensor inside its storage")
