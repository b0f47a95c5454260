"""PyTorch's and NumPy's functions on tracers: each appends operations to the program."""

from __future__ import annotations

import math
from typing import Any

from ._trace import BOOL, FLOAT, FUNCTIONS, INT, WIDTHS, Trace, Tracer, literal, look_up, narrow_type, refused

_LN2, _LOG2E = math.log(2.0), 1.0 / math.log(2.0)


def _pair(trace: Trace, a: Any, b: Any) -> tuple[Tracer, Tracer]:
    """Two numbers in one kind; a truth value beside a number becomes an integer."""
    a, b = trace.value(a), trace.value(b)
    kind = FLOAT if FLOAT in (a.kind, b.kind) else INT
    return _number(trace, a, kind), _number(trace, b, kind)


def _narrow(a: Tracer, b: Tracer) -> str | None:
    """The narrow type of PyTorch's result of two integers; None for 32 bits."""
    types = {a.narrow, b.narrow} - {""}
    if a.kind == FLOAT or b.kind == FLOAT or not types or None in types:
        return None
    return types.pop() if len(types) == 1 else "int16"


def _integers(trace: Trace, a: Any, b: Any) -> tuple[Tracer, Tracer, str | None]:
    """Two numbers in one kind, and the narrow type of their result, in which a number of Python takes part."""
    a, b = _pair(trace, a, b)
    narrow = _narrow(a, b)
    if narrow is not None:
        a, b = (_wrapped(trace, x, narrow) if x.narrow == "" else x for x in (a, b))
    return a, b, narrow


def _wrapped(trace: Trace, a: Tracer, narrow: str | None) -> Tracer:
    """An integer as its lowest bits in a narrow type."""
    if not narrow:
        return a
    bits, is_signed = WIDTHS[narrow]
    low, half = (1 << bits) - 1, 1 << (bits - 1)
    text = f"(({a.text} & {low}) ^ {half}) - {half}" if is_signed else f"{a.text} & {low}"
    return trace.emit(text, INT, not is_signed, narrow)


def _number(trace: Trace, value: Tracer, kind: str) -> Tracer:
    if value.kind == BOOL and kind == FLOAT:
        value = trace.as_kind(value, INT)
    return trace.as_kind(value, kind)


def _are_bools(trace: Trace, a: Any, b: Any) -> bool:
    """Whether both are truth values, whose sum is "or" and whose product is "and", as in PyTorch and NumPy."""
    return trace.value(a).kind == trace.value(b).kind == BOOL


def _arithmetic(sign: str, keeps: bool = False) -> Any:
    def apply(trace: Trace, a: Any, b: Any, alpha: Any = 1) -> Tracer:
        b = b if alpha == 1 else FUNCTIONS["mul"](trace, b, alpha)
        if _are_bools(trace, a, b):
            if sign == "-":
                raise refused("a difference of truth values", "use ^ or logical_xor")
            return _bits({"+": "|", "*": "&"}[sign])(trace, a, b)
        a, b, narrow = _integers(trace, a, b)
        known = keeps and a.not_negative and b.not_negative
        return _wrapped(trace, trace.emit(f"{a.text} {sign} {b.text}", a.kind, known), narrow)

    return apply


def _divide(trace: Trace, a: Any, b: Any, rounding_mode: str | None = None) -> Tracer:
    if rounding_mode == "floor":
        return _floor_divide(trace, a, b)
    a, b = _float(trace, a), _float(trace, b)
    quotient = trace.emit(f"{a.text} / {b.text}", FLOAT)
    return quotient if rounding_mode is None else _truncated(trace, quotient)


def _floor_divide(trace: Trace, a: Any, b: Any) -> Tracer:
    a, b, narrow = _integers(trace, a, b)
    if a.kind == INT:
        quotient = trace.emit(f"{a.text} / {b.text}", INT, a.not_negative and b.not_negative)
        return _wrapped(trace, quotient, narrow)
    return _floor(trace, trace.emit(f"{a.text} / {b.text}", FLOAT))


