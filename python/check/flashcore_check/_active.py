"""Makes a session the device of PyTorch and of the kernel languages in this process, and undoes it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ._session import Session, set_current

#: By library, the module that makes the emulator its device.
_PATCHES = {
    "torch": "_torch",
    "triton": "_triton",
    "numba_cuda": "_numba",
    "cupy": "_cupy",
    "cuda.bindings": "_libcuda",
    "nvidia_cutlass_dsl": "_cute",
}


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        # The package above it.
        return False


class Active:
    """A session whose device is seen by the libraries of this process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.notes: list[str] = []
        self._patches: list[Any] = []
        set_current(session)
        try:
            for library, module in _PATCHES.items():
                self._patch(library, module)
        except BaseException:
            self.end()
            raise

    def _patch(self, library: str, module: str) -> None:
        if library not in sys.modules and not _is_installed(library):
            return
        patch = importlib.import_module(f"{__package__}.{module}").Patch()
        self._patches.append(patch)
        note = getattr(patch, "note", None)
        if note is not None:
            self.notes.append(note)

    def end(self) -> None:
        """Undoes all changes. The emulator goes on for the next session."""
        while self._patches:
            self._patches.pop().undo()
        set_current(None)
