"""How ``torch.compile`` runs functions that record or measure: between two graphs, or as part of one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["inside_graphs", "leave_graph", "outside_graphs"]

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


def inside_graphs(function: Function) -> Function:
    """Lets ``torch.compile`` trace a function with its callers. What it cannot trace, it runs as it is, between two
    graphs: it must not trace the parts of the function one by one. PyTorch before 2.11 runs the function between
    graphs.
    """
    alone = outside_graphs(function)
    skipped: list[Any] = []

    def has_compiler() -> bool:
        if not skipped and _has_compiler():
            # The compiler then traces calls of `choose` only as part of a caller.
            skipped.append(_can_trace() and sys.modules["torch._dynamo"].eval_frame.skip_code(choose.__code__))
        return bool(skipped)

    has_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def choose(*arguments: Any, **named: Any) -> Any:
        if has_compiler() and not _is_in_graph():
            return alone(*arguments, **named)
        return function(*arguments, **named)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return choose(*arguments, **named)

    return call  # type: ignore[return-value]


def leave_graph(reason: str) -> None:
    """Where a graph is traced, ends it before the call of the function of :func:`inside_graphs`. With
    ``fullgraph=True``, that is an error with the reason.
    """
    if _has_compiler() and _is_in_graph():
        from torch._dynamo import graph_break

        graph_break(msg=reason)


def _is_in_graph() -> bool:
    from torch.compiler import is_dynamo_compiling

    return bool(is_dynamo_compiling() and _can_trace())


def _can_trace() -> bool:
    """Whether PyTorch is one whose compiler traces the functions of :func:`inside_graphs`."""
    return bool(sys.modules["torch"].__version__ >= (2, 11))


def _has_compiler() -> bool:
    return "torch._dynamo" in sys.modules


_can_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
