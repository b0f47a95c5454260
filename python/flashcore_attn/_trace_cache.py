"""Programs of functions: a function is traced again only if its code or a captured value has changed."""

from __future__ import annotations

import functools
import numbers
import types
import weakref
from typing import Any

from . import _trace_functions  # noqa: F401  (fills the functions that tracers know)
from ._trace import Table, Trace, View, is_array

__all__ = ["trace"]


class _Traced:
    """A program of a function, with the arrays that it reads."""

    def __init__(self, text: str, arrays: list[Any]) -> None:
        self.text = text
        self.arrays = [_Reference(array) for array in arrays]

    def resolved(self) -> list[Any] | None:
        """The arrays; None if one no longer exists."""
        arrays = [reference() for reference in self.arrays]
        return None if any(array is None for array in arrays) else arrays


class _Reference:
    """A weak reference to an array, or to the array of a view."""

    def __init__(self, array: Any) -> None:
        self.is_view = isinstance(array, View)
        self.of = weakref.ref(array.array if self.is_view else array)

    def __call__(self) -> Any:
        array = self.of()
        return View(array) if self.is_view and array is not None else array


#: Programs by the contents of their functions. The oldest one is dropped.
_known: dict[Any, _Traced] = {}
_MOST = 256


def trace(function: Any, arguments: str, kind: str, backend: Any) -> tuple[str, list[Any]]:
    """The program of a function of the arguments that are named, and the arrays that it reads.

    A function is traced again when its code, or a value that it has captured, has changed.
    """
    captured: set[int] = set()
    made_of = _contents(function, captured)
    key = None if made_of is None else (made_of, arguments, backend.name)
    if key is not None:
        known = _known.get(key)
        arrays = None if known is None else known.resolved()
        if known is not None and arrays is not None:
            return known.text, arrays
    recorder = Trace(backend)
    with backend.recording(recorder):
        result = function(*(recorder.position(name) for name in arguments))
        text = recorder.finish(result, kind)
    owned = [array.array if isinstance(array, View) else array for array in recorder.arrays]
    if key is not None and not recorder.once and all(id(array) in captured for array in owned):
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)), None)
        _known[key] = _Traced(text, recorder.arrays)
    return text, recorder.arrays


def _contents(value: Any, captured: set[int], depth: int = 0) -> Any:
    """The contents of a value as a key; None if they cannot be determined. Notes the ids of arrays."""
    if value is None or isinstance(value, (bool, numbers.Real, str, bytes)):
        return type(value), repr(value)
    if depth > 8:
        return None
    if isinstance(value, types.ModuleType):
        stable = value.__name__.partition(".")[0] in ("torch", "numpy", "math", "operator")
        return ("module", value.__name__) if stable else None
    if isinstance(value, types.FunctionType):
        return _contents_of_function(value, captured, depth)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
        return _contents(parts, captured, depth + 1)
    if isinstance(value, (tuple, list)):
        parts = tuple(_contents(part, captured, depth + 1) for part in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, Table):
        return _contents(value.array, captured, depth)
    if is_array(value):
        captured.add(id(value))
        return "array", id(value), tuple(value.shape), str(value.dtype), str(getattr(value, "device", ""))
    if isinstance(value, (types.BuiltinFunctionType, type)) or type(value).__name__ in ("dtype", "device"):
        return "named", repr(value)
    return None


def _contents_of_function(function: Any, captured: set[int], depth: int) -> Any:
    code = function.__code__
    cells = tuple(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    names = _names(code)
    read = tuple((name, function.__globals__[name]) for name in names if name in function.__globals__)
    parts = (cells, function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items())), read)
    contents = _contents(parts, captured, depth + 1)
    return None if contents is None else (code, contents)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names(code: Any) -> tuple[str, ...]:
    """The names that a function's code, and that of the functions inside it, may look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *(name for each in inner for name in _names(each)))
