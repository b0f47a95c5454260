"""Launches as a driver sees them: a function of a module of PTX, and the addresses of its parameters."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ._launch import described
from ._memory import Memory
from ._session import current

_TYPE = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([bufs]\d+)\b[^,\[]*(?:\[(\d+)\])?")
#: Bytes of a tensor map, and its alignment.
_MAP_BYTES, _MAP_ALIGN = 128, 64
#: Extents from this on stand for any length. CUTLASS and Triton use 2^30 and 2^31 - 1.
_UNBOUNDED = 1 << 30
#: Elements by their number in a tensor map, as ``tensormap.replace`` of PTX counts them.
_ELEMENTS = ("u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "f32", "f64", "bf16", "f32", "f32")
_SWIZZLES = ("none", "32", "64", "128")


class UnsupportedLaunch(NotImplementedError):
    """A launch needs what the emulator does not have."""


@dataclass(frozen=True)
class Function:
    """An entry of a module."""

    name: str
    ptx: str
    #: Bytes of each parameter, and whether it is a struct.
    parameters: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, ptx: str, name: str) -> Function | None:
        """The entry of this name, if the module has it."""
        found = re.search(rf"\.entry\s+{re.escape(name)}\s*(?:\((.*?)\))?\s*[.{{]", ptx, re.DOTALL)
        if found is None:
            return None
        given = []
        for kind, length in _PARAMETER.findall(found[1] or ""):
            size = int(kind[1:]) // 8
            given.append((size * int(length), True) if length else (size, False))
        return cls(name, ptx, tuple(given))


@dataclass
class Grid:
    """The extents of a launch, and what a driver is told beside them."""

    grid: Sequence[int]
    block: Sequence[int]
    shared: int = 0
    cluster: Sequence[int] = (1, 1, 1)
    cooperative: bool = False
    overlapping: bool = False


@dataclass(frozen=True)
class TensorMap:
    """A tensor map from its bytes in Hopper's format, of which the first half has all that is known here."""

    address: int
    element: str
    swizzle: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes) -> TensorMap | None:
        """The map, if the bytes can be one."""
        words = struct.unpack_from("<16I", data)
        kind, rank = words[2] >> 7 & 0xF, (words[2] >> 4 & 7) + 1
        # Hopper's version, no interleaving, and steps of one element.
        if words[2] & 0xF != 2 or rank > 5 or kind >= len(_ELEMENTS) or words[2] >> 11 & 3 or words[13] & 0x7FFF:
            return None
        boxes = struct.unpack_from("<5B", data, 55)
        return cls(
            struct.unpack_from("<Q", data)[0],
            _ELEMENTS[kind],
            _SWIZZLES[words[2] >> 13 & 3],
            tuple(word + 1 for word in words[8 : 8 + rank]),
            tuple(16 * word for word in words[3 : 2 + rank]),
            tuple(box + 1 for box in boxes[:rank]),
        )

    def described(self, buffer: dict[str, int], before: int = 0) -> dict[str, Any]:
        """The map in a request, on the buffer that holds the byte that lies ``before`` bytes behind its address."""
        given = {name: list(getattr(self, name)) for name in ("extents", "strides", "box")}
        place = {"buffer": buffer["index"], "offset": (buffer["offset"] - before) % 2**64}
        wraps = max(self.extents) >= _UNBOUNDED
        return {**place, "element": self.element, "swizzle": self.swizzle, "wraps": wraps, **given}

    def shifts(self) -> Iterator[int]:
        """Bytes from the map's address to a tensor along a dimension that stands for any length: a coordinate
        counts from the end of this dimension, so that the hardware drops rows beyond a sequence."""
        yield 0
        for extent, stride in zip(self.extents[1:], self.strides):
            if extent >= _UNBOUNDED:
                yield extent * stride


def run(function: Function, grid: Grid, pointers: Sequence[int]) -> None:
    """Runs a launch whose parameters are at these addresses."""
    __tracebackhide__ = True
    session = current()
    if session is None:
        raise RuntimeError(f"{function.name} was loaded for flashcore-check, which has ended")
    memory = Memory()
    maps: list[dict[str, Any]] = []
    args = []
    for index, ((size, is_struct), pointer) in enumerate(zip(function.parameters, pointers)):
        data = ctypes.string_at(pointer, size)
        fields = list(_fields(memory, maps, f"param{index}", data))
        args.append({"struct": {"bytes": size, "fields": fields}} if is_struct else fields[0][1])
    made = described(
        function.name,
        grid.grid,
        grid.block,
        args,
        shared=grid.shared,
        cluster=grid.cluster,
        cooperative=grid.cooperative,
        overlapping=grid.overlapping,
        maps=maps,
    )
    session.run(function.name, function.ptx, made, memory)


def _fields(memory: Memory, maps: list[dict[str, Any]], name: str, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The value of a parameter by offset: tensor maps, addresses of known memory, and numbers."""
    at = 0
    while at < len(data):
        size = next(size for size in (8, 4, 2, 1) if at % size == 0 and at + size <= len(data))
        bits = int.from_bytes(data[at : at + size], "little")
        place = f"{name}+{at}" if at else name
        given = memory.known(place, bits) if size == 8 else None
        is_aligned = at % _MAP_ALIGN == 0 and at + _MAP_BYTES <= len(data)
        tensor_map = TensorMap.of(data[at : at + _MAP_BYTES]) if is_aligned else None
        for shift in tensor_map.shifts() if tensor_map else ():
            tensor = memory.known(place, bits + shift)
            if tensor and tensor_map:
                maps.append(tensor_map.described(tensor["buffer"], shift))
                given, size = {"map": len(maps) - 1}, _MAP_BYTES
                break
        yield at, given or {_TYPE[size]: bits}
        at += size
