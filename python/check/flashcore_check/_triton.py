"""The emulator as Triton's device: Triton compiles a kernel as for a GPU, and its launcher runs it here."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import _device
from ._launch import described, entry_parameters, number
from ._memory import Memory
from ._session import current

#: The oldest and the newest version of Triton that this package was tried with.
OLDEST, NEWEST = (3, 4), (3, 9)

_SCALARS = {
    "i1": "bool",
    "u1": "bool",
    "i8": "int8",
    "u8": "uint8",
    "i16": "int16",
    "u16": "uint16",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "u64": "uint64",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
}

#: Elements of tensor maps by PyTorch's types.
_ELEMENTS = {
    "uint8": "u8",
    "int8": "u8",
    "bool": "u8",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
    "int16": "u16",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "uint64": "u64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}
_SWIZZLES = {0: "none", 1: "32", 2: "64", 3: "128"}


class UnsupportedVersion(RuntimeError):
    """A version of Triton that this package does not support."""


def version(triton: Any) -> tuple[int, int]:
    """Major and minor version."""
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def support(triton: Any) -> str | None:
    """What to say about the version of Triton; ``None`` if it was tried.

    Raises:
        UnsupportedVersion: the version is older than the oldest that works.
    """
    found = version(triton)
    newest = ".".join(map(str, NEWEST))
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedVersion(f"Triton {triton.__version__} is not supported: expected {oldest} to {newest}")
    if found > NEWEST:
        return f"Triton {triton.__version__} was not tried with this version; the newest that was is {newest}"
    return None


class _DeviceNumber(int):
    """Number 0, but another key than 0: Triton keeps compiled kernels by the number of a real GPU, too."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


_DEVICE = _DeviceNumber(0)


class _State(threading.local):
    """The kernel whose handles Triton makes, and whether an autotuner only tries what compiles."""

    kernel: Any = None
    compiles_only: bool = False


_state = _State()


