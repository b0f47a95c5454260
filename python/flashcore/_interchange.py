"""Arrays of other libraries, viewed as NumPy arrays or PyTorch tensors over the same memory."""

from __future__ import annotations

from typing import Any

from ._errors import ArgumentError, UnsupportedError

_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def call(function: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """``function(q, k, v, **options)`` on views; what it returns is of q's library again."""
    kinds = [_kind(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
    if len(set(kinds)) > 1:
        raise ArgumentError(f"q, k and v are on {', '.join(kinds)}; they must be on one device")
    view, back = _on_cuda(q) if kinds[0] == "cuda" else _on_cpu(q)
    result = function(view(q), view(k), view(v), **options)
    if not isinstance(result, tuple):
        return back(result)
    return tuple(None if part is None else back(part) for part in result)


def _kind(name: str, tensor: Any) -> str:
    if hasattr(tensor, "__dlpack_device__"):
        device = int(tensor.__dlpack_device__()[0])
        if device in _CPU:
            return "cpu"
        if device in _CUDA:
            return "cuda"
        raise UnsupportedError(f"{name} is on DLPack device type {device}; accepted: CPU and CUDA", "device")
    if hasattr(tensor, "__array_interface__"):
        return "cpu"
    raise ArgumentError(
        f"{name} is a {type(tensor).__name__}; accepted: PyTorch tensors, NumPy arrays, and arrays with __dlpack__"
    )


def _on_cpu(like: Any) -> tuple[Any, Any]:
    from . import _numpy

    def back(array: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return array if namespace is None else namespace().asarray(array)

    return _numpy.view, back


def _on_cuda(like: Any) -> tuple[Any, Any]:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("CUDA arrays of other libraries are viewed by PyTorch; install it", "device") from error

    def back(tensor: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        if namespace is not None and hasattr(namespace(), "from_dlpack"):
            return namespace().from_dlpack(tensor)
        return type(like).from_dlpack(tensor) if hasattr(type(like), "from_dlpack") else tensor

    return torch.from_dlpack, back
