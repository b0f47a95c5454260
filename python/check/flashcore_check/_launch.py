"""A launch of any PTX on memory of this process."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from typing import Any

from ._memory import Memory
from ._session import Launch, Session, current, set_current

_NUMBERS = {
    "bool": ("u8", "=?", "=B"),
    "int8": ("u8", "=b", "=B"),
    "uint8": ("u8", "=B", "=B"),
    "int16": ("u16", "=h", "=H"),
    "uint16": ("u16", "=H", "=H"),
    "float16": ("u16", "=e", "=H"),
    "int32": ("u32", "=i", "=I"),
    "uint32": ("u32", "=I", "=I"),
    "float32": ("u32", "=f", "=I"),
    "int64": ("u64", "=q", "=Q"),
    "uint64": ("u64", "=Q", "=Q"),
    "float64": ("u64", "=d", "=Q"),
}


def number(dtype: str, value: Any) -> dict[str, int]:
    """The argument for a number of this type, by its bits."""
    if dtype == "bfloat16":
        (bits,) = struct.unpack("=I", struct.pack("=f", float(value)))
        # Rounds to nearest even, except NaN.
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if value == value else bits >> 16 | 0x40
        return {"u16": rounded & 0xFFFF}
    key, given, bits_of = _NUMBERS[dtype]
    if given in ("=e", "=f", "=d"):
        packed = _packed_float(given, float(value))
    elif dtype == "bool":
        packed = struct.pack(given, bool(value))
    else:
        # An integer of the other sign has the same bits.
        size = struct.calcsize(given)
        packed = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return {key: struct.unpack(bits_of, packed)[0]}


def _packed_float(form: str, value: float) -> bytes:
    try:
        return struct.pack(form, value)
    except OverflowError:
        return struct.pack(form, float("inf") if value > 0 else float("-inf"))


def entry_parameters(ptx: str, entry: str) -> int:
    """The number of parameters of an entry."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise ValueError(f"invalid value {entry!r} for entry: the module has no entry of this name")
    return len(re.findall(r"\.param\b", found.group(1)))


def described(
    entry: str, grid: Sequence[int], block: Sequence[int], args: list[dict[str, Any]], *, shared: int = 0,
    cluster: Sequence[int] = (1, 1, 1), cooperative: bool = False, overlapping: bool = False,
    maps: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """The part of a request that describes the launch."""
    return {
        "entry": entry,
        "launch": {
            "grid": _three("grid", grid),
            "cluster": _three("cluster", cluster),
            "block": _three("block", block),
            "dynamic_shared": int(shared),
            "overlapping": overlapping,
        },
        "cooperative": cooperative,
        "maps": list(maps),
        "args": args,
    }


def _three(name: str, extents: Sequence[int]) -> list[int]:
    if isinstance(extents, int):
        extents = (extents,)
    given = [int(extent) for extent in extents]
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise ValueError(f"invalid value {tuple(given)} for {name}: expected 1 to 3 positive numbers")
    return given + [1] * (3 - len(given))


def launch(
    ptx: str,
    entry: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    *,
    shared: int = 0,
    cluster: Sequence[int] = (1, 1, 1),
    cooperative: bool = False,
) -> Launch:
    """Runs an entry of a PTX module in the emulator on tensors and arrays of this process.

    An argument is a CPU tensor of PyTorch, an array of NumPy, a NumPy or ctypes number, or ``None`` for a
    null pointer. Results are stored in the tensors and arrays.

    Raises:
        HazardError: the launch has a hazard.
        IncompleteError: there is no verdict.
    """
    __tracebackhide__ = True
    memory = Memory()
    given = [_argument(memory, f"arg{at}", value) for at, value in enumerate(args)]
    session = current()
    if session is None:
        session = Session()
        set_current(session)
    made = described(entry, grid, block, given, shared=shared, cluster=cluster, cooperative=cooperative)
    return session.run(entry, ptx, made, memory)


def _argument(memory: Memory, name: str, value: Any) -> dict[str, Any]:
    dtype = str(getattr(value, "dtype", ""))
    if dtype in _NUMBERS and getattr(value, "ndim", None) == 0 and not hasattr(value, "data_ptr"):
        return number(dtype, value)
    if isinstance(value, ctypes._SimpleCData):
        kind = "float" if isinstance(value, (ctypes.c_float, ctypes.c_double)) else "int"
        return number(f"{kind}{8 * ctypes.sizeof(value)}", value.value)
    if isinstance(value, (bool, int, float)):
        raise TypeError(
            f"{name} is the Python number {value!r}, whose size is unknown; pass numpy.int32({value!r}), "
            "ctypes.c_float or another number with a size"
        )
    return memory.argument(name, value)
