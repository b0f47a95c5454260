"""The suite ``backward``: the gradients of q, k and v alone, through autograd, without the forward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashcore_attn import flash_attn_func

from ._features import Call, Work, _flash_attention, _heads_first, _tensors, _transposed, causal, visible, window
from ._problem import OURS

TOKENS = 16384


@dataclasses.dataclass
class Training(Work):
    """A problem whose contestants return ``(dq, dk, dv)``. ``d_out`` is the gradient of the output, laid out as q."""

    d_out: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    softcap: float = 0.0
    graphs = False  # autograd runs on the streams of the forward pass
    mode = staticmethod(torch.enable_grad)

    @property
    def flops(self) -> float:
        """FLOP of the five products of a backward pass, over visible pairs."""
        return 2.5 * super().flops

    def output(self, who: str, result: Any) -> Any:
        return [self.as_heads.get(who, lambda x: x)(x) for x in result]

    def error(self, out: Any, rows: int = 32) -> tuple[float, float]:
        """The largest relative error (Frobenius norm) of the three gradients of the last key head of the last batch
        entry against float64, and that of attention in the inputs' type."""
        group = self.q.shape[1] // self.k.shape[1]
        q, d_out = self.q[-1, -group:], self.d_out[-1, -group:]
        k, v = self.k[-1, -1], self.v[-1, -1]
        found = (out[0][-1, -group:], out[1][-1, -1], out[2][-1, -1])
        exact = self._gradients([x.double() for x in (q, k, v, d_out)])
        plain = self._gradients([q, k, v, d_out])
        worst = max(_distance(x, y) for x, y in zip(found, exact))
        return worst, max(_distance(x, y) for x, y in zip(plain, exact))

    def _gradients(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        s = (q @ k.T) * q.shape[-1] ** -0.5
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.mask is not None:
            rows, keys = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[0], device=q.device)
            s = s.masked_fill(~self.mask(None, None, rows, keys), -math.inf)
        return torch.autograd.grad(s.softmax(-1) @ v, (q, k, v), tensors[3])


def _distance(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def works(device: str, dtype: torch.dtype, shrunk: int) -> list[Work]:
    """16k tokens in all and 2048 elements a token; then grouped heads, a window, a cap and the mission problem."""
    found: list[Work] = []
    for dim in (64, 128, 256):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            for mask in (None, causal):
                batch = max(1, TOKENS // length if shrunk == 1 else 1)
                found.append(_work(device, dtype, (batch, (2048 // dim,) * 2, max(length // shrunk, 8), dim), mask))
    few = 1 if shrunk > 1 else 4
    found.append(_work(device, dtype, (few, (32, 8), 4096 // shrunk, 128), causal))
    found.append(_work(device, dtype, (1, (16, 16), 16384 // shrunk, 128), window(1024), (1023, 0)))
    found.append(_work(device, dtype, (1, (16, 16), 8192 // shrunk, 128), causal, softcap=50.0))
    found.append(_work(device, dtype, (1, (8, 8), 512 // shrunk, 64), None))
    return found


def _work(
    device: str, dtype: torch.dtype, shape: tuple[int, tuple[int, int], int, int],
    mask: Callable[..., Any] | None, left: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> Training:  # fmt: skip
    batch, heads, length, dim = shape
    q, k, v = _tensors(device, dtype, *shape)
    d_out = torch.randn(q.shape, device=device, dtype=torch.float32).to(dtype)
    band = "" if mask is None else " causal" if mask is causal else f" window {left[0] + 1}"
    of_heads = f"{heads[0]}" if heads[0] == heads[1] else f"{heads[0]}/{heads[1]}"
    name = f"backward B{batch} H{of_heads} S{length} D{dim}{band}{f' softcap {softcap:g}' if softcap else ''}"
    pairs = visible(mask, length, device) * batch
    work = Training(name, q, k, v, {}, mask=mask, pairs=pairs, d_out=d_out, softcap=softcap)
    rows = [x.requires_grad_() for x in _transposed(q, k, v)]
    d_rows = _transposed(d_out)[0]
    options: dict[str, Any] = {"causal": mask is not None, "softcap": softcap}
    if left != (-1, -1):
        options["window_size"] = left

    def of(function: Callable[..., Any], **more: Any) -> Callable[[], Call]:
        def load() -> Call:
            result = function()(*rows, **options, **more)
            out = result[0] if isinstance(result, tuple) else result
            return lambda: torch.autograd.grad(out, rows, d_rows, retain_graph=True)

        return load

    add = {OURS: of(lambda: flash_attn_func), f"{OURS}-deterministic": of(lambda: flash_attn_func, deterministic=True)}
    add["fa4"] = of(lambda: _flash_attention(4))
    add["fa4-deterministic"] = of(lambda: _flash_attention(4), deterministic=True)
    work.calls.update(add)
    work.as_heads.update(dict.fromkeys(add, _heads_first))
    if left == (-1, -1) and not softcap:
        for backend in ("CUDNN", "FLASH"):
            work.calls[f"sdpa-{backend.lower()}"] = _sdpa(work, f"{backend}_ATTENTION")
    return work


def _sdpa(work: Training, backend: str) -> Callable[[], Call]:
    """PyTorch's SDPA in the layout of FlashAttention, which is what models hold."""

    def load() -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (work.q, work.k, work.v)]
        q, k, v = (x.requires_grad_() for x in tensors)
        gqa = q.shape[1] != k.shape[1]
        with sdpa_kernel(getattr(SDPBackend, backend)) if q.is_cuda else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=work.mask is not None, enable_gqa=gqa)
        return lambda: torch.autograd.grad(out, (q, k, v), work.d_out, retain_graph=True)

    return load
