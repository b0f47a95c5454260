"""A shared library whose functions are functions of Python, for programs that look a driver up by name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PAGE = 4096
#: Machine numbers of ELF, and the instructions that jump to the address behind them.
_MACHINES = {
    "x86_64": (62, bytes.fromhex("ff25020000006690")),  # jmp [rip + 2]; nop
    "aarch64": (183, bytes.fromhex("5000005800021fd6")),  # ldr x16, #8; br x16
}


class UnsupportedMachine(RuntimeError):
    """No stand-in for a driver can be made on this machine."""


def _hash(name: bytes) -> int:
    """The hash of the System V ABI for the names of symbols."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value & 0xFFFFFFFF


def library_image(symbols: Mapping[str, int], soname: str = "") -> bytes:
    """An ELF library with a function for each symbol, which jumps to an address of this process.

    A program that asks for a library by the name ``soname`` gets this one, if this one is loaded already.
    """
    found = _MACHINES.get(platform.machine())
    if found is None or os.name != "posix":
        raise UnsupportedMachine(
            f"launches of this library are caught on Linux on {' and '.join(_MACHINES)}, not on {platform.machine()}"
        )
    machine, jump = found
    names = [name.encode() for name in symbols]
    strings = b"\0" + b"".join(name + b"\0" for name in names)
    soname_at = len(strings)
    strings += soname.encode() + b"\0"
    strings += b"\0" * (-len(strings) % 8)
    starts, at = [], 1
    for name in names:
        starts.append(at)
        at += len(name) + 1
    symbols_at = 64 + 3 * 56
    strings_at = symbols_at + 24 * (len(names) + 1)
    hash_at = strings_at + len(strings)
    # One bucket with a chain of all symbols.
    chain = [*range(2, len(names) + 1), 0] if names else []
    table = struct.pack(f"<{4 + len(chain)}I", 1, len(names) + 1, min(1, len(names)), 0, *chain)
    code_at = -(-(hash_at + len(table)) // 16) * 16
    code = b"".join(jump + struct.pack("<Q", address) for address in symbols.values())
    entries = b"\0" * 24 + b"".join(
        # A global function in section 1, which need not exist.
        struct.pack("<IBBHQQ", start, 0x12, 0, 1, code_at + 16 * index, 16)
        for index, start in enumerate(starts)
    )
    read_only = code_at + len(code)
    dynamic_at = -(-read_only // _PAGE) * _PAGE
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            *(((14, soname_at),) if soname else ()),
            *((4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0)),
        )
    )
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)

    def segment(kind: int, flags: int, offset: int, size: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, align)

    header += segment(1, 5, 0, read_only, _PAGE)
    header += segment(1, 6, dynamic_at, len(dynamic), _PAGE) + segment(2, 6, dynamic_at, len(dynamic), 8)
    image = header + entries + strings + table
    return image.ljust(code_at, b"\0") + code.ljust(dynamic_at - code_at, b"\0") + dynamic


class Library:
    """A library in a file of its own, for as long as this object lives."""

    def __init__(self, functions: Mapping[str, Any], soname: str = "") -> None:
        #: Callbacks of ctypes, which must outlive their last call.
        self.functions = dict(functions)
        addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in functions.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="flashcore-check-")
        self.path = Path(self._folder.name) / (soname or "libflashcore_standin.so")
        self.path.write_bytes(library_image(addresses, soname))
