"""CuPy without a GPU: its arrays are arrays of NumPy, and its raw kernels run in the emulator.

CuPy has the functions of NumPy under NumPy's names, so NumPy's own serve the tests. NVRTC compiles the source
of raw kernels, as for CuPy on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import _device
from ._driver import Function, UnsupportedLaunch
from ._launch import described
from ._memory import Memory
from ._session import current

#: The version of CuPy that this package was tried with.
TRIED = "14"
#: The parts of CuPy with functions of a part of NumPy.
_PARTS = ("", "random", "linalg", "fft", "testing")
_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


class DeviceArray(np.ndarray):
    """An array of CuPy in the memory of this process."""

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        """A copy in NumPy, or ``out`` with the elements."""
        if out is None:
            return np.array(self)
        out[...] = self
        return out

    def set(self, array: Any, stream: Any = None) -> None:
        """Takes the elements of ``array``."""
        self[...] = array

    @property
    def data(self) -> Any:
        """The memory: ``array.data.ptr`` is its address."""
        return SimpleNamespace(ptr=self.ctypes.data)


def _on_device(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_on_device, value))
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value.view(DeviceArray) if isinstance(value, np.ndarray) else value


def _of_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy whose results are arrays of the device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("stream", None)
        return _on_device(function(*args, **kwargs))

    return call


def _empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes arrays without contents: ones in every bit, a NaN in each float format."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        made.reshape(-1, order="A").view(np.uint8).fill(0xFF)
        return made.view(DeviceArray)

    return call


def _asnumpy(array: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    return _on_device(np.asarray(array)).get(out=out)


class RawModule:
    """A module of CUDA C++ or of PTX."""

    #: Files with the sources, to which the lines of findings refer.
    _sources: tempfile.TemporaryDirectory[str] | None = None
    _count = 0

    def __init__(
        self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = (),
        backend: str = "nvrtc", translate_cucomplex: bool = False, enable_cooperative_groups: bool = False,
        name_expressions: Any = None, jitify: bool = False,
    ) -> None:  # fmt: skip
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if translate_cucomplex or jitify or backend != "nvrtc":
            raise UnsupportedLaunch("modules with translate_cucomplex, jitify or the backend nvcc are not emulated")
        self.is_cooperative = enable_cooperative_groups
        self._names: dict[str, str] = {}
        if code is not None:
            self._code, self._options, self._expressions = code, tuple(options), tuple(name_expressions or ())
            return
        text = Path(str(path)).read_bytes()
        if b".version" not in text[:4096]:
            raise UnsupportedLaunch(f"{path} is no PTX; machine code is not emulated")
        self.__dict__["ptx"] = text.decode().rstrip("\0")

    @functools.cached_property
    def ptx(self) -> str:
        """The text of the module."""
        from cupy._core import core
        from cupy.cuda import compiler

        if RawModule._sources is None:
            RawModule._sources = tempfile.TemporaryDirectory(prefix="flashcore-check-")
        RawModule._count += 1
        file = Path(RawModule._sources.name) / f"raw_kernel_{RawModule._count}.cu"
        file.write_text(self._code)
        major, minor = _device.capability()
        arch = f"-arch=compute_{major}{minor}" + ("a" if major >= 9 else "")
        given = tuple(option for option in self._options if not option.lstrip("-").startswith(("arch", "gpu-arch")))
        own = ("-I" + core._get_header_dir_path(), arch, "-lineinfo", "--device-as-default-execution-space")
        program = compiler._NVRTCProgram(self._code, str(file), name_expressions=self._expressions)
        text, names = program.compile((*given, *own))
        self._names = names or {}
        return (text.decode() if isinstance(text, bytes) else str(text)).rstrip("\0")

    def compile(self, log_stream: Any = None) -> None:
        """Compiles the module now."""
        assert self.ptx

    def get_function(self, name: str) -> RawKernel:
        """The kernel of this name, or of this expression."""
        return RawKernel._of(self, name)

    def get_global(self, name: str) -> Any:
        raise UnsupportedLaunch(f"the address of the variable {name} of a module is not emulated")


class RawKernel:
    """A kernel of CUDA C++."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        module = RawModule(
            code=code,
            options=options,
            backend=backend,
            translate_cucomplex=translate_cucomplex,
            enable_cooperative_groups=enable_cooperative_groups,
            jitify=jitify,
        )
        self._module, self.name = module, name
        self.max_dynamic_shared_size_bytes = 0
        self.preferred_shared_memory_carveout = -1

    @classmethod
    def _of(cls, module: RawModule, name: str) -> RawKernel:
        made = cls.__new__(cls)
        made._module, made.name = module, name
        made.max_dynamic_shared_size_bytes, made.preferred_shared_memory_carveout = 0, -1
        return made

    def compile(self, log_stream: Any = None) -> None:
        """Compiles the module now."""
        self._module.compile()

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        __tracebackhide__ = True
        session = current()
        if session is None:
            raise RuntimeError(f"{self.name} was launched for flashcore-check, which has ended")
        ptx = self._module.ptx
        function = Function.of(ptx, self._module._names.get(self.name, self.name))
        if function is None:
            raise ValueError(f"invalid value {self.name!r} for name: the module has no kernel of this name")
        if len(args) != len(function.parameters):
            raise TypeError(f"{self.name} takes {len(function.parameters)} arguments, but {len(args)} were given")
        memory = Memory()
        given = [
            _argument(memory, f"arg{at}", value, size, is_struct)
            for at, (value, (size, is_struct)) in enumerate(zip(args, function.parameters))
        ]
        launch = described(
            function.name, grid, block, given, shared=shared_mem, cooperative=self._module.is_cooperative
        )
        session.run(self.name, ptx, launch, memory)


