"""The emulator as the device of numba-cuda: kernels compile to PTX, and device arrays are arrays of NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import _device
from ._launch import described, number
from ._memory import Memory
from ._session import current

#: The versions of numba-cuda that this package was tried with.
TRIED = "0.30"


class DeviceArray(np.ndarray):
    """A device array of numba in the memory of this process."""

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
        """A copy, or ``ary`` with the elements."""
        if ary is None:
            return np.array(self)
        ary[...] = self
        return ary

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        """Takes the elements of ``ary``."""
        self[...] = ary


def _device_array(shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C", stream: Any = 0) -> Any:
    if strides is not None:
        raise NotImplementedError("device arrays with strides are not emulated by flashcore-check")
    made = np.empty(shape, dtype, order=order).view(DeviceArray)  # type: ignore[call-overload]
    ctypes.memset(made.ctypes.data, 0xFF, made.nbytes)
    return made


def _to_device(obj: Any, stream: Any = 0, copy: bool = True, to: Any = None) -> Any:
    if to is None:
        to = np.array(obj).view(DeviceArray)
    elif copy:
        to[...] = obj
    return to


@contextlib.contextmanager
def _pinned(*_: Any) -> Iterator[None]:
    yield


class _Stream:
    handle = 0

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def auto_synchronize(self) -> Iterator[_Stream]:
        yield self


def _functions() -> dict[str, Any]:
    """What replaces functions of ``numba.cuda``."""
    host = lambda shape, dtype=np.float64, strides=None, order="C", **_: np.zeros(shape, dtype, order=order)  # noqa: E731
    return {
        "is_available": lambda: True,
        "to_device": _to_device,
        "device_array": _device_array,
        "device_array_like": lambda ary, stream=0: _device_array(ary.shape, ary.dtype),
        "pinned_array": host,
        "mapped_array": host,
        "managed_array": host,
        "pinned": _pinned,
        "synchronize": lambda: None,
        "stream": _Stream,
        "default_stream": _Stream,
        "is_cuda_array": lambda obj: isinstance(obj, DeviceArray),
    }


class _Configured:
    """A kernel with a grid."""

    def __init__(self, dispatcher: Any, grid: Any, block: Any, stream: Any = 0, sharedmem: int = 0) -> None:
        self.dispatcher, self.sharedmem = dispatcher, int(sharedmem)
        self.grid, self.block = _numbers(grid), _numbers(block)

    def __call__(self, *args: Any) -> None:
        __tracebackhide__ = True
        from numba import cuda

        session = current()
        name = self.dispatcher.py_func.__name__
        if session is None:
            raise RuntimeError(f"{name} was launched for flashcore-check, which has ended")
        types = tuple(self.dispatcher.typeof_pyval(_plain(arg)) for arg in args)
        known = vars(self.dispatcher).setdefault("_flashcore_ptx", {})
        key = (types, _device.capability())
        if key not in known:
            options = self.dispatcher.targetoptions
            known[key], _ = cuda.compile_ptx(
                self.dispatcher.py_func,
                types,
                cc=_device.capability(),
                lineinfo=True,
                fastmath=bool(options.get("fastmath", False)),
            )
        ptx = known[key]
        memory = Memory()
        given = [
            part for at, (kind, arg) in enumerate(zip(types, args)) for part in _parts(memory, f"arg{at}", kind, arg)
        ]
        entry = re.search(r"\.entry\s+([\w$]+)", ptx)
        assert entry is not None
        launch = described(entry[1], self.grid, self.block, given, shared=self.sharedmem)
        session.run(name, ptx, launch, memory)


def _numbers(given: Any) -> Sequence[int]:
    return tuple(map(int, given)) if isinstance(given, (tuple, list)) else (int(given),)


def _plain(arg: Any) -> Any:
    return np.asarray(arg) if isinstance(arg, DeviceArray) else arg


def _parts(memory: Memory, name: str, kind: Any, arg: Any) -> Iterator[dict[str, Any]]:
    """The parameters of one argument, as numba's ``_prepare_args`` orders them."""
    from numba.cuda import types

    if isinstance(kind, types.Array):
        yield from (number("uint64", 0), number("uint64", 0))
        yield from (number("int64", arg.size), number("int64", arg.itemsize))
        yield memory.argument(name, arg)
        for extent in (*arg.shape, *arg.strides):
            yield number("int64", extent)
    elif isinstance(kind, (types.Integer, types.Float)):
        yield number(str(kind), arg)
    elif isinstance(kind, types.Boolean):
        yield number("uint8", int(arg))
    elif isinstance(kind, types.Complex):
        half = "float32" if kind == types.complex64 else "float64"
        yield from (number(half, arg.real), number(half, arg.imag))
    elif isinstance(kind, types.BaseTuple):
        for at, (inner, element) in enumerate(zip(kind, arg)):
            yield from _parts(memory, f"{name}[{at}]", inner, element)
    else:
        raise NotImplementedError(
            f"argument {name} has the type {kind}, which flashcore-check does not pass to a kernel"
        )


class Patch:
    """Makes the emulator the device of numba-cuda, until :meth:`undo`."""

    def __init__(self) -> None:
        import numba_cuda
        from numba import cuda
        from numba.cuda.dispatcher import CUDADispatcher

        self.note = None
        if not numba_cuda.__version__.startswith(f"{TRIED}."):
            self.note = f"numba-cuda {numba_cuda.__version__} was not tried with this version; {TRIED} was"
        self._undo: list[tuple[Any, str, Any]] = []
        for name, function in _functions().items():
            self._set(cuda, name, function)
        self._set(CUDADispatcher, "configure", _Configured)
        self._set(CUDADispatcher, "__getitem__", lambda kernel, launch: _Configured(kernel, *launch))
        self._set(CUDADispatcher, "forall", _forall)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Gives numba-cuda its own functions again."""
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)


def _forall(dispatcher: Any, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Any:
    block = tpb or 128
    return _Configured(dispatcher, max(1, -(-ntasks // block)), block, stream, sharedmem)
