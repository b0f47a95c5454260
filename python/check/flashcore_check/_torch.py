"""PyTorch with a GPU that does not exist: ``cuda`` tensors are CPU tensors that say they are on ``cuda:0``."""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from . import _device, _uninitialised

_EMPTY = ("empty", "empty_like", "empty_strided")
_METHODS = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)
_EMPTY_METHODS = ("new_empty", "new_empty_strided")


def is_cuda(device: Any) -> bool:
    """Whether a program names the GPU."""
    return (isinstance(device, str) and device.split(":")[0] == "cuda") or getattr(device, "type", None) == "cuda"


def _on_cpu(device: Any) -> Any:
    # An integer is the number of a GPU.
    return "cpu" if is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)) else device


class _Moved(str):
    """The CPU in a call that was changed before: where a mode such as ``torch.device(…)`` sees a call, PyTorch calls
    the changed method again."""


class _Stream:
    """A stream. All work is done when a function returns."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    """An event, with the time of this process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._time - self._time)


#: The state of a generator: its seed and its offset.
_STATE = struct.Struct("<QQ")


class _CudaGenerator:
    """The default generator of the GPU. Its state is a seed and an offset, which programs read."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._offset = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_state(self) -> Any:
        import torch

        return torch.tensor(list(_STATE.pack(self._generator.initial_seed(), self._offset)), dtype=torch.uint8)

    def set_state(self, state: Any) -> None:
        seed, self._offset = _STATE.unpack(bytes(state.tolist()))
        if seed != self._generator.initial_seed():
            self._generator.manual_seed(seed)

    def manual_seed(self, seed: int) -> _CudaGenerator:
        self._generator.manual_seed(seed)
        self._offset = 0
        return self


class _NoGraphs:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("CUDA graphs are not emulated by flashcore-check")


def _answer(value: Any) -> Callable[..., Any]:
    """A function of its own for each name, as TorchDynamo's tables require."""
    return lambda *_, **__: value


def _ignored(_: object) -> None:
    return None


def _cuda_functions(torch: Any) -> dict[str, Any]:
    """What replaces functions of ``torch.cuda``."""
    stream = _Stream()
    generator = torch.default_generator
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": _answer(None),
        "_lazy_call": _answer(None),
        "init": _answer(None),
        "device_count": lambda: 1,
        "current_device": _answer(0),
        "set_device": _answer(None),
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "_DeviceGuard": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: _device.capability(),
        "get_device_name": lambda device=None: _device.name(),
        "get_device_properties": lambda device=None: _device.properties(),
        "get_arch_list": lambda: ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": _answer(None),
        "empty_cache": _answer(None),
        "ipc_collect": _answer(None),
        "manual_seed": lambda seed: _ignored(generator.manual_seed(seed)),
        "manual_seed_all": lambda seed: _ignored(generator.manual_seed(seed)),
        "seed": lambda: _ignored(generator.seed()),
        "seed_all": lambda: _ignored(generator.seed()),
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: _ignored(generator.set_state(state)),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: _ignored(generator.set_state(states[0])),
        "mem_get_info": lambda device=None: _device.memory(),
        "memory_allocated": _answer(0),
        "max_memory_allocated": _answer(0),
        "memory_reserved": _answer(0),
        "max_memory_reserved": _answer(0),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": _answer(None),
        "reset_max_memory_allocated": _answer(None),
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": _answer(None),
        "_exchange_device": _answer(0),
        "_maybe_exchange_device": _answer(0),
        "default_generators": (_CudaGenerator(generator),),
        "Stream": _Stream,
        "ExternalStream": type("ExternalStream", (_Stream,), {}),
        "Event": _Event,
        "CUDAGraph": _NoGraphs,
        "graph": type("graph", (_NoGraphs,), {}),
    }


