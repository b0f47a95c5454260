"""Score and mask functions of Python as programs: a function is called once with tracers, which record what it does.

A tracer stands for a value of each score: the score, a position, or what was computed from them. Python's operators on
it, PyTorch's functions and NumPy's ufuncs each append an operation to the program's text, whose language is that of
``problem::Program``.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from ._errors import ArgumentError, UnsupportedError, dimensions, invalid
from ._graphs import leave_graph

__all__ = ["FUNCTIONS", "Trace", "Tracer", "look_up", "refused"]

FLOAT, INT, BOOL = "float", "int", "bool"

_SMALLEST, _LARGEST = -(2**31), 2**31 - 1
_HERE = os.path.dirname(__file__)

#: The most elements of a row that a function may use as a whole.
LONGEST_ROW = 16


#: Bits of integers that are narrower than those of a program, and whether they have a sign.
WIDTHS = {"uint8": (8, False), "int8": (8, True), "int16": (16, True)}


def narrow_type(dtype: Any) -> str | None:
    """The key of a dtype of PyTorch or NumPy in :data:`WIDTHS`."""
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).rpartition(".")[2]
    return name if name in WIDTHS else None


class Tracer:
    """A value of each score, as a name in a program."""

    __slots__ = ("kind", "narrow", "not_negative", "text", "trace")
    __array_priority__ = 1000

    def __init__(
        self, trace: Trace, text: str, kind: str, not_negative: bool = False, narrow: str | None = None
    ) -> None:
        self.trace, self.text, self.kind, self.not_negative = trace, text, kind, not_negative
        #: The type of an integer of fewer than 32 bits, a key of :data:`WIDTHS`. Empty for a number of
        #: Python and a truth value, which take the type of the other operand.
        self.narrow = narrow

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_name(function), args, kwargs or {})

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise refused(f"numpy.{function.__name__}.{method} of a score or a position")
        return _call(function.__name__, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call(function.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        if name in FUNCTIONS and not name.startswith("_"):
            return functools.partial(_call_method, name, self)
        if name.startswith("__"):  # attributes that Python and libraries look for
            raise AttributeError(name)
        raise refused(f"the attribute {name}", _ACCEPTED)

    def __bool__(self) -> bool:
        raise refused(
            "a branch on a score or a position (if, and, or, not, min(), max(), in)",
            "use torch.where, &, |, ~, torch.minimum, torch.maximum",
        )

    def __index__(self) -> int:
        raise refused("a Python number of a score or a position", "keep it as it is")

    __int__ = __float__ = __len__ = __iter__ = __index__
    __hash__ = object.__hash__  # equality is an operation

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis or index == ():
            return self
        raise refused("an index of a score or a position")


def _operator(name: str, swapped: bool = False) -> Any:
    def apply(self: Tracer, other: Any) -> Any:
        if not isinstance(other, (Tracer, Row, numbers.Real)) and not is_array(other):
            return NotImplemented
        return _call(name, (other, self) if swapped else (self, other), {})

    return apply


class Trace:
    """A program that is being recorded."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.statements: list[str] = []
        self.known: dict[str, Tracer] = {}
        #: The program's tables: arrays of the caller, not converted.
        self.arrays: list[Any] = []
        #: Values that the function gets in place of tracers, with these.
        self.stand_ins: list[tuple[Any, Tracer]] = []
        #: Whether the program depends on more than what the function has captured.
        self.once = False

    def position(self, name: str) -> Tracer:
        return Tracer(self, name, FLOAT if name == "s" else INT, name != "s")

    def emit(self, text: str, kind: str, not_negative: bool = False, narrow: str | None = None) -> Tracer:
        known = self.known.get(text)
        if known is None:
            name = f"v{len(self.statements)}"
            self.statements.append(f"{name} = {text};")
            known = self.known[text] = Tracer(self, name, kind, not_negative, narrow)
        return known

    def array(self, array: Any) -> int:
        """The number of the table of an array."""
        for number, known in enumerate(self.arrays):
            if known is array or (isinstance(array, View) and isinstance(known, View) and known.array is array.array):
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1

    def load(self, array: Any, index: tuple[Any, ...]) -> Tracer:
        """An element of an array."""
        shape = tuple(array.shape)
        if not 1 <= len(shape) <= 4:
            raise refused(f"a look-up in an array of {dimensions(len(shape))}", "use 1 to 4")
        number, kind = self.array(array), self.backend.kind(array)
        texts = [self._index(i, extent) for i, extent in zip(index, shape)]
        loaded = f"{'t' if kind == FLOAT else 'n'}{number}[{', '.join(texts)}]"
        if kind == BOOL:
            return self.emit(f"{loaded} != 0", BOOL)
        narrow = narrow_type(array.dtype)
        return self.emit(loaded, kind, narrow == "uint8", narrow)

    def _index(self, index: Any, extent: int) -> str:
        if type(index) is int:
            return literal(index + extent if index < 0 else index)
        index = self.value(index)
        if index.kind != INT:
            raise refused(f"a look-up with a {index.kind} as index", "use integers")
        if index.not_negative:
            return index.text
        return self.emit(f"select({index.text} < 0, {index.text} + {literal(extent)}, {index.text})", INT).text

    def value(self, value: Any) -> Tracer:
        """A value as a tracer: a constant, or an array of one element, which the program reads at each call."""
        value = self.traced(value)
        if isinstance(value, Tracer):
            if value.trace is not self:
                raise refused("a value of another call of the function")
            return value
        if isinstance(value, Row):
            raise refused("a row of an array as a number", "index every dimension, or use sum")
        if isinstance(value, bool):
            return Tracer(self, "true" if value else "false", BOOL)
        if isinstance(value, numbers.Real):  # NumPy's among them
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            return Tracer(self, literal(number), INT if isinstance(number, int) else FLOAT, number >= 0, "")
        if is_array(value):
            if math.prod(value.shape) != 1:
                raise refused(f"an array of shape {tuple(value.shape)} as a number", "index it")
            return self.load(View(value), (0,)) if value.ndim != 1 else self.load(value, (0,))
        raise refused(f"a {type(value).__name__} as a number")

    def traced(self, value: Any) -> Any:
        """The tracer that a value stands for, or the value."""
        for stand_in, tracer in self.stand_ins:
            if stand_in is value:
                return tracer
        return value

    def as_kind(self, value: Tracer, kind: str) -> Tracer:
        """The value in another kind."""
        if value.kind == kind:
            return value
        if value.text in ("0", "1") or (kind == FLOAT and value.text.isdigit()):
            return self.value(float(value.text) if kind == FLOAT else value.text == "1")
        if kind == BOOL:
            return self.emit(f"{value.text} != 0", BOOL)
        is_truth = value.kind == BOOL
        return self.emit(f"{kind}({value.text})", kind, value.not_negative or is_truth, "" if is_truth else None)

    def finish(self, result: Any, kind: str) -> str:
        """The program's text."""
        if result is None:
            raise ArgumentError(f"the function returned None; expected a {'truth value' if kind == BOOL else 'score'}")
        value = self.as_kind(self.value(result), kind)
        return " ".join((*self.statements, value.text))


