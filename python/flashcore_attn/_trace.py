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
import weakref
from collections.abc import Iterator
from typing import Any

from ._errors import UnsupportedError

__all__ = ["Trace", "Tracer", "trace"]

FLOAT, INT, BOOL = "float", "int", "bool"

_LN2, _LOG2E = math.log(2.0), 1.0 / math.log(2.0)
_SMALLEST, _LARGEST = -(2**31), 2**31 - 1
_HERE = os.path.dirname(__file__)


class Tracer:
    """A value of each score, as a name in a program."""

    __slots__ = ("kind", "not_negative", "text", "trace")
    __array_priority__ = 1000

    def __init__(self, trace: Trace, text: str, kind: str, not_negative: bool = False) -> None:
        self.trace, self.text, self.kind, self.not_negative = trace, text, kind, not_negative

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
        if name in _FUNCTIONS and not name.startswith("_"):
            return functools.partial(_call_method, name, self)
        if name.startswith("__"):  # what Python and libraries look for
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
        if not isinstance(other, (Tracer, _Partial, numbers.Real)) and not _is_array(other):
            return NotImplemented
        return _call(name, (other, self) if swapped else (self, other), {})

    return apply


for _word, _own in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "lshift",
    "rshift": "rshift",
}.items():  # fmt: skip
    setattr(Tracer, f"__{_word}__", _operator(_own))
    setattr(Tracer, f"__r{_word}__", _operator(_own, swapped=True))
for _word in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tracer, f"__{_word}__", _operator(_word))
for _word, _own in {"neg": "neg", "pos": "clone", "abs": "abs", "invert": "bitwise_not"}.items():
    setattr(Tracer, f"__{_word}__", functools.partialmethod(lambda self, own: _call(own, (self,), {}), _own))


class Trace:
    """A program in the making."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.statements: list[str] = []
        self.known: dict[str, Tracer] = {}
        #: What the program's tables are: arrays of the caller, unconverted.
        self.arrays: list[Any] = []
        #: Whether the program depends on more than what the function has captured.
        self.once = False

    def position(self, name: str) -> Tracer:
        return Tracer(self, name, FLOAT if name == "s" else INT, name != "s")

    def emit(self, text: str, kind: str, not_negative: bool = False) -> Tracer:
        known = self.known.get(text)
        if known is None:
            name = f"v{len(self.statements)}"
            self.statements.append(f"{name} = {text};")
            known = self.known[text] = Tracer(self, name, kind, not_negative)
        return known

    def array(self, array: Any) -> int:
        """The number of the table of an array."""
        for number, known in enumerate(self.arrays):
            if known is array:
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1

    def load(self, array: Any, index: tuple[Any, ...]) -> Tracer:
        """An element of an array."""
        shape = tuple(array.shape)
        if not 1 <= len(shape) <= 4:
            raise refused(f"a look-up in an array of {len(shape)} dimensions", "use 1 to 4")
        number, kind = self.array(array), self.backend.kind(array)
        texts = [self._index(i, extent) for i, extent in zip(index, shape)]
        loaded = f"{'t' if kind == FLOAT else 'n'}{number}[{', '.join(texts)}]"
        if kind == BOOL:
            return self.emit(f"{loaded} != 0", BOOL)
        return self.emit(loaded, kind)

    def _index(self, index: Any, extent: int) -> str:
        if type(index) is int:
            return _literal(index + extent if index < 0 else index)
        index = self.value(index)
        if index.kind != INT:
            raise refused(f"a look-up with a {index.kind} as index", "use integers")
        if index.not_negative:
            return index.text
        return self.emit(f"select({index.text} < 0, {index.text} + {_literal(extent)}, {index.text})", INT).text

    def value(self, value: Any) -> Tracer:
        """A value as a tracer: a constant, or an array of one element, which the program reads at each call."""
        if isinstance(value, Tracer):
            if value.trace is not self:
                raise refused("a value of another call of the function")
            return value
        if isinstance(value, _Partial):
            raise refused("a row of an array", "index every dimension")
        if isinstance(value, bool):
            return Tracer(self, "true" if value else "false", BOOL)
        if isinstance(value, numbers.Real):  # NumPy's among them
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            return Tracer(self, _literal(number), INT if isinstance(number, int) else FLOAT, number >= 0)
        if _is_array(value):
            if math.prod(value.shape) != 1:
                raise refused(f"an array of shape {tuple(value.shape)} as a number", "index it")
            return self.load(_View(value), (0,)) if value.ndim != 1 else self.load(value, (0,))
        raise refused(f"a {type(value).__name__} as a number")

    def as_kind(self, value: Tracer, kind: str) -> Tracer:
        """The value in another kind."""
        if value.kind == kind:
            return value
        if value.text in ("0", "1") or (kind == FLOAT and value.text.isdigit()):
            return self.value(float(value.text) if kind == FLOAT else value.text == "1")
        if kind == BOOL:
            return self.emit(f"{value.text} != 0", BOOL)
        return self.emit(f"{kind}({value.text})", kind, value.not_negative or value.kind == BOOL)

    def finish(self, result: Any, kind: str) -> str:
        """The program's text."""
        value = self.as_kind(self.value(result), kind)
        return " ".join((*self.statements, value.text))


