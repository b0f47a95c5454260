"""Functions that ``torch.compile`` does not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["outside_graphs"]

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Has ``torch.compile`` run a function as it is, between two graphs, and all that it calls.

    ``torch.compiler.disable`` does this, and imports PyTorch and its compiler. Here that happens only in a process
    that has loaded the compiler.
    """
    untraced: list[Any] = []

    def has_compiler() -> bool:
        if not untraced and "torch._dynamo" in sys.modules:
            untraced.append(sys.modules["torch"].compiler.disable(function))
        return bool(untraced)

    # As `torch.compiler.assume_constant_result` marks it: the compiler calls it while it traces.
    has_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return untraced[0](*arguments, **named) if has_compiler() else function(*arguments, **named)

    return call  # type: ignore[return-value]
