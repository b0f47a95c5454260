"""The optional parts of a call besides q, k and v: lengths, sinks, and programs for the score and the mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._errors import ArgumentError, invalid

__all__ = ["NO_LENGTHS", "NO_SCALES", "Append", "Features", "Parts", "Rotary", "alibi", "chunk", "scores"]

#: ``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_q``, ``seqused_k`` and ``leftpad_k`` of a call without any.
NO_LENGTHS: tuple[Any, Any, Any, Any, Any] = (None, None, None, None, None)
#: Descale factors of q, k and v of a call without any.
NO_SCALES: tuple[Any, Any, Any] = (None, None, None)
SCALES = ("descale_q", "descale_k", "descale_v")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")

_POSITIONS = ("b", "h", "q", "k")


class Features(NamedTuple):
    """The features of a call. Programs are texts that Rust parses; an empty text means no program."""

    lengths: tuple[Any, Any, Any, Any, Any] = NO_LENGTHS
    batch: int = 0
    max_q: int = 0
    max_k: int = 0
    sink: Any = None
    score: str = ""
    mask: str = ""
    floats: tuple[float, ...] = ()
    ints: tuple[int, ...] = ()
    tables: tuple[Any, ...] = ()
    scales: tuple[Any, Any, Any] = NO_SCALES
    # Rows that share a factor of q, of k and of v; 0 for one factor per KV head.
    blocks: tuple[int, int, int] = (0, 0, 0)
    # ``(batch, pages)``; k and v are pools of pages then.
    page_table: Any = None
    # Whether equal calls give equal gradients, to the bit.
    deterministic: bool = False
    # What messages call the tables.
    names: tuple[str, ...] = ()
    temperature: Any = None
    # O and the log-sum-exp over other keys, from which the call continues. O has the strides of the output.
    before: tuple[Any, Any] | None = None
    # The probability of dropout, and the four words of its generator's state; None without dropout.
    dropout_p: float = 0.0
    rng_state: Any = None
    # On what the bits of a row must not depend: "batch" or "phase"; empty for no demand.
    invariant: str = ""

    @property
    def uneven(self) -> bool:
        """Whether lengths differ between batch entries."""
        return any(array is not None for array in self.lengths)

    @property
    def table_names(self) -> tuple[str, ...]:
        """What messages call the tables. An operator knows no names."""
        return self.names or tuple(f"table {i}" for i in range(len(self.tables)))

    def of_heads(self) -> list[tuple[str, str, Any]]:
        """The arrays with a value per query head, with the names of their operands and what messages call them."""
        arrays = (("sinks", "learnable_sink", self.sink), ("temperature", "temperature", self.temperature))
        return [(operand, name, x) for operand, name, x in arrays if x is not None]

    def named(self) -> list[tuple[str, Any]]:
        """The arrays with what messages call them."""
        named = (
            *zip(LENGTHS, self.lengths), *zip(SCALES, self.scales), *((name, x) for _, name, x in self.of_heads()),
            *zip(self.table_names, self.tables), ("page_table", self.page_table),
            *zip(("out_before", "lse_before"), self.before or ()), ("rng_state", self.rng_state),
        )  # fmt: skip
        return [(name, x) for name, x in named if x is not None]


class Parts:
    """Collects the programs of a call, and the tables and parameters that they read."""

    def __init__(self) -> None:
        self.score = ""
        self.mask = ""
        self.tables: list[Any] = []
        self.names: list[str] = []
        self.ints: list[int] = []

    def table(self, table: Any, name: str) -> int:
        self.tables.append(table)
        self.names.append(name)
        return len(self.tables) - 1

    def integer(self, value: int) -> int:
        self.ints.append(value)
        return len(self.ints) - 1

    def features(self, **others: Any) -> Features | None:
        """The features; None if there are none."""
        tables, ints = tuple(self.tables), tuple(self.ints)
        named = {"names": tuple(self.names), **others}
        features = Features(score=self.score, mask=self.mask, ints=ints, tables=tables, **named)
        stated = features.score or features.mask or features.of_heads() or features.uneven
        scaled = any(x is not None for x in features.scales)
        return features if stated or scaled or features.page_table is not None else None


def alibi(parts: Parts, backend: Any, slopes: Any, batch: int, heads: int) -> None:
    """ALiBi: ``s - slope * |i + seqlen_k - seqlen_q - j|``."""
    slopes = backend.as_table("alibi_slopes", slopes, floating=True)
    shape = tuple(slopes.shape)
    if shape not in ((heads,), (batch, heads)):
        raise invalid("the shape of alibi_slopes", shape, f"({heads},), or (batch, heads) = ({batch}, {heads})")
    index = "[h]" if len(shape) == 1 else "[b, h]"
    number = parts.table(slopes, "alibi_slopes")
    parts.score = f"{parts.score or 's'} - t{number}{index} * float(abs(q + k_len - q_len - k))"


def temperature(parts: Parts, factors: Any, softcap: float) -> tuple[float, tuple[float, ...]]:
    """Factors of heads in the score program, which has gradients, and the cap after them. Returns the cap that is left,
    and the program's parameters."""
    factor = f"t{parts.table(factors, 'temperature')}[h]"
    parts.score = f"select({factor} >= 0.0, s * {factor}, nan)"
    if not softcap:
        return 0.0, ()
    parts.score = f"f0 * tanh({parts.score} / f0)"
    return 0.0, (softcap,)


def chunk(parts: Parts, length: int) -> None:
    """Keys in the query's chunk of ``length`` positions, aligned to the bottom right."""
    number = parts.integer(length)
    parts.mask = f"(q + k_len - q_len) / i{number} == k / i{number}"


