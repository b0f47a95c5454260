"""PyTorch's ``scaled_dot_product_attention`` of sharded rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._errors import UnsupportedError, invalid
from ._attention import context_parallel_attn_func
from ._split import SequenceSplit

__all__ = ["sharded_sdpa"]

# The function that PyTorch's module has unless another one replaced it. That of `context_parallel` makes
# DTensors and calls this one.
_SDPA = torch._C._nn.scaled_dot_product_attention


class sharded_sdpa(TorchFunctionMode):  # type: ignore[misc]
    """A context in which ``torch.nn.functional.scaled_dot_product_attention`` computes attention of sharded rows.

    It works by itself, for a model whose inputs are shards, and inside of PyTorch's ``context_parallel``, which splits
    the buffers. The model is unchanged:

    >>> with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]), sharded_sdpa(mesh):
    ...     loss = model(x, y)

    Args:
        group: a process group, or a mesh of one dimension.
        split: as in :func:`context_parallel_attn_func`. PyTorch's ``context_parallel`` splits in zigzag, without load
            balance contiguously.
        schedule: as in :func:`context_parallel_attn_func`.

    A call with ``attn_mask`` or dropout raises an error: a mask would be a part of the whole one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        split: SequenceSplit | str = "zigzag",
        schedule: str = "auto",
    ) -> None:
        super().__init__()
        self._group = group.get_group() if isinstance(group, DeviceMesh) else group
        self._split, self._schedule = split, schedule

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not _SDPA:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None:
            raise UnsupportedError("attn_mask has no rows of other ranks; use is_causal, or a window", "attn_mask")
        if dropout_p:
            raise UnsupportedError("dropout is not supported; dropout_p must be 0", "dropout_p")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise invalid("the heads of key", key.shape[1], f"{query.shape[1]} without enable_gqa=True")
        wrapped = [x for x in (query, key, value) if isinstance(x, DTensor)]
        tensors = [x.to_local() if isinstance(x, DTensor) else x for x in (query, key, value)]
        q, k, v = (x.transpose(1, 2) for x in tensors)
        out = context_parallel_attn_func(
            q, k, v, self._group, self._split, softmax_scale=scale, causal=is_causal, schedule=self._schedule
        ).transpose(1, 2)
        if wrapped:
            out = DTensor.from_local(out, wrapped[0].device_mesh, wrapped[0].placements, run_check=False)
        result: Tensor = out
        return result
