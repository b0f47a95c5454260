"""Tensors that were allocated and never written, and tensors whose addresses were asked for.

A tensor of ``torch.empty`` is filled with ones in every bit, a NaN in each float format. As long as all its
bytes are ones and no operation of PyTorch has written it, a kernel that reads it reads uninitialised memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

#: By the address of the storage: the tensor, and how often PyTorch had written it.
_allocated: dict[int, tuple[weakref.ref[Any], int]] = {}
#: Storages of which a program asked for an address, by the first one. PyTorch keeps the Python object of a
#: storage as long as a tensor uses the storage.
_asked: dict[int, weakref.ref[Any]] = {}


def clear() -> None:
    """Forgets all tensors."""
    _allocated.clear()
    _asked.clear()


def note_allocated(tensor: Any) -> Any:
    """Fills a new tensor with ones in every bit, and remembers it."""
    try:
        storage = tensor.untyped_storage()
        if type(tensor).__name__ == "FakeTensor" or storage.nbytes() == 0 or storage.data_ptr() == 0:
            return tensor
        ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
        _allocated[storage.data_ptr()] = (weakref.ref(tensor), tensor._version)
    except (RuntimeError, NotImplementedError):
        # A meta, sparse or inference tensor.
        pass
    return tensor


def is_unwritten(tensor: Any, storage: Any) -> bool:
    """Whether nothing wrote the memory of a tensor since it was allocated."""
    noted = _allocated.pop(storage.data_ptr(), None)
    if noted is None:
        return False
    allocated, version = noted[0](), noted[1]
    if allocated is None or not hasattr(tensor, "_version"):
        return False
    try:
        if allocated._version != version:
            return False
    except RuntimeError:
        return False
    data = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
    return data.tobytes().count(0xFF) == storage.nbytes()


def note_asked(tensor: Any) -> None:
    """Remembers a tensor whose address a program asked for, since it may become an element of a table."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = tensor.untyped_storage()
        _asked[storage.data_ptr()] = weakref.ref(storage)


def note_memory(storage: Any) -> None:
    """Remembers memory that a program knows by its address alone."""
    _asked[storage.data_ptr()] = weakref.ref(storage)


def asked_addresses() -> list[tuple[int, int]]:
    """The first address and the end of each storage that is known by its address, in order."""
    ranges = []
    for base, storage in list(_asked.items()):
        alive = storage()
        if alive is None or alive.data_ptr() != base:
            del _asked[base]
        else:
            ranges.append((base, base + alive.nbytes()))
    return sorted(ranges)


def storage_at(address: int) -> Any | None:
    """The storage that holds an address that a program asked for."""
    for base, end in asked_addresses():
        if base <= address < end:
            return _asked[base]()
    return None
