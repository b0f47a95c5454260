"""Programs of functions: a function is traced again only if its code or a captured value has changed."""

from __future__ import annotations

import functools
import numbers
import sys
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
    if not backend.remembers:
        text, recorder = _recorded(function, arguments, kind, backend)
        return text, recorder.arrays
    captured = _Captured(backend.name == "torch")
    made_of = _contents(function, captured)
    key = None if made_of is None else (made_of, arguments, backend.name)
    if key is not None:
        known = _known.get(key)
        arrays = None if known is None else known.resolved()
        if known is not None and arrays is not None:
            return known.text, arrays
    read = Table.constants
    text, recorder = _recorded(function, arguments, kind, backend)
    owned = [array.array if isinstance(array, View) else array for array in recorder.arrays]
    lasting = not recorder.once and Table.constants == read
    if key is not None and lasting and all(id(array) in captured.arrays for array in owned):
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)), None)
        _known[key] = _Traced(text, recorder.arrays)
    return text, recorder.arrays


def _recorded(function: Any, arguments: str, kind: str, backend: Any) -> tuple[str, Trace]:
    """The program of a function, traced now."""
    recorder = Trace(backend)
    with backend.recording(recorder):
        result = function(*[backend.given(recorder, recorder.position(name)) for name in arguments])
        text = recorder.finish(result, kind)
    return text, recorder


class _Captured:
    """The arrays that a function has captured."""

    def __init__(self, watches_tensors: bool) -> None:
        #: Whether the recorder notices that the function reads a number from a PyTorch tensor.
        self.watches_tensors = watches_tensors
        self.arrays: set[int] = set()

    def key(self, array: Any) -> Any:
        self.arrays.add(id(array))
        return "array", id(array), tuple(array.shape), str(array.dtype), str(getattr(array, "device", ""))


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_STABLE = ("torch", "numpy", "math", "operator")


def _contents(value: Any, captured: _Captured, depth: int = 0) -> Any:
    """The contents of a value as a key; None if they cannot be determined. Notes arrays."""
    # A subclass, and a class of the caller, may hold more than their text shows.
    kind, origin = type(value), type(value).__module__.partition(".")[0]
    if kind in _PLAIN or (origin == "numpy" and isinstance(value, numbers.Real)):
        return kind, repr(value)
    if depth > 8:
        return None
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__) if value.__name__.partition(".")[0] in _STABLE else None
    if kind is types.FunctionType:
        return _contents_of_function(value, captured, depth)
    if kind is functools.partial:
        parts = (value.func, value.args, _sorted(value.keywords), _sorted(vars(value)))
        return _contents(parts, captured, depth + 1)
    if kind in (tuple, list):
        parts = tuple(_contents(part, captured, depth + 1) for part in value)
        return None if None in parts else (kind, parts)
    if kind is Table:
        return captured.key(value.array) if is_array(value.array) else None
    if is_array(value):
        # The function may read numbers from another array unnoticed.
        return captured.key(value) if captured.watches_tensors and hasattr(value, "__torch_function__") else None
    if kind is types.BuiltinFunctionType and isinstance(value.__self__, (types.ModuleType, type(None))):
        return "named", repr(value)
    return ("named", repr(value)) if origin in _STABLE and kind.__name__ in ("dtype", "device") else None


def _sorted(named: Any) -> tuple[Any, ...]:
    return tuple(sorted(named.items(), key=lambda item: item[0]))


def _contents_of_function(function: Any, captured: _Captured, depth: int) -> Any:
    code = function.__code__
    cells = tuple(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    # A name that is no global may be that of a module, which the function imports.
    found = ((name, function.__globals__.get(name, sys.modules.get(name))) for name in _names(code))
    read = tuple((name, value) for name, value in found if value is not None)
    parts = (cells, function.__defaults__, _sorted(function.__kwdefaults__ or {}), _sorted(vars(function)), read)
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
