"""Merging results of attention over different keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import ArgumentError, UnsupportedError, dimensions, invalid, invalid_words
from ._functional import backend_of

__all__ = ["merge_states"]


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Merges results of the same queries over different keys into the result over all of these keys.

    Args:
        outs: the results, each ``(batch, seqlen, heads, head_dim)`` or ``(rows, heads, head_dim)``: one or more PyTorch
            tensors or NumPy arrays, of float16, bfloat16 or float32.
        lses: their log-sum-exps (natural logarithm), float32, each ``(batch, heads, seqlen)`` or ``(heads, rows)``.
            Minus infinity says that a row saw no key; the row's result is not read then.

    Returns:
        ``(out, lse)`` in the shapes of the parts. A sink may be in at most one of the parts.

    Raises:
        ArgumentError: no part, or shapes that differ.
        DTypeError: element types that differ or are not supported.
        UnsupportedError: other kinds of arrays.
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"there are {len(outs)} outs and {len(lses)} lses; expected as many, and at least one")
    backend = backend_of(outs[0])
    if backend is None:
        raise UnsupportedError(
            invalid_words("the type of outs[0]", type(outs[0]).__name__, "a PyTorch tensor or a NumPy array"), "kind"
        )
    for i, (out, lse) in enumerate(zip(outs, lses)):
        backend.check_kinds(outs[0], out, lse)
        if out.ndim not in (3, 4):
            raise ArgumentError(f"outs[{i}] has {dimensions(out.ndim)}; it takes 3 or 4")
        if tuple(out.shape) != tuple(outs[0].shape):
            raise invalid(f"the shape of outs[{i}]", tuple(out.shape), f"{tuple(outs[0].shape)}, that of outs[0]")
        *batch, rows, heads, _ = out.shape
        if tuple(lse.shape) != (*batch, heads, rows):
            raise invalid(f"the shape of lses[{i}]", tuple(lse.shape), f"{(*batch, heads, rows)}")
    merged: tuple[Any, Any] = backend.merge_states(outs, lses)
    return merged


def _listed(name: str, parts: Any) -> list[Any]:
    try:
        return list(parts)
    except TypeError:
        raise invalid(f"the type of {name}", type(parts).__name__, "a sequence of the parts") from None