def _argument(memory: Memory, name: str, value: Any, size: int, is_struct: bool) -> dict[str, Any]:
    """The argument for a parameter of this size. CuPy passes the first bytes of a wider number."""
    if isinstance(value, np.ndarray) and value.ndim and isinstance(value, DeviceArray):
        return memory.argument(name, value)
    if value is None:
        return {"u64": 0}
    if isinstance(value, bool):
        data = struct.pack("=?", value)
    elif isinstance(value, int):
        data = (value & (1 << 64) - 1).to_bytes(8, "little")
    elif isinstance(value, float):
        data = struct.pack("=d", value)
    elif isinstance(value, (complex, np.generic, np.ndarray)):
        data = np.asarray(value).tobytes()
    else:
        raise TypeError(f"Unsupported type {type(value)} of {name}")
    if len(data) < size:
        raise TypeError(f"{name} is {value!r} of {len(data)} bytes, but the kernel takes {size}")
    if is_struct:
        return {"struct": {"bytes": size, "fields": [(at, {"u8": byte}) for at, byte in enumerate(data[:size])]}}
    return {_TYPES[size]: int.from_bytes(data[:size], "little")}


class _Device:
    """The only device."""

    id = 0

    def __init__(self, device: Any = 0) -> None:
        major, minor = _device.capability()
        self.compute_capability = f"{major}{minor}"
        self.attributes = {"MultiProcessorCount": _device.properties().multi_processor_count}
        self.mem_info = _device.memory()

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def use(self) -> _Device:
        return self

    def synchronize(self) -> None:
        pass


class _Stream(_Device):
    """A stream or an event: all work is done when a call returns."""

    ptr = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, event: Any = None) -> Any:
        return event or self

    def wait_event(self, event: Any) -> None:
        pass


def _refused(kind: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedLaunch(f"kernels of cupy.{kind} are not emulated; a RawKernel is")

    return refuse


class Patch:
    """Makes the emulator the device of CuPy, until :meth:`undo`."""

    def __init__(self) -> None:
        import cupy

        self.note = None
        if not cupy.__version__.startswith(f"{TRIED}."):
            self.note = f"CuPy {cupy.__version__} was not tried with this version; {TRIED} was"
        self._undo: list[tuple[Any, str, Any]] = []
        for part in _PARTS:
            self._functions(_part(cupy, part), _part(np, part))
        stream = _Stream()
        for owner, name, value in (
            (cupy, "ndarray", DeviceArray),
            (cupy, "asnumpy", _asnumpy),
            (cupy, "RawKernel", RawKernel),
            (cupy, "RawModule", RawModule),
            (cupy, "get_array_module", lambda *args: cupy if any(isinstance(a, DeviceArray) for a in args) else np),
            (cupy, "is_available", lambda: True),
            *((cupy, kind, _refused(kind)) for kind in ("ElementwiseKernel", "ReductionKernel", "fuse")),
            (cupy.cuda, "is_available", lambda: True),
            (cupy.cuda, "Device", _Device),
            (cupy.cuda, "Stream", _Stream),
            (cupy.cuda, "Event", _Stream),
            (cupy.cuda, "get_current_stream", lambda: stream),
            (cupy.cuda.runtime, "getDeviceCount", lambda: 1),
            (cupy.cuda.runtime, "getDevice", lambda: 0),
            (cupy.cuda.runtime, "deviceSynchronize", lambda: None),
        ):
            self._set(owner, name, value)

    def _functions(self, owner: Any, of_numpy: Any) -> None:
        for name in dir(owner):
            function = getattr(of_numpy, name, None)
            if name.startswith("_") or isinstance(function, type) or not callable(function):
                continue
            with contextlib.suppress(AttributeError):
                wrap = _empty if name in ("empty", "empty_like") else _of_numpy
                self._set(owner, name, wrap(function))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append((owner, name, before))

    def undo(self) -> None:
        """Gives CuPy its own functions again."""
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)


def _part(module: Any, name: str) -> Any:
    return getattr(module, name) if name else module
