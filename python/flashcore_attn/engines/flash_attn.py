"""Puts FlashCore into the place of the packages ``flash_attn`` and ``flash_attn_interface``.

>>> import flashcore_attn.engines.flash_attn
>>> flashcore_attn.engines.flash_attn.install()
>>> import ring_flash_attn  # imports flash_attn.flash_attn_interface, which is FlashCore's now
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from .. import _padding
from .._errors import UnsupportedError
from . import flash_attn_2, flash_attn_3

__all__ = ["VERSION", "install"]

#: The release of flash-attn whose interface the functions have.
VERSION = "2.8.4"


def install() -> None:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` find FlashCore's functions, in this process.

    Call it before anything imports flash-attn. A second call changes nothing.

    Raises:
        UnsupportedError: one of the packages has been imported: its functions are in use.
    """
    modules = _modules()
    for name in modules:
        found = sys.modules.get(name)
        if found is not None and not hasattr(found, "__flashcore__"):
            words = f"{name} is imported already, and its functions are in use; call install() before"
            raise UnsupportedError(words, "flash_attn is imported")
    for name, module in modules.items():
        sys.modules.setdefault(name, module)


def _modules() -> dict[str, types.ModuleType]:
    public = {name: getattr(flash_attn_2, name) for name in flash_attn_2.__all__}
    return {
        "flash_attn": _module("flash_attn", public, path=[], __version__=VERSION),
        "flash_attn.flash_attn_interface": _module("flash_attn.flash_attn_interface", vars(flash_attn_2)),
        "flash_attn.bert_padding": _module(
            "flash_attn.bert_padding", {name: getattr(_padding, name) for name in _padding.__all__}
        ),
        "flash_attn_interface": _module("flash_attn_interface", vars(flash_attn_3)),
    }


def _module(name: str, functions: dict[str, Any], path: list[str] | None = None, **others: Any) -> types.ModuleType:
    module = types.ModuleType(name, "FlashCore in the place of flash-attn.")
    module.__spec__ = ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = path
    for key, value in {**functions, **others, "__flashcore__": True}.items():
        if callable(value) or key in others or key == "__flashcore__":
            setattr(module, key, value)
    return module
