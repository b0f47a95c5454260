"""Calls of other libraries as CUDA graphs that FlashCore's harness can launch."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

Described = tuple[int, tuple[int, ...], tuple[int, ...]]

_WARM_UPS = 3


class Captured:
    """A graph of several calls and a graph of one call. Both write one output, and live as long as this object."""

    def __init__(self, call: Callable[[], Tensor], calls: int, layout: str) -> None:
        """Warms up, compiling included, and captures.

        Raises:
            RuntimeError: when the calls write to other addresses from one time to the next.
        """
        self._call = call  # owns memory that the graphs use
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                call()
        # The graphs share memory. Each call returns its memory, so that all calls start in the same state and
        # the allocator puts all outputs at one address. The first capture only allocates that memory.
        self._pool = torch.cuda.graph_pool_handle()
        outputs: set[Described] = set()
        captures: tuple[tuple[int, set[Described]], ...] = ((1, set()), (1, outputs), (calls, outputs))
        self._graphs = [self._capture(call, layout, count, found) for count, found in captures]
        if len(outputs) != 1:
            raise RuntimeError(f"its output lies at {len(outputs)} addresses, so it cannot be checked")
        (self.out,) = outputs
        self.cold, self.warm = (_executable(graph) for graph in self._graphs[1:])

    def _capture(self, call: Callable[[], Tensor], layout: str, count: int, outputs: set[Described]) -> Any:
        """Captures without the garbage collection and cache flush of ``torch.cuda.graph``, which would take longer than
        everything else."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for _ in range(count):
                    outputs.add(describe(call(), layout))
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspends garbage collection, which could free GPU memory. That is not allowed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def describe(x: Tensor, layout: str) -> Described:
    """Address, shape and strides in the order batch, head, sequence, dim."""
    x = x if layout == "bhsd" else x.transpose(1, 2)
    return x.data_ptr(), tuple(x.shape), tuple(x.stride())


def _executable(graph: Any) -> int:
    """The handle of the instantiated graph."""
    if hasattr(graph, "raw_cuda_graph_exec"):
        graph.instantiate()
        return int(graph.raw_cuda_graph_exec())
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p()
    status = driver.cuGraphInstantiateWithFlags(
        ctypes.byref(handle), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_ulonglong(0)
    )
    if status != 0 or handle.value is None:
        raise RuntimeError(f"cuGraphInstantiateWithFlags gave {status}")
    weakref.finalize(graph, driver.cuGraphExecDestroy, handle)
    return handle.value