class Patch:
    """Replaces what shows that there is no GPU, until :meth:`undo`."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._undo: list[tuple[Any, str, bool, Any]] = []
        self._factories()
        self._tensor()
        for name, function in _cuda_functions(torch).items():
            if hasattr(torch.cuda, name):
                self._set(torch.cuda, name, function)
        self._inductor()
        self._others()

    def undo(self) -> None:
        """Gives PyTorch its own functions again."""
        for owner, name, was_own, value in reversed(self._undo):
            if was_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
        self._undo.clear()
        self._forget_interface()
        _uninitialised.clear()

    def _forget_interface(self) -> None:
        """TorchDynamo keeps the functions of ``torch.cuda`` that it finds when it is imported."""
        module = sys.modules.get("torch._dynamo.device_interface")
        interface = module.CudaInterface if module else None
        for name in _cuda_functions(self._torch):
            kept = name.removeprefix("_") if name.endswith("exchange_device") else name
            if interface is not None and kept in vars(interface):
                function = getattr(self._torch.cuda, name)
                setattr(interface, kept, function if isinstance(function, type) else staticmethod(function))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        self._undo.append((owner, name, name in own, own.get(name)))
        setattr(owner, name, value)

    def _factories(self) -> None:
        """Functions that make tensors, by the list of PyTorch's own ``set_default_device``."""
        torch = self._torch
        from torch.utils import _device as torch_device

        names = {getattr(function, "__name__", "") for function in torch_device._device_constructors()}
        names |= {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
        for name in sorted(names):
            function = getattr(torch, name, None)
            if function is not None:
                self._set(torch, name, _with_device(function, name in _EMPTY))
        context = torch_device.DeviceContext
        make = context.__init__
        self._set(context, "__init__", lambda made, device: make(made, _torch_device(torch, _on_cpu(device))))

    def _tensor(self) -> None:
        torch = self._torch
        tensor = torch.Tensor
        plain, to = tensor.device, tensor.to
        self._set(tensor, "device", property(_seen_device(plain.__get__, torch.device("cuda", 0))))
        for name, answer in (("is_cuda", True), ("is_cpu", False)):
            self._set(tensor, name, property(_answer(answer)))

        def stays(device: Any) -> Any:
            on_cpu = _on_cpu(device)
            return device if on_cpu is device else _Moved(on_cpu)

        def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = [*args[:1], kwargs.get("device")]
            given = [device for device in given if not isinstance(device, _Moved) and not hasattr(device, "data_ptr")]
            leaves = any(str(device).split(":")[0] == "cpu" for device in given)
            args = tuple(stays(arg) if index == 0 else arg for index, arg in enumerate(args))
            if "device" in kwargs:
                kwargs["device"] = stays(kwargs["device"])
            result = to(self, *args, **kwargs)
            # On a GPU this makes a copy, which a program may rely on.
            return result.clone() if leaves and result is self else result

        self._set(tensor, "to", moved)
        self._set(tensor, "cpu", lambda self, *_, **__: self.clone())
        self._set(tensor, "cuda", lambda self, *_, **__: self)
        self._set(tensor, "pin_memory", lambda self, *_, **__: self)
        self._set(tensor, "is_pinned", lambda self, *_, **__: False)
        self._set(tensor, "get_device", lambda self: 0)
        self._set(tensor, "record_stream", lambda self, stream: None)
        address = tensor.data_ptr

        def asked(self: Any) -> int:
            _uninitialised.note_asked(self)
            return int(address(self))

        self._set(tensor, "data_ptr", asked)
        for name in _METHODS:
            self._set(tensor, name, _with_device(getattr(tensor, name), name in _EMPTY_METHODS))

    def _inductor(self) -> None:
        """The functions of C++ that code of ``torch.compile`` calls."""
        torch = self._torch
        self._set(torch._C, "_cuda_getCurrentRawStream", _answer(0))
        guards = torch._C._dynamo.guards
        if hasattr(guards, "_empty_strided_cuda"):
            empty = torch.empty_strided
            self._set(guards, "_empty_strided_cuda", lambda shape, strides, dtype: empty(shape, strides, dtype=dtype))
        self._fake_tensors(torch._subclasses.fake_tensor.FakeTensor)
        stream = torch.Stream(stream_id=0, device_index=0, device_type=1)
        for owner in (torch._C._dynamo.utils, sys.modules.get("torch._dynamo.utils")):
            if hasattr(owner, "get_current_stream"):
                self._set(owner, "get_current_stream", lambda device: stream)
        if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "current_stream"):
            # TorchDynamo compares streams of PyTorch's own type.
            self._set(torch.accelerator, "current_stream", lambda device=None: stream)

    def _fake_tensors(self, fake: Any) -> None:
        """Tensors without memory that ``torch.compile`` traces, too: CPU tensors for C++, ``cuda`` for Python."""
        tensor = self._torch.Tensor
        for owner, name in ((fake, "__new__"), (tensor, "_make_wrapper_subclass")):
            self._set(owner, name, staticmethod(_devices_on_cpu(getattr(owner, name))))
        plain = fake.device
        # C++ reads `fake_device`.
        self._set(fake, "device", property(_seen_device(plain.fget, self._torch.device("cuda", 0)), plain.fset))

    def _others(self) -> None:
        torch = self._torch
        if torch.version.cuda is None:
            self._set(torch.version, "cuda", "13.0")
        self._set(torch, "Generator", _generator(torch.Generator))
        autocast = torch.amp.autocast_mode.autocast
        begin = autocast.__init__

        def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            begin(self, _on_cpu(device_type), *args, **kwargs)

        self._set(autocast, "__init__", on_cpu)
        # Implementations for the GPU are those of this device.
        library = torch.library.Library
        implement = library.impl

        def impl(self: Any, name: Any, function: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
            return implement(self, name, function, "CPU" if dispatch_key == "CUDA" else dispatch_key, **kwargs)

        self._set(library, "impl", impl)
        if hasattr(torch, "accelerator"):
            for name, value in (
                ("is_available", lambda: True),
                ("current_accelerator", lambda check_available=False: torch.device("cuda")),
                ("device_count", lambda: 1),
                ("current_device_index", lambda: 0),
                ("synchronize", lambda *_: None),
            ):
                if hasattr(torch.accelerator, name):
                    self._set(torch.accelerator, name, value)


def _seen_device(plain: Any, cuda: Any) -> Callable[[Any], Any]:
    """The device that Python sees of a tensor."""

    def seen(tensor: Any) -> Any:
        real = plain(tensor)
        return cuda if real.type == "cpu" else real

    return seen


def _devices_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the CPU in place of each GPU among its arguments."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_on_cpu(arg) if is_cuda(arg) else arg for arg in args)
        kwargs = {name: _on_cpu(arg) if is_cuda(arg) else arg for name, arg in kwargs.items()}
        return function(*args, **kwargs)

    return called


def _torch_device(torch: Any, device: Any) -> Any:
    return torch.device(device) if isinstance(device, str) else device


def _with_device(function: Callable[..., Any], is_empty: bool) -> Callable[..., Any]:
    """A function that makes tensors, with the CPU in place of the GPU."""

    @functools.wraps(function, updated=())
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        result = function(*args, **kwargs)
        return _uninitialised.note_allocated(result) if is_empty else result

    return made


def _generator(plain: type) -> type:
    class Generator(plain):  # type: ignore[misc]
        """A generator of random numbers on the CPU, whatever device is asked for."""

        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls, device="cpu")

        @property
        def device(self) -> Any:
            import torch

            return torch.device("cuda", 0)

    return Generator
