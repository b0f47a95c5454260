"""The parts of PyTorch that tracing a score or mask function uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _trace

is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Tracing:
    """The parts of PyTorch that tracing a score or mask function uses."""

    name = "torch"

    def __init__(self, q: Tensor) -> None:
        self.device = q.device
        #: Whether programs are kept for later calls. The compiler keeps its graphs and watches their inputs.
        self.remembers = not is_dynamo_compiling()

    def given(self, recorder: _trace.Trace, tracer: _trace.Tracer) -> Any:
        """What the function gets in place of a tracer. PyTorch's compiler computes ``tracer == n`` by itself, and
        wrongly, where ``n`` is symbolic; but it asks a mode about each function of a tensor.
        """
        if self.remembers:
            return tracer
        stand_in = torch.empty((), dtype=self.dtype_of_kind(tracer.kind), device="meta")
        recorder.stand_ins.append((stand_in, tracer))
        return stand_in

    def kind(self, array: Any) -> str:
        """The kind of an array's elements in a program."""
        if not self.remembers and self.device.type != "meta" and getattr(array, "array", array).is_meta:
            what = "a value that PyTorch's compiler computes from a score or a position"
            raise _trace.refused(what, "use torch's function, as torch.abs for abs")
        return self.kind_of_dtype(array.dtype) or _trace.INT

    def kind_of_dtype(self, dtype: Any) -> str | None:
        """The kind of a dtype's numbers; None if the argument is not a dtype."""
        if not isinstance(dtype, torch.dtype):
            return None
        if dtype.is_floating_point:
            return _trace.FLOAT
        return _trace.BOOL if dtype == torch.bool else _trace.INT

    def dtype_of_kind(self, kind: str) -> torch.dtype:
        """The dtype that stands for a kind."""
        return {_trace.FLOAT: torch.float32, _trace.INT: torch.int32, _trace.BOOL: torch.bool}[kind]

    def recording(self, recorder: _trace.Trace) -> Any:
        """A mode in which functions of PyTorch record their calls with tracers."""
        return _Recording(recorder) if self.remembers else _RecordingGraph(recorder)


class _Recording(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: _trace.Trace) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_recorded, result = _trace.recorded(function, args, kwargs or {})
        if is_recorded:
            return result
        result = function(*args, **(kwargs or {}))
        # A number that was read from a tensor is a constant of this trace only.
        if not isinstance(result, Tensor) and getattr(function, "__name__", "") not in ("__get__", "size", "dim"):
            self.recorder.once = True
        return result


class _RecordingGraph(_Recording):
    """Records while a graph is traced: tensors stand for tracers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self.traced(x) for x in args]
        kwargs = {name: self.traced(x) for name, x in (kwargs or {}).items()}
        is_recorded, result = _trace.recorded(function, args, kwargs)
        if not is_recorded:
            if getattr(function, "__name__", "") in _READS:
                raise _trace.refused("a number that is read from a tensor in a graph", "use the tensor of one element")
            return function(*args, **kwargs)
        if not isinstance(result, _trace.Tracer):
            return result
        return self.recorder.backend.given(self.recorder, result)

    def traced(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple([self.traced(x) for x in value])
        return self.recorder.traced(value) if isinstance(value, Tensor) else value


_READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__")
