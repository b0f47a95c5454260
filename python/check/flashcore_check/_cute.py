"""CuTe DSL without a GPU: its compiler makes PTX as for one, and its launches come here.

The host code of a kernel is compiled, too. It calls the CUDA runtime by functions of a library of the CuTe
DSL; a stand-in for that library is put before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _device, _uninitialised
from ._driver import Function, Grid, UnsupportedLaunch, run
from ._standin import Library

#: The oldest and the newest version of nvidia-cutlass-dsl that this package was tried with.
OLDEST, NEWEST = (4, 8), (4, 8)
_FAILED = 719  # cudaErrorLaunchFailure
#: Attributes of a launch in ``cudaLaunchConfig_t``.
_COOPERATIVE, _CLUSTER, _OVERLAPPING = 2, 4, 6
_GPU = 2  # kDLCUDA
#: Functions that need no work here, and functions that are refused.
_NOTHING = (
    "cudaFuncSetAttribute",
    "cudaKernelSetAttributeForDevice",
    "cudaSetDevice",
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "cudaEventRecord",
    "cudaLibraryUnload",
    "cuLibraryUnload",
)
_REFUSED = (
    "cudaLaunchKernel",
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaFree",
    "cudaFreeAsync",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaMemset",
    "cudaMemsetAsync",
    "cudaGraphLaunch",
    "cudaStreamBeginCapture",
    "cuLibraryGetGlobal",
    "cudaLibraryGetGlobal",
    "cuLibraryGetManaged",
    "cudaLibraryGetManaged",
    "cuTensorMapEncodeTiled",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class UnsupportedCute(RuntimeError):
    """A version of the CuTe DSL that this package does not support."""


def support(version: str) -> str | None:
    """What to say about a version of nvidia-cutlass-dsl; ``None`` if it was tried.

    Raises:
        UnsupportedCute: the version is older than the oldest that works.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    oldest, newest = (".".join(map(str, tried)) for tried in (OLDEST, NEWEST))
    if number < OLDEST:
        raise UnsupportedCute(f"nvidia-cutlass-dsl {version} is not supported: expected {oldest} or newer")
    if number > NEWEST:
        return f"nvidia-cutlass-dsl {version} was not tried with this version; the newest that was is {newest}"
    return None


