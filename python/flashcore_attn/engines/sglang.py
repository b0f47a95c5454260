"""The plug-in of SGLang: ``python -m sglang.launch_server --attention-backend flashcore``.

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins``; ``SGLANG_PLUGINS`` selects plug-ins.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NAME", "register"]

#: The value of ``--attention-backend``.
NAME = "flashcore"


def register() -> None:
    """Registers the backend and its name. Calls after the first change nothing."""
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    if NAME in registry.ATTENTION_BACKENDS:
        return
    registry.register_attention_backend(NAME)(_made)
    choices = _choices()
    choices.add_attention_backend_choices([NAME])


def _made(runner: Any) -> Any:
    return importlib.import_module("flashcore_attn.engines._sglang_backend").Backend(runner)


def _choices() -> Any:
    """The module with the names that the command line accepts; a release before 0.5.23 has it elsewhere."""
    for name in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(found, "add_attention_backend_choices"):
            return found
    from . import _serving

    raise _serving.unsupported("where this SGLang lists its backends", "add_attention_backend_choices")
