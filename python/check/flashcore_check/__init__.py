"""Runs the GPU kernels of a test in FlashCore's emulator, on the test's own tensors and without a GPU.

``pytest --flashcore`` runs a whole suite so; the decorator :func:`kernel` or the fixture ``check_launches``
one test. A launch with a data race or another hazard fails the test with the line of the kernel's source.
"""

from __future__ import annotations

from typing import Any

from ._capture import capture
from ._emulator import CommandError
from ._launch import launch
from ._session import HazardError, IncompleteError, Launch, current

__all__ = ["CommandError", "HazardError", "IncompleteError", "Launch", "capture", "device", "kernel", "launch"]
__version__ = "0.1.0"


def kernel(function: Any = None, **settings: Any) -> Any:
    """Marks a test whose launches run in the emulator, with ``--flashcore`` and without.

    Settings: ``checks`` (``once``, ``thorough`` or ``none``), ``seconds`` of a launch, and ``allow``, a list
    of kinds of hazards that do not fail the test.
    """
    import pytest

    mark = pytest.mark.flashcore(**settings)
    return mark if function is None else mark(function)


def __getattr__(name: str) -> Any:
    """``device``: the device for tensors of a test: ``cuda`` in the emulator and with a GPU, else ``cpu``."""
    if name != "device":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current() is not None:
        return "cuda"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
