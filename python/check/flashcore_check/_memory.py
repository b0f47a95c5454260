"""The memory of a launch: which buffers its pointers are in, and their bytes."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

from . import _uninitialised


@dataclass
class Buffer:
    """Memory of this process that one launch sees as a buffer."""

    name: str
    base: int
    bytes: int
    initialised: bool = True
    #: Keeps the memory alive while the launch runs.
    owner: Any = None

    def view(self) -> memoryview:
        """The bytes in place."""
        return memoryview((ctypes.c_char * self.bytes).from_address(self.base)).cast("B")


@dataclass
class Memory:
    """The buffers of one launch. Tensors with one storage share a buffer, as they share memory."""

    buffers: list[Buffer] = field(default_factory=list)
    addresses: list[dict[str, int]] = field(default_factory=list)

    def argument(self, name: str, value: Any) -> dict[str, Any]:
        """The argument for a pointer: a tensor, an object with ``data_ptr``, an address or ``None``."""
        base = getattr(value, "base", None)
        if not hasattr(value, "data_ptr") and hasattr(base, "data_ptr"):
            value = base
        address = _address_of(value)
        if address is None or address == 0:
            return {"u64": 0}
        if not isinstance(address, int):
            raise TypeError(f"argument {name} is {type(value).__name__}; expected a tensor or an address")
        index = self._holding(address)
        if index is None:
            index = self._add(name, value, address)
        return {"buffer": {"index": index, "offset": address - self.buffers[index].base}}

    def known(self, name: str, address: int) -> dict[str, Any] | None:
        """The argument for an address in memory that a program asked for; ``None`` for another number."""
        if self._holding(address) is None and _uninitialised.storage_at(address) is None:
            return None
        return self.argument(name, address)

    def _holding(self, address: int) -> int | None:
        for index, buffer in enumerate(self.buffers):
            if buffer.base <= address < buffer.base + buffer.bytes:
                return index
        return None

    def _add(self, name: str, value: Any, address: int) -> int:
        owner = storage_of(value)
        if owner is None:
            owner = _uninitialised.storage_at(address)
        if owner is None:
            raise TypeError(
                f"argument {name} points to {address:#x}, which is in no tensor that this launch knows; "
                "pass the tensor itself"
            )
        base, size = owner.data_ptr(), owner.nbytes()
        written = not _uninitialised.is_unwritten(value, owner)
        self.buffers.append(Buffer(name, base, size, written, owner))
        index = len(self.buffers) - 1
        self._follow(index, value)
        return index

    def _follow(self, index: int, value: Any) -> None:
        """Finds addresses of tensors among 64-bit integers: tables of pointers."""
        buffer = self.buffers[index]
        if not buffer.initialised or str(getattr(value, "dtype", "")) not in ("torch.int64", "torch.uint64"):
            return
        known = _uninitialised.asked_addresses()
        if not known:
            return
        starts = [start for start, _ in known]
        words = buffer.view()[: buffer.bytes // 8 * 8].cast("Q")
        if len(words) == 0 or max(words) < starts[0]:
            return
        for at, word in enumerate(words):
            place = bisect.bisect_right(starts, word) - 1
            if place < 0 or word >= known[place][1]:
                continue
            to = self.argument(f"{buffer.name}[{at}]", word)["buffer"]
            self.addresses.append({"buffer": index, "at": 8 * at, "to": to["index"], "offset": to["offset"]})

    def header(self) -> dict[str, Any]:
        """The part of the request that describes the buffers."""
        described = [{"name": b.name, "bytes": b.bytes, "initialised": b.initialised} for b in self.buffers]
        return {"buffers": described, "addresses": self.addresses}

    def contents(self) -> list[memoryview]:
        """The bytes of the buffers that have contents."""
        return [buffer.view() for buffer in self.buffers if buffer.initialised]

    def store(self, outputs: dict[int, bytes]) -> None:
        """Writes the buffers that the launch changed back into the memory of this process."""
        for index, data in outputs.items():
            self.buffers[index].view()[:] = data


def _address_of(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if hasattr(value, "__array_interface__"):
        return value.__array_interface__["data"][0]
    return value


def storage_of(value: Any) -> Any | None:
    """The storage of a tensor."""
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        # A wrapper around an address may return itself.
        return storage if hasattr(storage, "nbytes") else None
    if hasattr(value, "__array_interface__"):
        return _ArrayStorage(value)
    return None


class _ArrayStorage:
    """A NumPy array as a storage: the whole memory that its views share."""

    def __init__(self, array: Any) -> None:
        while getattr(array, "base", None) is not None and hasattr(array.base, "__array_interface__"):
            array = array.base
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def nbytes(self) -> int:
        return int(self.array.nbytes)