class _Runtime:
    """The functions of the CUDA runtime that compiled host code calls."""

    def __init__(self, dump: Path) -> None:
        self._dump = dump
        self._functions: list[Function] = []
        #: What a launch raised. Compiled code between here and the caller knows error codes only.
        self.raised: BaseException | None = None
        pointer = _POINTER
        signatures: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            **{f"_{name}": (_refusing(name), ()) for name in _REFUSED},
            **{f"_{name}": (_nothing, ()) for name in _NOTHING},
            "_cudaLaunchKernelEx": (self._launch, (pointer, pointer, pointer)),
            "_cudaGetDevice": (_store_int(0), (pointer,)),
            "_cuDeviceGet": (_store_int(0), (pointer,)),
            "_cudaGetDeviceCount": (_store_int(1), (pointer,)),
            "_cudaDeviceGetAttribute": (self._attribute, (pointer, _INT, _INT)),
            "_cuKernelGetAttribute": (_store_int(0), (pointer,)),
            "cuda_dialect_init_library_once": (self._init_once, (pointer, pointer, pointer, pointer)),
            "cuda_dialect_unload_library_once": (_nothing, ()),
        }
        for api in ("cu", "cuda"):
            signatures[f"_{api}LibraryLoadData"] = (_store_int(1), (pointer,))
            signatures[f"_{api}LibraryGetKernel"] = (self._get_kernel, (pointer, pointer, ctypes.c_char_p))
        functions = {
            name: ctypes.CFUNCTYPE(_INT, *types)(self._caught(called)) for name, (called, types) in signatures.items()
        }
        self.library = Library(functions)

    def _caught(self, called: Callable[..., Any]) -> Callable[..., int]:
        def safe(*args: Any) -> int:
            try:
                called(*args)
            except BaseException as error:
                self.raised = error
                return _FAILED
            return 0

        return safe

    def calling(self, called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls compiled code, and raises what a launch inside raised in place of its error."""
        __tracebackhide__ = True
        self.raised = None
        try:
            return called(*args, **kwargs)
        finally:
            raised, self.raised = self.raised, None
            if raised is not None:
                raise raised.with_traceback(None) from None

    def _init_once(self, library: int, init: int, load: int, _: int) -> None:
        place = ctypes.c_uint64.from_address(library)
        if place.value == 0:
            made = ctypes.c_uint64()
            ctypes.CFUNCTYPE(_INT, _POINTER)(init)(ctypes.addressof(made))
            ctypes.CFUNCTYPE(_INT, _POINTER, _INT)(load)(ctypes.addressof(made), 0)
            place.value = made.value

    def _attribute(self, value: int, attribute: int, _: int) -> None:
        ctypes.c_int.from_address(value).value = _device.attribute(attribute)

    def _get_kernel(self, kernel: int, _: int, name: bytes) -> None:
        files = sorted(self._dump.glob("*.ptx"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in files:
            # The dump ends with zeros.
            function = Function.of(file.read_text().rstrip("\0"), name.decode())
            if function is not None:
                self._functions.append(function)
                ctypes.c_uint64.from_address(kernel).value = len(self._functions)
                return
        raise RuntimeError(f"the CuTe DSL kept no PTX of {name.decode()}")

    def _launch(self, config: int, kernel: int, parameters: int) -> None:
        function = self._functions[kernel - 1]
        *extents, shared, _, attributes, count = struct.unpack("<6IQQQI", ctypes.string_at(config, 52))
        grid = Grid(extents[:3], extents[3:], shared)
        for at in range(attributes, attributes + 72 * count, 72):
            kind, *value = struct.unpack("<I4x3I", ctypes.string_at(at, 20))
            if kind == _CLUSTER:
                grid.cluster = value
            elif kind == _COOPERATIVE:
                grid.cooperative = bool(value[0])
            elif kind == _OVERLAPPING:
                grid.overlapping = bool(value[0])
        run(function, grid, _numbers("Q", len(function.parameters), parameters))


def _nothing(*_: Any) -> None:
    """A function whose work is done when the call before it returns, or that changes times only."""


def _numbers(kind: str, count: int, address: int) -> tuple[int, ...]:
    """Numbers of C at an address."""
    return struct.unpack(f"<{count}{kind}", ctypes.string_at(address, count * struct.calcsize(f"<{kind}")))


def _store_int(number: int) -> Callable[..., None]:
    def store(to: int, *_: Any) -> None:
        ctypes.c_int.from_address(to).value = number

    return store


def _refusing(name: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise UnsupportedLaunch(f"the CuTe DSL calls {name}, which is not emulated")

    return refuse


class _OnGpu:
    """A tensor that says by DLPack that it is in the memory of a GPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _GPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        import torch

        capsule = torch._C._to_dlpack(self._tensor.detach())
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = _POINTER, [ctypes.py_object, ctypes.c_char_p]
        tensor = get(capsule, b"dltensor")
        # After the address of the data.
        struct.pack_into("<ii", (ctypes.c_char * 8).from_address(tensor + 8), 0, _GPU, 0)
        return capsule


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and type(value).__name__ != "FakeTensor"


def _given(value: Any) -> Any:
    """An argument of a compiled function, with each tensor in the memory of a GPU."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_given, value)) if type(value) in (tuple, list) else type(value)(*map(_given, value))
    if not _is_tensor(value):
        return value
    import tvm_ffi

    _uninitialised.note_asked(value)
    return tvm_ffi.from_dlpack(_OnGpu(value))


class Patch:
    """Makes the emulator the device of the CuTe DSL, until :meth:`undo`."""

    def __init__(self) -> None:
        self.note = support(importlib.metadata.version("nvidia-cutlass-dsl"))
        self._undo: list[Callable[[], None]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="flashcore-check-")
        major, minor = _device.capability()
        self._runtime = _Runtime(Path(self._folder.name))
        for name, value in (
            ("ARCH", f"sm_{major}{minor}" + ("a" if major >= 9 else "")),
            ("KEEP", "ptx"),
            ("LINEINFO", "1"),
            ("DUMP_DIR", self._folder.name),
            # A function from a file has no PTX.
            ("DISABLE_FILE_CACHING", "1"),
        ):
            self._environment(f"CUTE_DSL_{name}", value)
        from cutlass.base_dsl import env_manager
        from cutlass.cutlass_dsl import CuTeDSL

        own = env_manager.get_prefix_dsl_libs("CUTE_DSL")
        libraries = os.pathsep.join(filter(None, (str(self._runtime.library.path), own)))
        self._environment("CUTE_DSL_LIBS", libraries)
        # The CuTe DSL keeps what it once read of the environment.
        env_manager.get_str_env_var.cache_clear()
        self._undo.append(env_manager.get_str_env_var.cache_clear)
        self._set(CuTeDSL._get_dsl().envar, "shared_libs", libraries)
        # FlashAttention 4 loads the library of the CuTe DSL for all; the one that is loaded first counts.
        ctypes.CDLL(str(self._runtime.library.path), mode=ctypes.RTLD_GLOBAL)
        self._functions()

    def _environment(self, name: str, value: str) -> None:
        before = os.environ.get(name)
        os.environ[name] = value

        def restore() -> None:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

        self._undo.append(restore)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _functions(self) -> None:
        from cutlass.base_dsl import jit_executor
        from cutlass.cute import runtime
        from cutlass.cutlass_dsl import cuda_jit_executor

        runs = self._runtime

        def wrapped(called: Callable[..., Any], convert: Callable[[Any], Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                __tracebackhide__ = True
                kwargs = {name: convert(value) for name, value in kwargs.items()}
                return runs.calling(called, self, *map(convert, args), **kwargs)

            return call

        executor = jit_executor.JitExecutor
        self._set(executor, "run_compiled_program", wrapped(executor.run_compiled_program, lambda arg: arg))
        with contextlib.suppress(ImportError):
            from cutlass.cutlass_dsl import tvm_ffi_provider

            for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
                owner = getattr(tvm_ffi_provider, name)
                self._set(owner, "__call__", wrapped(owner.__call__, _given))
        make = runtime._Tensor.__init__

        def made(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
            if _is_tensor(tensor):
                _uninitialised.note_asked(tensor)
                tensor = _OnGpu(tensor)
            make(self, tensor, *args, **kwargs)

        self._set(runtime._Tensor, "__init__", made)
        compiled = cuda_jit_executor.CudaDialectJitCompiledFunction
        self._set(compiled, "num_devices", property(lambda _: 1))
        self._set(cuda_jit_executor.CudaDialectJitModule, "unload", lambda module: None)

    def undo(self) -> None:
        """Gives the CuTe DSL its own functions again."""
        while self._undo:
            self._undo.pop()()
