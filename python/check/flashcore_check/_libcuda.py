"""A CUDA driver without a GPU for programs that load the driver from C: ``cuda.bindings`` and ``cuda.core``.

Memory of the device is memory of this process, all work is done when a call returns, and a launch runs in the
emulator. A launch with a hazard returns ``CUDA_ERROR_LAUNCH_FAILED``, and the plugin fails its test.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Callable
from typing import Any

from . import _device, _uninitialised
from ._driver import Function, Grid, UnsupportedLaunch, run
from ._standin import Library

SONAME = "libcuda.so.1"
#: Newer than any toolkit, so that none holds its PTX back.
VERSION = 13090
#: CUresult.
_INVALID_VALUE, _NO_BINARY, _INVALID_HANDLE, _NOT_FOUND, _FAILED, _NOT_SUPPORTED = 1, 209, 400, 500, 719, 801
_NAMES = {
    0: "CUDA_SUCCESS",
    _INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    _NO_BINARY: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    _INVALID_HANDLE: "CUDA_ERROR_INVALID_HANDLE",
    _NOT_FOUND: "CUDA_ERROR_NOT_FOUND",
    _FAILED: "CUDA_ERROR_LAUNCH_FAILED",
    _NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
}
#: Types of arguments by a letter: an address or a size, a number, a number without sign, a byte.
_TYPES: dict[str, Any] = {"p": ctypes.c_uint64, "i": ctypes.c_int, "u": ctypes.c_uint32, "b": ctypes.c_uint8}
#: The only context, and streams, events and pools of memory, which have no state.
_CONTEXT, _HANDLE = 0x1000, 0x2000


class _Refused(Exception):
    """The driver's error for a call."""

    def __init__(self, status: int) -> None:
        self.status = status


class _Allocation:
    """Memory of the device."""

    def __init__(self, size: int) -> None:
        self._bytes = ctypes.create_string_buffer(max(size, 1) + 256)
        start = ctypes.addressof(self._bytes)
        self.address, self.size = start + -start % 256, size
        ctypes.memset(self.address, 0xFF, size)

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


def _store(address: int, kind: str, value: Any) -> None:
    if address:
        data = struct.pack(f"<{kind}", value)
        ctypes.memmove(address, data, len(data))


def _storing(kind: str, value: Any) -> Callable[..., None]:
    return lambda to, *_: _store(to, kind, value() if callable(value) else value)


def _storing_each(first: str, one: int, second: str, other: int, skipped: int = 0) -> Callable[..., None]:
    """Stores two numbers at two addresses, behind arguments that are skipped."""

    def store(*args: Any) -> None:
        _store(args[skipped], first, one)
        _store(args[skipped + 1], second, other)

    return store


def _refusing(status: int) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise _Refused(status)

    return refuse


def _nothing(*_: Any) -> None:
    """Work that is done when the call before returns, or that changes times only."""