class View:
    """A single element of an array of any number of dimensions, as an array of one dimension."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = (1,)
        self.dtype = array.dtype


class Row:
    """Numbers of each score: a short row of an array, or what was computed from such rows, element by element."""

    __array_priority__ = 1000
    __array_ufunc__ = Tracer.__array_ufunc__
    __array_function__ = Tracer.__array_function__
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, elements: list[Any]) -> None:
        self.trace, self.elements = trace, elements

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_name(function), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim"):
            return (len(self.elements),) if name == "shape" else 1
        if name in FUNCTIONS or name in _REDUCTIONS:
            return functools.partial(_call_method, name, self)
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(f"the attribute {name} of a row of an array", "index every dimension")

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            raise refused("an index of a row of an array", "use integers")
        return self.elements[index]


class _Partial(Row):
    """An array with some of its dimensions indexed."""

    def __init__(self, trace: Trace, array: Any, index: tuple[Any, ...]) -> None:
        self.trace, self.array, self.index = trace, array, index

    def __getattr__(self, name: str) -> Any:
        if name != "elements":
            return super().__getattr__(name)
        rest = tuple(self.array.shape)[len(self.index) :]
        if len(rest) != 1 or rest[0] > LONGEST_ROW:
            raise refused(f"a row of shape {rest} of an array", f"use one of up to {LONGEST_ROW} elements")
        self.elements = [self[i] for i in range(rest[0])]
        return self.elements

    def __getitem__(self, index: Any) -> Any:
        return look_up(self.trace, self.array, (*self.index, *(index if isinstance(index, tuple) else (index,))))


for _class in (Tracer, Row):
    for _word, _own in {
        "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
        "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "lshift",
        "rshift": "rshift",
    }.items():  # fmt: skip
        setattr(_class, f"__{_word}__", _operator(_own))
        setattr(_class, f"__r{_word}__", _operator(_own, swapped=True))
    for _word in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_class, f"__{_word}__", _operator(_word))
    for _word, _own in {"neg": "neg", "pos": "clone", "abs": "abs", "invert": "bitwise_not"}.items():
        setattr(_class, f"__{_word}__", functools.partialmethod(lambda self, own: _call(own, (self,), {}), _own))


def look_up(trace: Trace, array: Any, index: tuple[Any, ...]) -> Any:
    """``array[index]``, where an index is a tracer."""
    index = tuple(_unwrapped(i) for i in index)
    if any(i is None or isinstance(i, (slice, type(Ellipsis))) for i in index):
        raise refused("a look-up with a slice beside a position", "index every dimension")
    if len(index) > array.ndim:
        raise refused(f"a look-up with {len(index)} indices in an array of {dimensions(array.ndim)}")
    return trace.load(array, index) if len(index) == array.ndim else _Partial(trace, array, index)


def _unwrapped(index: Any) -> Any:
    """An array of one integer stays a table; other objects that stand for an int become one."""
    if isinstance(index, (Tracer, slice, type(Ellipsis), type(None))) or is_array(index):
        return index
    return operator.index(index)


def table(array: Any) -> Any:
    """An array that a score or mask function may index with positions. PyTorch's tensors need no such wrapping;
    NumPy's arrays do, since they do not let an index take part.

    Args:
        array: a NumPy array of 1 to 4 dimensions.

    Returns:
        An object that is indexed with one position per dimension: ``slopes = table(array)``, then ``slopes[h]``.
    """
    if not is_array(array):
        raise invalid("the type of array", type(array).__name__, "a NumPy array or another array")
    return Table(array)


class Table:
    #: Reads without a position, in all threads. A program has their result as a constant.
    constants = 0

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        tracer = next((i for i in index if isinstance(i, Tracer)), None)
        if tracer is None:
            Table.constants += 1
            return self.array[index]
        return look_up(tracer.trace, self.array, index)


def is_array(value: Any) -> bool:
    """Whether a value is an array, and not a class of arrays."""
    # PyTorch's compiler cannot ask a symbolic number for an attribute.
    if isinstance(value, (Tracer, type, int, float)) or not hasattr(value, "dtype"):
        return False
    if getattr(value, "is_nested", False):  # whose shape cannot be asked for
        raise refused("a nested tensor", "use a padded one")
    return hasattr(value, "shape")


def _name(function: Any) -> str:
    """The name of a function of PyTorch, without the underscores of an operator."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # of a property, as `dtype`
        return f".{function.__self__.__name__}"
    if name == "where" and isinstance(function, types.MethodDescriptorType):
        return "_where"
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _tracers(values: Any) -> Iterator[Any]:
    """The tracers among values, and in the tuples and lists among them."""
    for value in values:
        if isinstance(value, (Tracer, Row)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tracers(value)


def recorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Whether an argument of a function is a tracer, and if so, the result."""
    if next(_tracers((*args, *kwargs.values())), None) is None:
        return False, None
    return True, _call(_name(function), args, kwargs)


def unviewed(array: Any) -> Any:
    """The array that a program reads."""
    return array.array.reshape((1,)) if isinstance(array, View) else array


def _call_method(name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
    return _call("_where" if name == "where" else name, (own, *args), kwargs)


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch or NumPy, one of whose arguments is a tracer."""
    trace = next(_tracers((*args, *kwargs.values()))).trace
    if any(isinstance(x, Row) for x in (*args, *kwargs.values())):
        return _call_of_rows(trace, name, args, kwargs)
    if name.startswith(".") and name[1:] in _ATTRIBUTES:
        return _ATTRIBUTES[name[1:]](args[0])
    function = FUNCTIONS.get(name)
    if function is None:
        raise refused(f"the function {name}", _ACCEPTED)
    if kwargs.get("inplace"):
        raise refused(f"the function {name} with inplace=True", "use its result")
    given = {
        _ARGUMENTS.get(key, key): value for key, value in kwargs.items() if key not in _IGNORED and value is not None
    }
    try:
        return function(trace, *args, **given)
    except TypeError as error:
        raise refused(f"the function {name} with these arguments") from error


def _call_of_rows(trace: Trace, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function one of whose arguments is a row: of its elements one by one, or a reduction."""
    if name == "getitem":
        return args[0][args[1]]
    if name in _REDUCTIONS:
        return _reduced(trace, name, *args, **kwargs)
    lengths = {len(x.elements) for x in (*args, *kwargs.values()) if isinstance(x, Row)}
    if len(lengths) != 1 or name.startswith("."):
        raise refused(f"the function {name} of rows of {sorted(lengths)} elements", "index every dimension")

    def of(x: Any, i: int) -> Any:
        return x.elements[i] if isinstance(x, Row) else x

    elements = [
        _call(name, tuple(of(x, i) for x in args), {key: of(x, i) for key, x in kwargs.items()})
        for i in range(lengths.pop())
    ]
    return Row(trace, elements)


#: Reductions of a row, by the function that joins two elements.
_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amin": "min", "amax": "max"}


def _reduced(trace: Trace, name: str, row: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if dim not in (None, -1, 0, (-1,), (0,), [-1], [0]) or keepdim or not row.elements:
        raise refused(f"the function {name} with these arguments", "a row has one dimension, the last")
    counts = _REDUCTIONS[name] in ("add", "mul")  # truth values are numbers then
    elements = [trace.as_kind(x, INT) if counts and x.kind == BOOL else x for x in row.elements]
    joined = functools.reduce(lambda a, b: _call(_REDUCTIONS[name], (a, b), {}), elements)
    return _call("div", (joined, len(elements)), {}) if name == "mean" else joined


_ACCEPTED = (
    "a program has Python's operators, where, abs, sign, floor, ceil, trunc, exp, exp2, log, log2, log1p, sqrt, rsqrt, "
    "square, sin, cos, tan, tanh, sigmoid, silu, gelu, erf, minimum, maximum and clamp"
)
#: Names that PyTorch and NumPy have for arguments, and those of the functions here.
_ARGUMENTS = {"input": "a", "self": "a", "other": "b", "exponent": "b", "a_min": "min", "a_max": "max"}
_IGNORED = frozenset(
    {"inplace", "device", "copy", "non_blocking", "memory_format", "requires_grad", "layout", "pin_memory"}
)

#: PyTorch's and NumPy's functions, by name. ``_trace_functions`` fills it.
FUNCTIONS: dict[str, Any] = {}

_ATTRIBUTES: dict[str, Any] = {
    "dtype": lambda tracer: tracer.trace.backend.dtype_of_kind(tracer.kind),
    "device": lambda tracer: tracer.trace.backend.device,
    "shape": lambda tracer: (),
    "ndim": lambda tracer: 0,
    "requires_grad": lambda tracer: False,
}


def literal(value: float | int) -> str:
    """A constant in the language of programs."""
    # Under `torch.compile`, a number that has changed between calls is symbolic. Its digits make it a
    # constant of the graph, which is compiled again for another number.
    value = operator.index(value) if isinstance(value, int) else float.fromhex(value.hex())
    if isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            raise refused(f"the integer {value}", "use integers of 32 bits")
        if value == _SMALLEST:
            return "(-2147483647 - 1)"
        return str(value) if value >= 0 else f"({value})"
    if math.isnan(value):
        return "nan"
    text = "inf" if math.isinf(value) else repr(abs(value))
    return text if math.copysign(1.0, value) > 0 else f"(-{text})"


def refused(what: str, hint: str = "") -> UnsupportedError:
    """The error for an operation that programs do not support, with the line of the user's function."""
    hint = f"; {hint}" if hint else ""
    words = f"{what} cannot be part of a program{hint}"
    leave_graph(words)
    return UnsupportedError(f"{_line()}: {words}", "program")


def _line() -> str:
    """File and line of the user's code that is being traced."""
    frame = sys._getframe(1)
    ours = (_HERE, os.sep + "torch" + os.sep, os.sep + "numpy" + os.sep, "<frozen", os.sep + "functools.py")
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Marks it as `torch.compiler.assume_constant_result` does: a graph's trace, which does not know the names of
# decorated functions, calls it.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