class _View:
    """A single element of an array of any number of dimensions, as an array of one dimension."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = (1,)
        self.dtype = array.dtype


class _Partial:
    """An array with some of its dimensions indexed."""

    def __init__(self, trace: Trace, array: Any, index: tuple[Any, ...]) -> None:
        self.trace, self.array, self.index = trace, array, index

    def __getitem__(self, index: Any) -> Any:
        return look_up(self.trace, self.array, (*self.index, *(index if isinstance(index, tuple) else (index,))))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(function) == "getitem":
            return args[0][args[1]]
        raise refused("a row of an array", "index every dimension")


def look_up(trace: Trace, array: Any, index: tuple[Any, ...]) -> Any:
    """``array[index]``, where an index is a tracer."""
    index = tuple(_unwrapped(i) for i in index)
    if any(i is None or isinstance(i, (slice, type(Ellipsis))) for i in index):
        raise refused("a look-up with a slice beside a position", "index every dimension")
    if len(index) > array.ndim:
        raise refused(f"a look-up with {len(index)} indices in an array of {array.ndim} dimensions")
    return trace.load(array, index) if len(index) == array.ndim else _Partial(trace, array, index)


def _unwrapped(index: Any) -> Any:
    """An array of one integer stays a table; what is as good as an int becomes one."""
    if isinstance(index, (Tracer, slice, type(Ellipsis), type(None))) or _is_array(index):
        return index
    return operator.index(index)


def table(array: Any) -> Any:
    """An array that a score or mask function may index with positions. PyTorch's tensors need no such wrapping;
    NumPy's arrays do, since they do not let an index take part.

    Args:
        array: a NumPy array of 1 to 4 dimensions.

    Returns:
        What can be indexed with one position for each dimension: ``slopes = table(array)``, then ``slopes[h]``.
    """
    return _Table(array)


class _Table:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        tracer = next((i for i in index if isinstance(i, Tracer)), None)
        if tracer is None:
            return self.array[index]
        return look_up(tracer.trace, self.array, index)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, Tracer)


def _name(function: Any) -> str:
    """The name of a function of PyTorch, without the underscores of an operator."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # of a property, as `dtype`
        return f".{function.__self__.__name__}"
    return name.strip("_")


def _tracers(values: Any) -> Iterator[Any]:
    """The tracers among values, and in the tuples and lists among them."""
    for value in values:
        if isinstance(value, (Tracer, _Partial)):
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
    return array.array.reshape((1,)) if isinstance(array, _View) else array