def broadcasts(shape: Any, whole: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape broadcasts to ``whole``."""
    return len(shape) <= len(whole) and all(x in (1, y) for x, y in zip(reversed(shape), reversed(whole)))


def scores(parts: Parts, backend: Any, name: str, mask: Any, shape: tuple[int, int, int, int]) -> None:
    """A mask (of truth values) or a bias (of floats) that broadcasts to ``(batch, heads, L, S)``."""
    varies = backend.is_traced()  # the mask of a later call may depend on other dimensions
    if shape[3] == 0 and not varies:
        return  # there is no key
    if varies:
        mask = backend.expand(mask, shape)
    # A dimension on which the mask does not depend has one element, or repeats by a stride of 0.
    missing = 4 - len(mask.shape)
    strides = backend.strides(mask)
    kept = [i for i, extent in enumerate(mask.shape) if varies or extent == 0 or (extent > 1 and strides[i])]
    # The mask is not expanded: its gradient would have the expanded shape.
    read = mask[tuple(slice(None) if i in kept else 0 for i in range(len(mask.shape)))]
    index = ", ".join(_POSITIONS[i + missing] for i in kept) if kept else "0"
    read = read if kept else read.reshape((1,))
    number = parts.table(read, name)
    if backend.is_floating(mask):
        parts.score = f"{parts.score or 's'} + t{number}[{index}]"
    else:
        parts.mask = f"n{number}[{index}] != 0"


def sink(name: str, backend: Any, given: Any, heads: int, of_head: str = "a logit") -> Any:
    """Sinks, or other values, in float32, one per query head."""
    made = backend.as_sink(name, given)
    if tuple(made.shape) != (heads,):
        raise invalid(f"the shape of {name}", tuple(made.shape), f"({heads},), {of_head} per query head")
    return made


#: Rows that can share a descale factor.
ROWS = (64, 128)


def rows_of_block(name: str, factors: Any, batch: int, heads: int, rows: int) -> int:
    """The rows that share a descale factor, by the number of factors; 0 for one per batch entry and KV head."""
    shape = tuple(factors.shape)
    if shape == (batch, heads):
        return 0
    for of_block in ROWS:
        if shape == (batch, heads, -(-rows // of_block)):
            return of_block
    blocks = " or ".join(str(shape) for shape in dict.fromkeys((batch, heads, -(-rows // n)) for n in ROWS))
    expected = f"(batch, heads_k) = ({batch}, {heads}), or {blocks} for blocks of 64 or 128 rows"
    raise invalid(f"the shape of {name}", shape, expected)


def check_integer(name: str, value: int) -> None:
    """Rejects an element of an array that a program cannot hold."""
    if not -(2**31) <= value < 2**31:
        raise invalid(f"an element of {name}", value, "an integer of 32 bits")


def check_truth(name: str, value: int) -> None:
    """Rejects an element of a mask of integers that is no truth value."""
    if value not in (0, 1):
        raise invalid(f"an element of {name}", value, "0 or 1 in a mask of integers")


def length_elements(name: str, batch: Any) -> Any:
    """The number of elements of an array of lengths."""
    # A symbolic number of PyTorch 2.11 cannot be added to a bool.
    return batch + 1 if name.startswith("cu_") else batch


def check_length_array(name: str, array: Any, elements: int) -> None:
    """Rejects an array of lengths with a wrong number of elements."""
    shape = tuple(array.shape)
    if len(shape) != 1 or shape[0] != elements:
        raise ArgumentError(f"{name} has shape {shape}; expected ({elements},)")


class Rotary(NamedTuple):
    """Rotary embedding of queries and of new keys."""

    cos: Any
    sin: Any
    interleaved: bool
    positions: Any


class Append(NamedTuple):
    """Keys and values that a call appends to its cache: ``(batch, rows, heads, dim)``, or packed with ``starts``."""

    k: Any
    v: Any
    starts: Any
    rotary: Rotary | None

    def named(self) -> list[tuple[str, Any]]:
        """The tensors with what messages call them."""
        named = [("k", self.k), ("v", self.v), ("cu_seqlens_k_new", self.starts)]
        if self.rotary is not None:
            named += [
                ("rotary_cos", self.rotary.cos), ("rotary_sin", self.rotary.sin),
                ("rotary_seqlens", self.rotary.positions),
            ]  # fmt: skip
        return [(name, x) for name, x in named if x is not None]


def check_page_table(table: Any, batch: Any) -> None:
    """Rejects a page table of another shape."""
    shape = tuple(table.shape)
    if len(shape) != 2 or shape[0] != batch:
        raise invalid("the shape of page_table", shape, f"(batch, pages) with batch = {batch}")


def check_shapes(q: Any, k: Any, v: Any, heads: int, same_batch: bool = True) -> None:
    """Rejects extents that do not fit, in the words of Rust. The axis ``heads`` is 1 or 2."""
    row = 3 - heads
    for tensor, what, value, other, expected in (
        *((("k", "batch", k.shape[0], "q", q.shape[0]),) if same_batch else ()),
        ("v", "batch", v.shape[0], "k", k.shape[0]),
        ("k", "head_dim", k.shape[3], "q", q.shape[3]),
        ("v", "heads", v.shape[heads], "k", k.shape[heads]),
        ("v", "sequence length", v.shape[row], "k", k.shape[row]),
    ):
        if value != expected:
            raise ArgumentError(f"{tensor} has {what} = {value}, but {other} has {expected}; they must be equal")
    heads_q, heads_k = q.shape[heads], k.shape[heads]
    if heads_q % heads_k if heads_k else heads_q:
        raise invalid("heads_q", heads_q, f"a multiple of heads_kv = {heads_k}")