class _Utils:
    """The functions that Triton calls in its C module of a real driver."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return _device.properties_for_triton()

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: int) -> None:
        pass

    def get_default_stream(self, device: int) -> int:
        return 0

    def is_stream_capturing(self, stream: int) -> bool:
        return False

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return _device.capability()

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # Registers and spills are known to ptxas only; a plausible number satisfies occupancy formulas.
        return 1, _state.kernel, 32, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def set_printf_fifo_size(self, size: int) -> None:
        pass

    def cuOccupancyMaxActiveClusters(self, *args: Any) -> int:
        return 16


class Launcher:
    """Launches one compiled kernel, as Triton calls it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        kernel = _state.kernel
        self.name = metadata.name
        self.ptx = kernel.asm["ptx"]
        self.metadata = metadata
        self.maps = list(getattr(metadata, "tensordesc_meta", None) or [])
        self.signature = dict(src.signature)
        self.parameters = entry_parameters(self.ptx, self.name)
        threads = re.search(r"\.reqntid\s+(\d+)", self.ptx)
        self.threads = int(threads[1]) if threads else 32 * metadata.num_warps

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, stream: Any, function: Any, packed: Any, launch_metadata: Any,
        enter: Callable[[Any], None] | None, leave: Callable[[Any], None] | None, *args: Any,
    ) -> None:  # fmt: skip
        __tracebackhide__ = True
        session = current()
        if session is None:
            raise RuntimeError(f"{self.name} was compiled for flashcore-check, which has ended")
        if _state.compiles_only or grid_x * grid_y * grid_z == 0:
            return
        if enter is not None:
            enter(launch_metadata)
        memory = Memory()
        maps: list[dict[str, Any]] = []
        pending = iter(self.maps)
        given: list[dict[str, Any]] = []
        for (name, kind), value in zip(self.signature.items(), args):
            given.extend(self._arguments(memory, maps, pending, str(name), kind, value))
        given.extend(self._scratch(memory, grid_x * grid_y * grid_z, len(given)))
        ctas = getattr(self.metadata, "num_ctas", 1) or 1
        made = described(
            self.name,
            (grid_x * ctas, grid_y, grid_z),
            (self.threads,),
            given,
            shared=self.metadata.shared,
            cluster=(ctas,),
            cooperative=bool(getattr(self.metadata, "launch_cooperative_grid", False)),
            overlapping=bool(getattr(self.metadata, "launch_pdl", False)),
            maps=maps,
        )
        session.run(self.name, self.ptx, made, memory)
        if leave is not None:
            leave(launch_metadata)

    def _arguments(
        self, memory: Memory, maps: list[dict[str, Any]], pending: Iterator[Any], name: str, kind: Any, value: Any
    ) -> Iterator[dict[str, Any]]:
        """The parameters of one argument. A tuple and a tensor descriptor have several."""
        if isinstance(kind, tuple):
            for at, (inner, element) in enumerate(zip(kind, value)):
                yield from self._arguments(memory, maps, pending, f"{name}[{at}]", inner, element)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            yield from self._descriptor(memory, maps, pending, name, value)
        elif kind.startswith("*"):
            yield memory.argument(name, value)
        else:
            yield number(_SCALARS[kind], value)

    def _descriptor(
        self, memory: Memory, maps: list[dict[str, Any]], pending: Iterator[Any], name: str, value: Any
    ) -> Iterator[dict[str, Any]]:
        padding = getattr(value, "padding", "zero")
        base = memory.argument(name, value.base)
        extents, strides = list(value.shape), list(value.strides)
        if not self.maps:
            # Before Hopper a descriptor is a pointer with its shape.
            yield base
            for extent in (*extents, *strides):
                yield number("int64", extent)
            yield number("bool", padding == "nan")
            if version(_triton()) >= (3, 7):
                yield number("bool", getattr(value, "round_f32_to_tf32", False))
        else:
            meta = next(pending)
            if padding == "nan" or meta.get("fp4_padded") or meta.get("is_im2col"):
                raise NotImplementedError(
                    f"tensor descriptor {name}: padding with NaN, fp4 and im2col are not emulated"
                )
            size = value.base.element_size()
            maps.append(
                {
                    "buffer": base["buffer"]["index"],
                    "offset": base["buffer"]["offset"],
                    "element": _ELEMENTS[str(value.base.dtype).removeprefix("torch.")],
                    "extents": [int(extent) for extent in reversed(extents)],
                    "strides": [int(stride) * size for stride in reversed(strides[:-1])],
                    "box": [int(extent) for extent in reversed(meta["block_size"])],
                    "swizzle": _SWIZZLES[meta["swizzle"]],
                }
            )
            yield {"map": len(maps) - 1}
        for extent in extents:
            yield number("int32", extent)
        for stride in strides:
            yield number("int64", stride)

    def _scratch(self, memory: Memory, programs: int, given: int) -> Iterator[dict[str, Any]]:
        """The scratch memory that Triton's compiler adds as last parameters."""
        sizes = [
            (getattr(self.metadata, f"{kind}_scratch_size", 0) or 0, getattr(self.metadata, f"{kind}_scratch_align", 1))
            for kind in ("global", "profile")
        ]
        ctas = getattr(self.metadata, "num_ctas", 1) or 1
        for (size, align), name in zip(sizes[: self.parameters - given], ("global_scratch", "profile_scratch")):
            if size == 0:
                yield {"u64": 0}
            elif name == "global_scratch":
                from triton.runtime import _allocation

                allocate = _allocation._allocator.get()
                yield memory.argument(name, allocate(programs * ctas * size, align, 0))
            else:
                import torch

                yield memory.argument(name, torch.zeros(programs * ctas * size, dtype=torch.int8))


def _triton() -> Any:
    import triton

    return triton