class Driver:
    """The functions of the driver."""

    def __init__(self) -> None:
        self._memory: dict[int, _Allocation] = {}
        #: Modules by their handle: the PTX. Functions by their handle.
        self._modules: dict[int, str] = {}
        self._functions: dict[int, Function] = {}
        self._texts: dict[str, Any] = {}
        self._current = 0
        calls = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *(_TYPES[kind] for kind in kinds))(self._caught(name, called))
            for name, (kinds, called) in self._table().items()
        }
        self.library = Library(calls, SONAME)
        self._addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in calls.items()}

    def _caught(self, name: str, called: Callable[..., Any]) -> Callable[..., int]:
        def safe(*args: Any) -> int:
            try:
                called(*args)
            except _Refused as refused:
                return refused.status
            except UnsupportedLaunch as error:
                warnings.warn(f"{name}: {error}", RuntimeWarning, stacklevel=2)
                return _NOT_SUPPORTED
            except BaseException:
                # The session has the hazard. The caller knows error codes only.
                return _FAILED
            return 0

        return safe

    def _table(self) -> dict[str, tuple[str, Callable[..., Any]]]:
        """By name, the types of the arguments, and the function."""
        copy = lambda to, source, size, *_: ctypes.memmove(to, source, size)  # noqa: E731
        table: dict[str, tuple[str, Callable[..., Any]]] = {
            "cuDriverGetVersion": ("p", _storing("i", VERSION)),
            "cuDeviceGetCount": ("p", _storing("i", 1)),
            "cuDeviceGet": ("pi", _storing("i", 0)),
            "cuDeviceGetName": ("pii", lambda to, size, _: _store(to, f"{size}s", _device.name().encode()[: size - 1])),
            "cuDeviceGetUuid_v2": ("pi", _storing("16s", b"flashcore-check!")),
            "cuDeviceTotalMem_v2": ("pi", _storing("Q", lambda: _device.memory()[1])),
            "cuDeviceGetAttribute": ("pii", lambda to, which, _: _store(to, "i", _device.attribute(which))),
            "cuDevicePrimaryCtxRetain": ("pi", _storing("Q", _CONTEXT)),
            "cuDevicePrimaryCtxGetState": ("ipp", _storing_each("I", 0, "i", 1, skipped=1)),
            "cuCtxGetCurrent": ("p", lambda to: _store(to, "Q", self._current)),
            "cuCtxSetCurrent": ("p", self._set_current),
            "cuCtxPushCurrent_v2": ("p", self._set_current),
            "cuCtxPopCurrent_v2": ("p", lambda to: _store(to, "Q", self._current)),
            "cuCtxGetDevice": ("p", _storing("i", 0)),
            "cuStreamGetCtx": ("pp", lambda _, to: _store(to, "Q", _CONTEXT)),
            "cuStreamGetPriority": ("pp", lambda _, to: _store(to, "i", 0)),
            "cuStreamGetFlags": ("pp", lambda _, to: _store(to, "I", 1)),
            "cuStreamIsCapturing": ("pp", lambda _, to: _store(to, "i", 0)),
            "cuCtxGetStreamPriorityRange": ("pp", _storing_each("i", 0, "i", 0)),
            "cuMemGetInfo_v2": ("pp", _storing_each("Q", _device.memory()[0], "Q", _device.memory()[1])),
            "cuPointerGetAttribute": ("pip", self._pointer_attribute),
            "cuModuleLoadData": ("pp", self._load),
            "cuModuleLoadDataEx": ("ppupp", self._load),
            "cuLibraryLoadData": ("ppppuppu", self._load),
            "cuModuleGetFunction": ("ppp", self._function),
            "cuLibraryGetKernel": ("ppp", self._function),
            "cuLibraryGetModule": ("pp", lambda to, library: _store(to, "Q", library)),
            "cuKernelGetFunction": ("pp", lambda to, kernel: _store(to, "Q", kernel)),
            "cuKernelGetLibrary": ("pp", lambda to, kernel: _store(to, "Q", kernel)),
            "cuFuncGetAttribute": ("pip", lambda to, *_: _store(to, "i", 0)),
            "cuKernelGetAttribute": ("pipi", lambda to, *_: _store(to, "i", 0)),
            "cuFuncGetParamInfo": ("pppp", self._parameter),
            "cuKernelGetParamInfo": ("pppp", self._parameter),
            "cuLaunchKernel": ("puuuuuuuppp", self._launch),
            "cuLaunchCooperativeKernel": ("puuuuuuupp", lambda *args: self._launch(*args, 0, cooperative=True)),
            "cuLaunchKernelEx": ("pppp", self._launch_ex),
            "cuGetErrorName": ("ip", self._text),
            "cuGetErrorString": ("ip", self._text),
            "cuGetProcAddress_v2": ("ppipp", self._proc_address),
            # NVRTC asks for it, and goes on without it.
            "cuGetExportTable": ("pp", _refusing(_NOT_FOUND)),
        }
        without_work: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("u", ("cuInit",)),
            ("i", ("cuDevicePrimaryCtxRelease_v2",)),
            ("", ("cuCtxSynchronize",)),
            (
                "p",
                (
                    "cuStreamDestroy_v2",
                    "cuStreamSynchronize",
                    "cuStreamQuery",
                    "cuEventSynchronize",
                    "cuEventQuery",
                    "cuEventDestroy_v2",
                    "cuModuleUnload",
                    "cuLibraryUnload",
                    "cuMemPoolDestroy",
                ),
            ),
            ("pp", ("cuEventRecord",)),
            ("ppu", ("cuStreamWaitEvent",)),
            ("pip", ("cuMemPoolSetAttribute",)),
            ("pii", ("cuFuncSetAttribute",)),
            ("iipi", ("cuKernelSetAttribute",)),
        )
        for kinds, names in without_work:
            table.update(dict.fromkeys(names, (kinds, _nothing)))
        making: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("pu", ("cuStreamCreate", "cuEventCreate")),
            ("pui", ("cuStreamCreateWithPriority",)),
            ("pi", ("cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool")),
            ("pp", ("cuMemPoolCreate",)),
        )
        for kinds, names in making:
            table.update(dict.fromkeys(names, (kinds, _storing("Q", _HANDLE))))
        for name in ("cuMemPoolGetAttribute", "cuMemPoolGetAccess"):
            table[name] = ("pip", lambda _, __, to: _store(to, "Q", 0))
        for name in ("cuEventElapsedTime", "cuEventElapsedTime_v2"):
            table[name] = ("ppp", _storing("f", 0.0))
        for name, kinds in (
            ("cuMemAlloc_v2", "pp"),
            ("cuMemAllocHost_v2", "pp"),
            ("cuMemHostAlloc", "ppu"),
            ("cuMemAllocManaged", "ppu"),
            ("cuMemAllocAsync", "ppp"),
            ("cuMemAllocFromPoolAsync", "pppp"),
        ):
            table[name] = (kinds, self._allocate)
        for name, kinds in (("cuMemFree_v2", "p"), ("cuMemFreeHost", "p"), ("cuMemFreeAsync", "pp")):
            table[name] = (kinds, self._free)
        for name in ("cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2", "cuMemcpy"):
            table[name] = ("ppp", copy)
            table[name.replace("_v2", "") + "Async" + ("_v2" if "_v2" in name else "")] = ("pppp", copy)
        for bits, kind in ((8, "b"), (32, "u")):
            for name, more in ((f"cuMemsetD{bits}_v2", ""), (f"cuMemsetD{bits}Async", "p")):
                table[name] = (
                    "p" + kind + "p" + more,
                    lambda to, value, count, *_, size=bits // 8: ctypes.memmove(
                        to, value.to_bytes(size, "little") * count, size * count
                    ),
                )
        return table

    def _set_current(self, context: int) -> None:
        self._current = context

    def _allocate(self, to: int, size: int, *_: Any) -> None:
        made = _Allocation(size)
        self._memory[made.address] = made
        _uninitialised.note_memory(made)
        _store(to, "Q", made.address)

    def _free(self, address: int, *_: Any) -> None:
        if address and self._memory.pop(address, None) is None:
            raise _Refused(_INVALID_VALUE)

    def _pointer_attribute(self, to: int, which: int, address: int) -> None:
        found = _uninitialised.storage_at(address)
        if found is None:
            raise _Refused(_INVALID_VALUE)
        # The context, the kind of memory, the address on the device and on the host.
        kind, value = {1: ("Q", _CONTEXT), 2: ("I", 2), 3: ("Q", address), 9: ("i", 0)}.get(which, ("Q", address))
        _store(to, kind, value)

    def _load(self, to: int, image: int, *_: Any) -> None:
        start = ctypes.string_at(image, 4)
        if start == b"\x7fELF" or start == (0xBA55ED50).to_bytes(4, "little"):
            warnings.warn("a module of machine code is not emulated; compile it to PTX", RuntimeWarning, stacklevel=2)
            raise _Refused(_NO_BINARY)
        handle = 0x10000 + len(self._modules)
        self._modules[handle] = ctypes.string_at(image).decode()
        _store(to, "Q", handle)

    def _function(self, to: int, module: int, name: int) -> None:
        text = self._modules.get(module)
        if text is None:
            raise _Refused(_INVALID_HANDLE)
        function = Function.of(text, ctypes.string_at(name).decode())
        if function is None:
            raise _Refused(_NOT_FOUND)
        handle = 0x1000000 + len(self._functions)
        self._functions[handle] = function
        _store(to, "Q", handle)

    def _parameter(self, handle: int, index: int, offset: int, size: int) -> None:
        parameters = self._functions[handle].parameters
        if index >= len(parameters):
            raise _Refused(_INVALID_VALUE)
        at = 0
        for bytes_of, _ in parameters[:index]:
            at += -at % min(bytes_of, 8) + bytes_of
        _store(offset, "Q", at)
        _store(size, "Q", parameters[index][0])

    def _launch(self, handle: int, *given: int, cooperative: bool = False) -> None:
        shared, _, pointers, extra = given[6:]
        grid = Grid(given[:3], given[3:6], shared, cooperative=cooperative)
        self._run(handle, grid, pointers, extra)

    def _launch_ex(self, config: int, handle: int, pointers: int, extra: int) -> None:
        *extents, shared, _, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        grid = Grid(extents[:3], extents[3:], shared)
        for at in range(attributes, attributes + 72 * count, 72):
            kind, *value = struct.unpack("<I4x3I", ctypes.string_at(at, 20))
            # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION.
            if kind == 2:
                grid.cooperative = bool(value[0])
            elif kind == 4:
                grid.cluster = value
            elif kind == 6:
                grid.overlapping = bool(value[0])
        self._run(handle, grid, pointers, extra)

    def _run(self, handle: int, grid: Grid, pointers: int, extra: int) -> None:
        if extra:
            raise UnsupportedLaunch("parameters in one piece (extra) are not emulated")
        function = self._functions.get(handle)
        if function is None:
            raise _Refused(_INVALID_HANDLE)
        count = len(function.parameters)
        addresses = struct.unpack(f"<{count}Q", ctypes.string_at(pointers, 8 * count)) if count else ()
        run(function, grid, addresses)

    def _text(self, error: int, to: int) -> None:
        name = _NAMES.get(error, f"CUDA error {error}")
        text = self._texts.setdefault(name, ctypes.create_string_buffer(name.encode()))
        _store(to, "Q", ctypes.addressof(text))

    def _proc_address(self, symbol: int, to: int, version: int, flags: int, status: int) -> None:
        name = ctypes.string_at(symbol).decode()
        address = self._addresses.get(f"{name}_v2") or self._addresses.get(name, 0)
        _store(to, "Q", address)
        # CU_GET_PROC_ADDRESS_SUCCESS and CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
        _store(status, "i", 0 if address else 1)
        if not address:
            raise _Refused(_NOT_FOUND)


#: A process loads a driver once.
_driver: Driver | None = None


class Patch:
    """Loads the driver. A process cannot unload it, so that :meth:`undo` leaves it."""

    note = None

    def __init__(self) -> None:
        global _driver
        if _driver is None:
            _driver = Driver()
            ctypes.CDLL(str(_driver.library.path))

    def undo(self) -> None:
        """The library stays: programs keep the addresses of its functions."""
