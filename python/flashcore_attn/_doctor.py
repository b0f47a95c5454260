"""Prints which parts of this machine FlashCore can use, and for what."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from typing import Any

from . import _flashcore
from ._errors import FlashCoreError

__all__ = ["doctor"]


def doctor(file: Any = None) -> dict[str, str]:
    """Prints what this machine can do, one line per subject, and returns the lines by subject.

    Args:
        file: where to print, ``sys.stdout`` if None.
    """
    sets, threads = _flashcore.describe_cpu()
    lines = {
        "flashcore": f"{_flashcore.__version__}, Python {platform.python_version()} on {platform.platform()}",
        "cpu": f"{', '.join(sets)}; {threads} threads: attention of NumPy arrays and CPU tensors",
        "gpu": _gpus(),
        "numpy": _version("numpy", "arrays are taken and returned"),
        "torch": _torch(),
        "cache": _caches(),
    }
    for subject, line in lines.items():
        print(f"{subject:<10} {line}", file=file or sys.stdout)
    return lines


def _gpus() -> str:
    try:
        return "; ".join(_flashcore.describe_gpus()) or "none"
    except FlashCoreError as error:
        return f"none ({error})"


def _caches() -> str:
    ours = _flashcore.cache_folder() or "nowhere"
    nvidia = os.environ.get("CUDA_CACHE_PATH") or "~/.nv/ComputeCache"
    return f"{ours} (FLASHCORE_CACHE_DIR); of wgmma kernels the driver's own, {nvidia} (CUDA_CACHE_PATH)"


def _torch() -> str:
    line = _version("torch", "tensors are taken and returned; flashcore_attn.compat reaches models")
    try:
        importlib.import_module("flashcore_attn._torch")
    except FlashCoreError as error:
        return str(error)
    except ImportError:
        pass  # there is none, and the line says so
    return line


def _version(name: str, enables: str) -> str:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"none ({error})"
    return f"{module.__version__}: {enables}"