def _remainder(trace: Trace, a: Any, b: Any) -> Tracer:
    a, b, narrow = _integers(trace, a, b)
    if a.kind == INT:
        return _wrapped(trace, trace.emit(f"{a.text} % {b.text}", INT, b.not_negative), narrow)
    return trace.emit(f"{a.text} - {_floor_divide(trace, a, b).text} * {b.text}", FLOAT)


def _truncated(trace: Trace, a: Any) -> Tracer:
    """Rounded towards zero. Floats beyond 2^31 are integers."""
    a = trace.value(a)
    if a.kind != FLOAT:
        return a
    return trace.emit(f"select(abs({a.text}) < 2147483648.0, float(int({a.text})), {a.text})", FLOAT)


def _rounded(beyond: str, step: str) -> Any:
    """The function that takes a step where truncation went beyond a number."""

    def rounded(trace: Trace, a: Any) -> Tracer:
        a = trace.value(a)
        if a.kind != FLOAT:
            return a
        whole = _truncated(trace, a).text
        return trace.emit(f"select({whole} {beyond} {a.text}, {whole} {step}, {whole})", FLOAT)

    return rounded


_floor, _ceil = _rounded(">", "- 1.0"), _rounded("<", "+ 1.0")


def _float(trace: Trace, a: Any) -> Tracer:
    return _number(trace, trace.value(a), FLOAT)


def _function(text: str) -> Any:
    """A function of one float."""

    def apply(trace: Trace, a: Any) -> Tracer:
        return trace.emit(text.format(_float(trace, a).text), FLOAT)

    return apply


def _polynomial(trace: Trace, x: Tracer, coefficients: tuple[float, ...]) -> Tracer:
    """A polynomial by Horner's rule, from the constant on."""
    result = trace.value(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = trace.emit(f"{coefficient!r} + {result.text} * {x.text}", FLOAT)
    return result


# Taylor series of sin(x) / x in x². The next term is below 7e-10 for |x| <= pi / 2.
_SINE = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(7))


def _wave(shift: float) -> Any:
    """``sin(x + shift * pi)``, with an absolute error below 3e-7 for ``|x| <= 1000``.

    The distance to the nearest zero is computed with pi in two parts, so that the first product is exact.
    """

    def apply(trace: Trace, a: Any) -> Tracer:
        x = _float(trace, a)
        half = _floor(trace, trace.emit(f"{x.text} * {1 / math.pi!r} + {0.5 + shift!r}", FLOAT))
        zero = trace.emit(f"{half.text} - {shift!r}", FLOAT)
        r = trace.emit(f"({x.text} - {zero.text} * 3.140625) - {zero.text} * {math.pi - 3.140625!r}", FLOAT)
        sine = _polynomial(trace, trace.emit(f"{r.text} * {r.text}", FLOAT), _SINE)
        return trace.emit(f"{r.text} * {sine.text} * float(1 - 2 * (int({half.text}) & 1))", FLOAT)

    return apply


def _error_function(trace: Trace, a: Any) -> Tracer:
    """Formula 7.1.26 of Abramowitz and Stegun, with an absolute error below 5e-7 in f32."""
    x = _float(trace, a)
    t = trace.emit(f"1.0 / (1.0 + 0.3275911 * abs({x.text}))", FLOAT)
    factors = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    tail = trace.emit(f"{t.text} * {_polynomial(trace, t, factors).text}", FLOAT)
    size = trace.emit(f"1.0 - {tail.text} * exp2({x.text} * {x.text} * {-_LOG2E!r})", FLOAT)
    return trace.emit(f"select({x.text} < 0.0, -({size.text}), {size.text})", FLOAT)


def _log1p(trace: Trace, a: Any) -> Tracer:
    """``log(1 + x)``, near 0 by the series of ``2 * atanh(x / (2 + x))``, whose relative error is below 3e-7."""
    x = _float(trace, a)
    z = trace.emit(f"select(abs({x.text}) < 0.25, {x.text} / (2.0 + {x.text}), 0.0)", FLOAT)
    series = _polynomial(trace, trace.emit(f"{z.text} * {z.text}", FLOAT), (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9))
    far = trace.emit(f"log2(1.0 + {x.text}) * {_LN2!r}", FLOAT)
    return trace.emit(f"select(abs({x.text}) < 0.25, {z.text} * {series.text}, {far.text})", FLOAT)