class Driver:
    """The driver that Triton uses while a session is active."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = _device.capability()
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return _device.capability()

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: Any) -> None:
        pass

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.zeros(4, dtype=torch.int)

    def clear_cache(self, cache: Any) -> None:
        pass

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: Any) -> Any:
        import torch

        return torch.zeros(size, dtype=torch.int8)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return benchmark

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(kind))


class _InductorDriver(Driver):
    """The driver that Inductor makes before its first kernel runs, when its benchmarks are loaded."""

    def __init__(self) -> None:
        super().__init__()
        benchmarking = sys.modules.get("torch._inductor.runtime.benchmarking")
        if benchmarking is not None:
            vars(benchmarking.benchmarker)["benchmark"] = lambda fn, *_, **__: benchmark(fn)[0]


def _forget_inductor() -> None:
    benchmarking = sys.modules.get("torch._inductor.runtime.benchmarking")
    if benchmarking is not None:
        vars(benchmarking.benchmarker).pop("benchmark", None)


def benchmark(kernel_call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
    """Tries a configuration of an autotuner without a time: launches it once, or only compiles it."""
    session = current()
    _state.compiles_only = session is None or not session.settings.all_configs
    try:
        kernel_call()
    finally:
        _state.compiles_only = False
    return [1.0] * len(quantiles or (0.5,))


def do_bench(fn: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """In place of ``triton.testing.do_bench``: runs the function once. The time is no measurement."""
    fn()
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


class Patch:
    """Makes the emulator Triton's device, until :meth:`undo`."""

    def __init__(self) -> None:
        import triton
        import triton.runtime.autotuner as autotuner
        import triton.testing
        from triton.compiler.compiler import CompiledKernel

        self.note = support(triton)
        self._undo: list[tuple[Any, str, Any]] = []
        self._undo_items: list[tuple[Any, str, Any]] = []
        driver = triton.runtime.driver
        self._driver, self._active = driver, driver.__dict__.get("_active")
        driver.set_active(Driver())
        make_handles = CompiledKernel._init_handles

        def with_kernel(kernel: Any) -> None:
            before, _state.kernel = _state.kernel, kernel
            try:
                make_handles(kernel)
            finally:
                _state.kernel = before
                # There is no module that a driver could unload later.
                kernel._module_pid = None

        self._set(CompiledKernel, "_init_handles", with_kernel)
        # Triton 3.10 does not fuse products and sums any more. With fusion, lanes that store one sum differ
        # in its last bit, which is a race by the letter.
        if "TRITON_DEFAULT_FP_FUSION" not in os.environ:
            self._set_item(os.environ, "TRITON_DEFAULT_FP_FUSION", "0")
        self._patch_inductor()
        self._patch_autotuner(autotuner.Autotuner)
        for name in ("do_bench", "do_bench_cudagraph"):
            self._set(triton.testing, name, do_bench)
        # A benchmark's sizes are those of a GPU, and there is no time to plot.
        self._set(triton.testing.Mark, "run", lambda *_, **__: None)

    def _patch_inductor(self) -> None:
        """Inductor asks Triton's backend for a driver, and compiles in child processes and by C++."""
        from triton import backends

        known = backends.backends
        self._set_item(known, "nvidia", dataclasses.replace(known["nvidia"], driver=_InductorDriver))
        for name, value in (("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")):
            self._set_item(os.environ, name, value)

    def _patch_autotuner(self, autotuner: Any) -> None:
        prune, bench = autotuner.prune_configs, autotuner._bench

        def prune_configs(tuner: Any, kwargs: Any) -> Any:
            tuner._flashcore_found = False
            return prune(tuner, kwargs)

        def time_config(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            session = current()
            is_found = getattr(tuner, "_flashcore_found", False)
            if session is not None and not session.settings.all_configs and is_found:
                return [float("inf")] * 3
            own = vars(tuner)
            before = own.get("do_bench")
            own["do_bench"] = benchmark
            try:
                times = bench(tuner, *args, **kwargs)
            finally:
                own.pop("do_bench") if before is None else own.update(do_bench=before)
            tuner._flashcore_found = times[0] != float("inf")
            return times

        self._set(autotuner, "prune_configs", prune_configs)
        self._set(autotuner, "_bench", time_config)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _set_item(self, owner: Any, name: str, value: Any) -> None:
        before = owner.get(name)
        self._undo_items.append((owner, name, before))
        owner[name] = value

    def undo(self) -> None:
        """Gives Triton its own driver again. Kernels that were compiled meanwhile are forgotten with it."""
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)
        _forget_inductor()
        for owner, name, value in reversed(self._undo_items):
            owner.pop(name) if value is None else owner.update({name: value})
        if hasattr(self._driver, "_active"):
            self._driver._active = self._active
