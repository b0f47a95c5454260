"""FlashCore behind the interfaces of other libraries: flash-attn's private functions, PyTorch, vLLM, SGLang, diffusers.

Each module is imported by its user, or by the library's own plug-in mechanism; none is imported with the package.
"""

from .. import _torch

__all__ = ["_torch"]  # imported before its parts, which read it
