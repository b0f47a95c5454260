"""The plug-in of vLLM: ``vllm serve MODEL --attention-backend CUSTOM``.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Groups
of layers can have different backends: ``attention_config.backend_per_kind={"full_attention": "CUSTOM"}``.
"""

from __future__ import annotations

import logging

__all__ = ["BACKEND", "register"]

#: The class that vLLM imports.
BACKEND = "flashcore_attn.engines._vllm_backend.Backend"


def register() -> None:
    """Registers the backend as ``CUSTOM``. Calls after the first change nothing.

    Another plug-in's backend stays: a message says so.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        words = "the attention backend CUSTOM is %s already; FlashCore is not registered"
        logging.getLogger("flashcore_attn").warning(words, custom.get_path())
        return
    register_backend(custom, BACKEND)
