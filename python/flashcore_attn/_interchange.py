"""Arrays of other libraries, viewed as NumPy arrays or PyTorch tensors over the same memory."""

from __future__ import annotations

from typing import Any

from ._errors import ArgumentError, UnsupportedError, invalid, invalid_words

_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def call(function: Any, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """``function(*tensors, **options)`` on views; the results are converted back to the first one's library."""
    kinds = [_kind(name, tensor) for name, tensor in tensors.items()]
    if len(set(kinds)) > 1:
        raise ArgumentError(f"{', '.join(tensors)} are on {', '.join(kinds)}; they must be on one device")
    first = next(iter(tensors.values()))
    view, back = _on_cuda(first) if kinds[0] == "cuda" else _on_cpu(first)
    result = function(*(_viewed(view, name, tensor) for name, tensor in tensors.items()), **options)
    if not isinstance(result, tuple):
        return back(result)
    return tuple(None if part is None else back(part) for part in result)


def _viewed(view: Any, name: str, tensor: Any) -> Any:
    """A view of an array. Its library may refuse one (of a tensor that requires grad), and NumPy has no bfloat16."""
    try:
        return view(tensor)
    except Exception as error:  # whatever the other library raises
        words = f"{name} cannot be viewed as an array ({' '.join(str(error).split())})"
        raise UnsupportedError(f"{words}; pass a tensor of PyTorch, as torch.from_dlpack makes", "dlpack") from error


def _kind(name: str, tensor: Any) -> str:
    wanted = "a PyTorch tensor, a NumPy array, or an array with __dlpack__"
    if hasattr(tensor, "__dlpack_device__"):
        try:
            device = _viewed(lambda x: int(x.__dlpack_device__()[0]), name, tensor)
        except UnsupportedError as error:
            if isinstance(error.__cause__, TypeError):  # of what stands for a tensor in a trace of `torch.fx`
                raise invalid(f"the type of {name}", type(tensor).__name__, wanted) from error
            raise
        if device in _CPU:
            return "cpu"
        if device in _CUDA:
            return "cuda"
        expected = "1 or 3 (CPU), or 2 or 13 (CUDA)"
        raise UnsupportedError(invalid_words(f"the DLPack device type of {name}", device, expected), "device")
    if hasattr(tensor, "__array_interface__"):
        return "cpu"
    raise invalid(f"the type of {name}", type(tensor).__name__, wanted)


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
        raise UnsupportedError("CUDA arrays of other libraries need PyTorch; install PyTorch", "device") from error

    def back(tensor: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        if namespace is not None and hasattr(namespace(), "from_dlpack"):
            return namespace().from_dlpack(tensor)
        return type(like).from_dlpack(tensor) if hasattr(type(like), "from_dlpack") else tensor

    return torch.from_dlpack, back