def _call_method(name: str, own: Tracer, *args: Any, **kwargs: Any) -> Any:
    return _call(name, (own, *args), kwargs)


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch or NumPy, one of whose arguments is a tracer."""
    trace = next(_tracers((*args, *kwargs.values()))).trace
    if name.startswith(".") and name[1:] in _ATTRIBUTES:
        return _ATTRIBUTES[name[1:]](args[0])
    function = _FUNCTIONS.get(name)
    if function is None:
        raise refused(f"the function {name}", _ACCEPTED)
    kwargs = {key: value for key, value in kwargs.items() if key not in _IGNORED}
    return function(trace, *args, **kwargs)


_ACCEPTED = (
    "a program has Python's operators, where, abs, sign, floor, ceil, trunc, exp, exp2, log, log2, sqrt, rsqrt, "
    "square, tanh, sigmoid, minimum, maximum and clamp"
)
_IGNORED = frozenset({"device", "copy", "non_blocking", "memory_format", "requires_grad", "layout", "pin_memory"})


def _pair(trace: Trace, a: Any, b: Any) -> tuple[Tracer, Tracer]:
    """Two numbers in one kind; truth values become integers."""
    a, b = trace.value(a), trace.value(b)
    kind = FLOAT if FLOAT in (a.kind, b.kind) else INT
    return _number(trace, a, kind), _number(trace, b, kind)


def _number(trace: Trace, value: Tracer, kind: str) -> Tracer:
    if value.kind == BOOL and kind == FLOAT:
        value = trace.as_kind(value, INT)
    return trace.as_kind(value, kind)


def _arithmetic(sign: str, keeps: bool = False) -> Any:
    def apply(trace: Trace, a: Any, b: Any, alpha: Any = 1) -> Tracer:
        a, b = _pair(trace, a, b if alpha == 1 else _FUNCTIONS["mul"](trace, b, alpha))
        return trace.emit(f"{a.text} {sign} {b.text}", a.kind, keeps and a.not_negative and b.not_negative)

    return apply


def _divide(trace: Trace, a: Any, b: Any, rounding_mode: str | None = None) -> Tracer:
    if rounding_mode == "floor":
        return _floor_divide(trace, a, b)
    a, b = _float(trace, a), _float(trace, b)
    quotient = trace.emit(f"{a.text} / {b.text}", FLOAT)
    return quotient if rounding_mode is None else _truncated(trace, quotient)


def _floor_divide(trace: Trace, a: Any, b: Any) -> Tracer:
    a, b = _pair(trace, a, b)
    if a.kind == INT:
        return trace.emit(f"{a.text} / {b.text}", INT, a.not_negative and b.not_negative)
    return _floor(trace, trace.emit(f"{a.text} / {b.text}", FLOAT))


def _remainder(trace: Trace, a: Any, b: Any) -> Tracer:
    a, b = _pair(trace, a, b)
    if a.kind == INT:
        return trace.emit(f"{a.text} % {b.text}", INT, b.not_negative)
    return trace.emit(f"{a.text} - {_floor_divide(trace, a, b).text} * {b.text}", FLOAT)


def _truncated(trace: Trace, a: Any) -> Tracer:
    """Rounded towards zero. Floats beyond 2^31 are integers."""
    a = trace.value(a)
    if a.kind != FLOAT:
        return a
    return trace.emit(f"select(abs({a.text}) < 2147483648.0, float(int({a.text})), {a.text})", FLOAT)


def _floor(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    if a.kind != FLOAT:
        return a
    whole = _truncated(trace, a)
    return trace.emit(f"select({whole.text} > {a.text}, {whole.text} - 1.0, {whole.text})", FLOAT)


def _ceil(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    if a.kind != FLOAT:
        return a
    whole = _truncated(trace, a)
    return trace.emit(f"select({whole.text} < {a.text}, {whole.text} + 1.0, {whole.text})", FLOAT)


def _float(trace: Trace, a: Any) -> Tracer:
    return _number(trace, trace.value(a), FLOAT)


def _function(text: str) -> Any:
    """A function of one float."""

    def apply(trace: Trace, a: Any) -> Tracer:
        return trace.emit(text.format(_float(trace, a).text), FLOAT)

    return apply


def _absolute(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    return trace.emit(f"abs({a.text})", a.kind, True)


def _negative(trace: Trace, a: Any) -> Tracer:
    a = _number(trace, trace.value(a), trace.value(a).kind if trace.value(a).kind != BOOL else INT)
    return trace.emit(f"-({a.text})", a.kind)


def _power(trace: Trace, a: Any, b: Any) -> Tracer:
    if type(b) is int and 0 <= b <= 8:
        result = trace.value(1)
        for _ in range(b):
            result = _FUNCTIONS["mul"](trace, result, a)
        return result
    if type(a) in (int, float) and a > 0:
        return trace.emit(f"exp2({_float(trace, b).text} * {_literal(math.log2(a))})", FLOAT)
    if type(b) is float and b == 0.5:
        return trace.emit(f"sqrt({_float(trace, a).text})", FLOAT)
    raise refused("this power", "accepted are exponents of 0 to 8 and 0.5, and positive constants as the base")


def _compare(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        a, b = trace.value(a), trace.value(b)
        if not a.kind == b.kind == BOOL or sign not in ("==", "!="):
            a, b = _pair(trace, a, b)
        return trace.emit(f"{a.text} {sign} {b.text}", BOOL)

    return apply


def _bits(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        a, b = trace.value(a), trace.value(b)
        if FLOAT in (a.kind, b.kind):
            raise refused(f"{sign} of floating-point numbers", "use truth values or integers")
        if a.kind != b.kind:
            a, b = _pair(trace, a, b)
        neutral = {"&": "true", "|": "false"}.get(sign)
        if neutral in (a.text, b.text):
            return b if a.text == neutral else a
        return trace.emit(f"{a.text} {sign} {b.text}", a.kind, a.not_negative and b.not_negative)

    return apply


def _logical(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        return _bits(sign)(trace, trace.as_kind(trace.value(a), BOOL), trace.as_kind(trace.value(b), BOOL))

    return apply


def _shift(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        a, b = _pair(trace, a, b)
        if a.kind != INT:
            raise refused(f"{sign} of floating-point numbers", "use integers")
        return trace.emit(f"{a.text} {sign} {b.text}", INT, sign == ">>" and a.not_negative)

    return apply


def _invert(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    if a.kind == FLOAT:
        raise refused("~ of a floating-point number", "use truth values or integers")
    return trace.emit(f"!{a.text}", a.kind)


def _not(trace: Trace, a: Any) -> Tracer:
    return trace.emit(f"!{trace.as_kind(trace.value(a), BOOL).text}", BOOL)


def _where(trace: Trace, condition: Any, yes: Any, no: Any) -> Tracer:
    condition, yes, no = trace.as_kind(trace.value(condition), BOOL), trace.value(yes), trace.value(no)
    if yes.kind != no.kind:
        yes, no = _pair(trace, yes, no)
    both = yes.not_negative and no.not_negative
    return trace.emit(f"select({condition.text}, {yes.text}, {no.text})", yes.kind, both)


def _extreme(name: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        a, b = _pair(trace, a, b)
        known = (a.not_negative or b.not_negative) if name == "max" else (a.not_negative and b.not_negative)
        return trace.emit(f"{name}({a.text}, {b.text})", a.kind, known)

    return apply


def _clamp(trace: Trace, a: Any, min: Any = None, max: Any = None) -> Tracer:
    result = trace.value(a)
    if min is not None:
        result = _FUNCTIONS["maximum"](trace, result, min)
    return result if max is None else _FUNCTIONS["minimum"](trace, result, max)


def _sign(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    one, zero = ("1.0", "0.0") if a.kind == FLOAT else ("1", "0")
    return trace.emit(f"select({a.text} > {zero}, {one}, select({a.text} < {zero}, -{one}, {zero}))", a.kind)


def _cast(kind: str) -> Any:
    def apply(trace: Trace, a: Any) -> Tracer:
        return _number(trace, trace.value(a), kind)

    return apply


def _to(trace: Trace, a: Any, *wanted: Any, dtype: Any = None) -> Tracer:
    a = trace.value(a)
    for each in (dtype, *wanted):
        kind = each.kind if isinstance(each, Tracer) else trace.backend.kind_of_dtype(each)
        if kind is not None:
            return _number(trace, a, kind)
    return a


def _filled(value: Any) -> Any:
    """``zeros_like`` and others of one element."""

    def apply(trace: Trace, a: Any, *shape: Any, dtype: Any = None, size: Any = None) -> Tracer:
        return _new(trace, trace.value(a), value, dtype)

    return apply


def _full(trace: Trace, a: Any, *arguments: Any, fill_value: Any = None, dtype: Any = None, size: Any = None) -> Tracer:
    return _new(trace, trace.value(a), arguments[-1] if fill_value is None else fill_value, dtype)


def _new(trace: Trace, like: Tracer, value: Any, dtype: Any) -> Tracer:
    kind = trace.backend.kind_of_dtype(dtype)
    return _number(trace, trace.value(value), kind or like.kind)


def _same(trace: Trace, a: Any, *ignored: Any) -> Tracer:
    return trace.value(a)


_FUNCTIONS: dict[str, Any] = {
    "add": _arithmetic("+", True), "sub": _arithmetic("-"), "mul": _arithmetic("*", True),
    "rsub": lambda trace, a, b: _arithmetic("-")(trace, b, a),
    "rtruediv": lambda trace, a, b: _divide(trace, b, a), "rdiv": lambda trace, a, b: _divide(trace, b, a),
    "rfloordiv": lambda trace, a, b: _floor_divide(trace, b, a),
    "rmod": lambda trace, a, b: _remainder(trace, b, a), "rpow": lambda trace, a, b: _power(trace, b, a),
    "radd": _arithmetic("+", True), "rmul": _arithmetic("*", True),
    "div": _divide, "floor_divide": _floor_divide, "remainder": _remainder, "pow": _power,
    "eq": _compare("=="), "ne": _compare("!="), "lt": _compare("<"), "le": _compare("<="), "gt": _compare(">"),
    "ge": _compare(">="),
    "bitwise_and": _bits("&"), "bitwise_or": _bits("|"), "bitwise_xor": _bits("^"), "bitwise_not": _invert,
    "logical_and": _logical("&"), "logical_or": _logical("|"), "logical_xor": _logical("^"), "logical_not": _not,
    "lshift": _shift("<<"), "rshift": _shift(">>"),
    "neg": _negative, "abs": _absolute, "sign": _sign, "square": lambda trace, a: _power(trace, a, 2),
    "floor": _floor, "ceil": _ceil, "trunc": _truncated,
    "exp": _function(f"exp2({{}} * {_LOG2E!r})"), "exp2": _function("exp2({})"),
    "log": _function(f"log2({{}}) * {_LN2!r}"), "log2": _function("log2({})"),
    "tanh": _function("tanh({})"), "sqrt": _function("sqrt({})"), "rsqrt": _function("1.0 / sqrt({})"),
    "reciprocal": _function("1.0 / {}"), "sigmoid": _function(f"1.0 / (1.0 + exp2({{}} * {-_LOG2E!r}))"),
    "where": _where, "min": _extreme("min"), "max": _extreme("max"), "clamp": _clamp,
    "relu": lambda trace, a: _extreme("max")(trace, a, 0),
    "to": _to, "float": _cast(FLOAT), "int": _cast(INT), "bool": lambda trace, a: trace.as_kind(trace.value(a), BOOL),
    "zeros_like": _filled(0), "ones_like": _filled(1), "new_zeros": _filled(0), "new_ones": _filled(1),
    "full_like": _full, "new_full": _full, "new_tensor": lambda trace, a, value, dtype=None: trace.value(value),
    "clone": _same, "view": _same, "expand": _same, "reshape": _same,
    "getitem": lambda trace, array, index: look_up(trace, array, index if isinstance(index, tuple) else (index,)),
    "size": lambda trace, a: (), "dim": lambda trace, a: 0, "is_floating_point": lambda trace, a: a.kind == FLOAT,
}  # fmt: skip
for _word, _own in {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
    "floordiv": "floor_divide", "mod": "remainder", "power": "pow", "not_equal": "ne", "equal": "eq", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor", "invert": "bitwise_not",
    "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "left_shift": "lshift", "right_shift": "rshift",
    "negative": "neg", "absolute": "abs", "minimum": "min", "maximum": "max", "clip": "clamp", "type": "to",
    "astype": "to", "type_as": "to", "half": "float", "bfloat16": "float", "double": "float", "long": "int",
    "detach": "clone", "contiguous": "clone", "cpu": "clone", "cuda": "clone", "squeeze": "clone", "positive": "clone",
}.items():  # fmt: skip
    _FUNCTIONS[_word] = _FUNCTIONS[_own]

_ATTRIBUTES: dict[str, Any] = {
    "dtype": lambda tracer: tracer.trace.backend.dtype_of_kind(tracer.kind),
    "device": lambda tracer: tracer.trace.backend.device,
    "shape": lambda tracer: (),
    "ndim": lambda tracer: 0,
    "requires_grad": lambda tracer: False,
}


def _literal(value: float | int) -> str:
    """A constant in the language of programs."""
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
    """The error for what a program cannot state, with the line of the user's function."""
    hint = f"; {hint}" if hint else ""
    return UnsupportedError(f"{_line()}: {what} cannot be part of a program{hint}", "program")


def _line() -> str:
    """File and line of the user's code that is being traced."""
    frame = sys._getframe(1)
    ours = (_HERE, os.sep + "torch" + os.sep, os.sep + "numpy" + os.sep, "<frozen", os.sep + "functools.py")
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
        self.is_view = isinstance(array, _View)
        self.of = weakref.ref(array.array if self.is_view else array)

    def __call__(self) -> Any:
        array = self.of()
        return _View(array) if self.is_view and array is not None else array


#: Programs by what their functions consist of. The oldest is dropped.
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
    owned = [array.array if isinstance(array, _View) else array for array in recorder.arrays]
    if key is not None and not recorder.once and all(id(array) in captured for array in owned):
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)), None)
        _known[key] = _Traced(text, recorder.arrays)
    return text, recorder.arrays


def _contents(value: Any, captured: set[int], depth: int = 0) -> Any:
    """What a value consists of, as a key; None if that cannot be told. Notes the ids of arrays."""
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
    if isinstance(value, _Table):
        return _contents(value.array, captured, depth)
    if _is_array(value):
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