def _gelu(trace: Trace, a: Any, approximate: str = "none") -> Tracer:
    x = _float(trace, a)
    if approximate == "none":
        share = _error_function(trace, trace.emit(f"{x.text} * {math.sqrt(0.5)!r}", FLOAT))
    else:
        share = trace.emit(
            f"tanh({math.sqrt(2 / math.pi)!r} * ({x.text} + 0.044715 * {x.text} * {x.text} * {x.text}))", FLOAT
        )
    return trace.emit(f"0.5 * {x.text} * (1.0 + {share.text})", FLOAT)


def _absolute(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    return _wrapped(trace, trace.emit(f"abs({a.text})", a.kind, True), a.narrow)


def _negative(trace: Trace, a: Any) -> Tracer:
    a = _number(trace, trace.value(a), trace.value(a).kind if trace.value(a).kind != BOOL else INT)
    return _wrapped(trace, trace.emit(f"-({a.text})", a.kind), a.narrow)


def _power(trace: Trace, a: Any, b: Any) -> Tracer:
    if type(b) is int and 0 <= b <= 8:
        result = trace.value(1)
        for _ in range(b):
            result = FUNCTIONS["mul"](trace, result, a)
        return result
    if type(a) in (int, float) and a > 0:
        return trace.emit(f"exp2({_float(trace, b).text} * {literal(math.log2(a))})", FLOAT)
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
        narrow = None
        if not a.kind == b.kind == BOOL:
            a, b, narrow = _integers(trace, a, b)
        neutral = {"&": "true", "|": "false"}.get(sign)
        if neutral in (a.text, b.text):
            return b if a.text == neutral else a
        return trace.emit(f"{a.text} {sign} {b.text}", a.kind, a.not_negative and b.not_negative, narrow)

    return apply


def _logical(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        return _bits(sign)(trace, trace.as_kind(trace.value(a), BOOL), trace.as_kind(trace.value(b), BOOL))

    return apply


def _shift(sign: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        a, b, narrow = _integers(trace, a, b)
        if a.kind != INT:
            raise refused(f"{sign} of floating-point numbers", "use integers")
        known = sign == ">>" and a.not_negative
        return _wrapped(trace, trace.emit(f"{a.text} {sign} {b.text}", INT, known), narrow)

    return apply


def _invert(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    if a.kind == FLOAT:
        raise refused("~ of a floating-point number", "use truth values or integers")
    return _wrapped(trace, trace.emit(f"!{a.text}", a.kind), a.narrow if a.kind == INT else None)


def _not(trace: Trace, a: Any) -> Tracer:
    return trace.emit(f"!{trace.as_kind(trace.value(a), BOOL).text}", BOOL)


def _where(trace: Trace, condition: Any, a: Any, b: Any) -> Tracer:
    condition, yes, no = trace.as_kind(trace.value(condition), BOOL), trace.value(a), trace.value(b)
    if yes.kind != no.kind:
        yes, no = _pair(trace, yes, no)
    both = yes.not_negative and no.not_negative
    return trace.emit(f"select({condition.text}, {yes.text}, {no.text})", yes.kind, both, _narrow(yes, no))


def _extreme(name: str) -> Any:
    def apply(trace: Trace, a: Any, b: Any) -> Tracer:
        if _are_bools(trace, a, b):
            return _bits("|" if name == "max" else "&")(trace, a, b)
        a, b = _pair(trace, a, b)
        known = (a.not_negative or b.not_negative) if name == "max" else (a.not_negative and b.not_negative)
        return trace.emit(f"{name}({a.text}, {b.text})", a.kind, known, _narrow(a, b))

    return apply


def _clamp(trace: Trace, a: Any, min: Any = None, max: Any = None) -> Tracer:
    result = trace.value(a)
    if min is not None:
        result = FUNCTIONS["maximum"](trace, result, min)
    return result if max is None else FUNCTIONS["minimum"](trace, result, max)


def _sign(trace: Trace, a: Any) -> Tracer:
    a = trace.value(a)
    one, zero = ("1.0", "0.0") if a.kind == FLOAT else ("1", "0")
    text = f"select({a.text} > {zero}, {one}, select({a.text} < {zero}, -{one}, {zero}))"
    return trace.emit(text, a.kind, narrow=a.narrow)


def _cast(kind: str, narrow: str | None = None) -> Any:
    def apply(trace: Trace, a: Any) -> Tracer:
        return _converted(trace, trace.value(a), kind, narrow)

    return apply


def _converted(trace: Trace, a: Tracer, kind: str, narrow: str | None) -> Tracer:
    """A number in another kind, or as an integer of another width."""
    number = _number(trace, a, kind)
    if number.kind != INT or number.narrow == narrow:
        return number
    return _wrapped(trace, number, narrow) if narrow else Tracer(trace, number.text, INT, number.not_negative)


def _to(trace: Trace, a: Any, *wanted: Any, dtype: Any = None) -> Tracer:
    a = trace.value(a)
    for each in (dtype, *wanted):
        is_tracer = isinstance(each, Tracer)
        kind = each.kind if is_tracer else trace.backend.kind_of_dtype(each)
        if kind is not None:
            return _converted(trace, a, kind, each.narrow if is_tracer else narrow_type(each))
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


def _view(trace: Trace, a: Any, *shape: Any) -> Tracer:
    if any(trace.backend.kind_of_dtype(each) is not None for each in shape):
        raise refused("the bits of a number as another type")
    return trace.value(a)


FUNCTIONS.update({
    "add": _arithmetic("+", True), "sub": _arithmetic("-"), "mul": _arithmetic("*", True),
    "rsub": lambda trace, a, b: _arithmetic("-")(trace, b, a),
    "rtruediv": lambda trace, a, b: _divide(trace, b, a), "rdiv": lambda trace, a, b: _divide(trace, b, a),
    "rfloordiv": lambda trace, a, b: _floor_divide(trace, b, a),
    "rmod": lambda trace, a, b: _remainder(trace, b, a), "rpow": lambda trace, a, b: _power(trace, b, a),
    "rlshift": lambda trace, a, b: _shift("<<")(trace, b, a), "rrshift": lambda trace, a, b: _shift(">>")(trace, b, a),
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
    "log1p": _log1p, "erf": _error_function, "cos": _wave(0.5), "sin": _wave(0.0),
    "tan": lambda trace, a: _divide(trace, _wave(0.0)(trace, a), _wave(0.5)(trace, a)),
    "silu": lambda trace, a: _arithmetic("*")(trace, a, FUNCTIONS["sigmoid"](trace, a)), "gelu": _gelu,
    "tanh": _function("tanh({})"), "sqrt": _function("sqrt({})"), "rsqrt": _function("1.0 / sqrt({})"),
    "reciprocal": _function("1.0 / {}"), "sigmoid": _function(f"1.0 / (1.0 + exp2({{}} * {-_LOG2E!r}))"),
    "where": _where, "_where": lambda trace, a, condition, b: _where(trace, condition, a, b),
    "min": _extreme("min"), "max": _extreme("max"), "clamp": _clamp,
    "relu": lambda trace, a: _extreme("max")(trace, a, 0),
    "to": _to, "float": _cast(FLOAT), "int": _cast(INT), "short": _cast(INT, "int16"),
    "char": _cast(INT, "int8"), "byte": _cast(INT, "uint8"),
    "bool": lambda trace, a: trace.as_kind(trace.value(a), BOOL),
    "zeros_like": _filled(0), "ones_like": _filled(1), "new_zeros": _filled(0), "new_ones": _filled(1),
    "full_like": _full, "new_full": _full, "new_tensor": lambda trace, a, value, dtype=None: trace.value(value),
    "clone": _same, "view": _view, "expand": _same, "reshape": _same,
    "getitem": lambda trace, array, index: look_up(trace, array, index if isinstance(index, tuple) else (index,)),
    "size": lambda trace, a: (), "dim": lambda trace, a: 0, "is_floating_point": lambda trace, a: a.kind == FLOAT,
})  # fmt: skip
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
    FUNCTIONS[_word] = FUNCTIONS[_own]
