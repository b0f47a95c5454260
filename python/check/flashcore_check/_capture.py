"""Launches on a GPU that ``flashcore capture`` records, chosen by the program itself."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def capture(kernel: str, at: int | Sequence[int] = 1, *, after: bool = False) -> Iterator[None]:
    """Records launches inside the ``with`` block, in a program that ``flashcore capture`` has started.

    Args:
        kernel: a part of the kernels' names.
        at: the numbers of the launches of each kernel, counted from the start of the block.
        after: also record the memory after the launch, with which ``flashcore check`` compares its results.

    Raises:
        RuntimeError: the program was not started by ``flashcore capture``.
    """
    numbers = [at] if isinstance(at, int) else list(at)
    if not kernel or not numbers or min(numbers) < 1:
        raise ValueError(f"invalid values {kernel!r} and {at!r} for kernel and at: expected a name and numbers from 1")
    library = ctypes.CDLL(None)
    text = ",".join(map(str, numbers))
    begin = getattr(library, "flashcore_capture_begin", None)
    if begin is None or begin(kernel.encode(), text.encode(), int(after)) != 0:
        raise RuntimeError("launches are recorded in a program that `flashcore capture -- python …` has started")
    try:
        yield
    finally:
        library.flashcore_capture_end()
