"""Suites of training: the gradients of q, k and v, through autograd.

``backward`` and ``random-backward`` time them alone, without the forward pass. ``step`` times both passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashcore_attn import flash_attn_func, flash_attn_varlen_func

from . import _bench
from ._features import (
    Call,
    Work,
    _ends,
    _flash_attention,
    _heads_first,
    _of_tokens,
    _tensors,
    _transposed,
    causal,
    lengths_of,
    visible,
    window,
)
from ._problem import OURS

TOKENS = 16384
#: Scores of the reference that are computed together.
_SCORES = 1 << 27


@dataclasses.dataclass
class Training(Work):
    """A problem whose contestants return ``(dq, dk, dv)``. ``d_out`` is the gradient of the output, laid out as q."""

    d_out: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    softcap: float = 0.0
    #: Rows and keys at the end that are compared; 0 for all. The others do not take part in their gradients.
    last: int = 0
    #: Whether the forward pass is timed, too.
    whole: bool = False
    graphs = False  # autograd runs on the streams of the forward pass
    mode = staticmethod(torch.enable_grad)

    @property
    def flops(self) -> float:
        """FLOP of the five products of a backward pass, and of the forward pass's two, over visible pairs."""
        return (3.5 if self.whole else 2.5) * super().flops

    def output(self, who: str, result: Any) -> Any:
        return [self.as_heads.get(who, lambda x: x)(x) for x in result]

    def error(self, out: Any, rows: int = 32) -> tuple[float, float]:
        """The largest relative error (Frobenius norm) of the three gradients of the last key head of the last batch
        entry against float64, and that of attention in the inputs' type."""
        group, last = self.q.shape[1] // self.k.shape[1], -self.last or None
        q, d_out = self.q[-1, -group:, last:], self.d_out[-1, -group:, last:]
        k, v = self.k[-1, -1, last:], self.v[-1, -1, last:]
        found = (out[0][-1, -group:, last:], out[1][-1, -1, last:], out[2][-1, -1, last:])
        exact = self._gradients([x.double() for x in (q, k, v, d_out)])
        plain = self._gradients([q, k, v, d_out])
        worst = max(_distance(x, y) for x, y in zip(found, exact))
        return worst, max(_distance(x, y) for x, y in zip(plain, exact))

    def _gradients(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of q, k and v, some query rows at a time."""
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        keys = torch.arange(k.shape[0], device=q.device)
        dq, sums = [], [torch.zeros_like(x, dtype=torch.float64) for x in (k, v)]
        for rows in torch.arange(q.shape[1], device=q.device).split(max(1, _SCORES // (q.shape[0] * k.shape[0]))):
            s = (q[:, rows] @ k.T) * q.shape[-1] ** -0.5
            if self.softcap:
                s = self.softcap * torch.tanh(s / self.softcap)
            if self.mask is not None:
                s = s.masked_fill(~self.mask(None, None, rows[:, None], keys), -math.inf)
            of_rows, *of_keys = torch.autograd.grad(s.softmax(-1) @ v, (q, k, v), tensors[3][:, rows])
            dq.append(of_rows[:, rows])
            for total, part in zip(sums, of_keys):
                total += part
        return torch.cat(dq, 1), sums[0], sums[1]


def _distance(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


#: Batch, query and key heads, the length, and the head dim.
_Shape = tuple[int, tuple[int, int], int, int]


def works(device: str, dtype: torch.dtype, shrunk: int, whole: bool = False) -> Iterator[Work]:
    """16k tokens in all and 2048 elements a token; then grouped heads, a window, a cap, the mission problem, and a
    packed batch. ``whole``: with the forward pass."""
    for dim in (64, 128, 256):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            for mask in (None, causal):
                batch = max(1, TOKENS // length if shrunk == 1 else 1)
                shape = (batch, (2048 // dim,) * 2, max(length // shrunk, 8), dim)
                yield _work(device, dtype, shape, mask, whole=whole)
    few = 1 if shrunk > 1 else 4
    yield _work(device, dtype, (few, (32, 8), 4096 // shrunk, 128), causal, whole=whole)
    yield _work(device, dtype, (1, (16, 16), 16384 // shrunk, 128), window(1024), (1023, 0), whole=whole)
    yield _work(device, dtype, (1, (16, 16), 8192 // shrunk, 128), causal, softcap=50.0, whole=whole)
    yield _work(device, dtype, (1, (8, 8), 512 // shrunk, 64), None, whole=whole)
    yield _packed(device, dtype, shrunk, whole)


def works_on_cpu() -> Iterator[Work]:
    """Backward passes on a CPU, beside PyTorch's: its own choice of a kernel."""
    shapes = [
        (1, (8, 8), 512, 64),
        (1, (8, 8), 2048, 64),
        (1, (8, 2), 2048, 64),
        (1, (8, 8), 2048, 128),
        (4, (12, 12), 512, 64),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for shape in shapes:
            for mask in (None, causal):
                work = _work("cpu", dtype, shape, mask)
                work.calls = {OURS: work.calls[OURS], "sdpa": work.calls["sdpa-flash"]}
                yield work


def random_works(device: str, shrunk: int, seed: int, count: int) -> Iterator[Work]:
    """The problems of the suite ``random``, backward. Those that a peer does not compute are raced without it."""
    for (batch, *heads, rows, keys, dim), dtype, mask, _ in _bench.random_problems(seed, count):
        if shrunk > 1:
            batch, heads = 1, [min(n, 4) for n in heads]
            rows, keys = (max(n // shrunk, 16) for n in (rows, keys))
            heads[0] -= heads[0] % heads[1]
            rows = rows if mask == "none" else min(rows, keys)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        seen = None if mask == "none" else _causal_of(rows, keys)
        yield _work(device, kind, (batch, (heads[0], heads[1]), rows, dim), seen, keys=keys)


def _causal_of(rows: int, keys: int) -> Callable[..., Any]:
    """A causal mask that is aligned to the bottom right."""
    return causal if rows == keys else lambda b, h, q, k: q + (keys - rows) >= k


def _work(
    device: str, dtype: torch.dtype, shape: _Shape, mask: Callable[..., Any] | None,
    left: tuple[int, int] = (-1, -1), softcap: float = 0.0, whole: bool = False, keys: int | None = None,
) -> Training:  # fmt: skip
    batch, heads, length, dim = shape
    keys = length if keys is None else keys
    q, k, v = _tensors(device, dtype, batch, heads, max(length, keys), dim)
    q, k, v = q[:, :, :length].contiguous(), k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()
    d_out = torch.randn(q.shape, device=device, dtype=torch.float32).to(dtype)
    band = "" if mask is None else f" window {left[0] + 1}" if left != (-1, -1) else " causal"
    of_heads = f"{heads[0]}" if heads[0] == heads[1] else f"{heads[0]}/{heads[1]}"
    of_rows = f"{length}" if length == keys else f"{length}x{keys}"
    kind = {torch.float16: " f16", torch.float32: " f32"}.get(dtype, "")
    cap = f" softcap {softcap:g}" if softcap else ""
    name = f"{'step' if whole else 'backward'} B{batch} H{of_heads} S{of_rows} D{dim}{kind}{band}{cap}"
    pairs = (length * keys if mask is None else _pairs(mask, length, keys, device)) * batch
    work = Training(name, q, k, v, {}, mask=mask, pairs=pairs, d_out=d_out, softcap=softcap, whole=whole)
    rows = [x.requires_grad_() for x in _transposed(q, k, v)]
    d_rows = _transposed(d_out)[0]
    options: dict[str, Any] = {"causal": mask is not None, "softcap": softcap}
    if left != (-1, -1):
        options["window_size"] = left

    def of(function: Callable[..., Any], **more: Any) -> Callable[[], Call]:
        def load() -> Call:
            called = function()
            return _timed(work, lambda: called(*rows, **options, **more), rows, d_rows)

        return load

    add = {OURS: of(lambda: flash_attn_func), "fa4": of(lambda: _flash_attention(4))}
    if whole:
        add["fa3+fa4"] = of(lambda: pair)
    else:
        add[f"{OURS}-deterministic"] = of(lambda: flash_attn_func, deterministic=True)
        add["fa4-deterministic"] = of(lambda: _flash_attention(4), deterministic=True)
    work.calls.update(add)
    work.as_heads.update(dict.fromkeys(add, _heads_first))
    # The causal mask of SDPA is aligned to the top left.
    if left == (-1, -1) and not softcap and (mask is None or length == keys):
        for backend in ("CUDNN", "FLASH"):
            work.calls[f"sdpa-{backend.lower()}"] = _sdpa(work, f"{backend}_ATTENTION")
    return work


def _pairs(mask: Callable[..., Any], rows: int, keys: int, device: str) -> float:
    if rows == keys:
        return visible(mask, rows, device)
    return float(rows * keys - rows * (rows - 1) // 2)  # causal, with at most as many rows as keys


def _timed(work: Training, forward: Call, inputs: list[Tensor], d_out: Tensor) -> Call:
    """The backward pass of one call, or both passes."""

    def output() -> Tensor:
        result = forward()
        made: Tensor = result[0] if isinstance(result, tuple) else result
        return made

    if work.whole:
        return lambda: torch.autograd.grad(output(), inputs, d_out)
    out = output()
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def _packed(device: str, dtype: torch.dtype, shrunk: int, whole: bool) -> Work:
    """Uneven causal sequences in one batch, of 32 query heads and 8 key heads."""
    lengths = lengths_of(max(1000 // shrunk, 4), 32768 // shrunk)
    q, k, v = _tensors(device, dtype, 1, (32, 8), sum(lengths), 128)
    d_out = torch.randn(q.shape, device=device, dtype=torch.float32).to(dtype)
    name = f"{'step' if whole else 'backward'} packed {len(lengths)} sequences, {sum(lengths)} tokens H32/8 D128 causal"
    work = Training(
        name, q, k, v, {}, mask=causal, pairs=float(sum(n * (n + 1) // 2 for n in lengths)), d_out=d_out,
        last=lengths[-1], whole=whole,
    )  # fmt: skip
    rows = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    d_rows = d_out[0].transpose(0, 1).contiguous()
    cu, longest = _ends(lengths, device), max(lengths)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    functions: dict[str, Callable[[], Any]] = {
        OURS: lambda: flash_attn_varlen_func,
        "fa4": lambda: _flash_attention(4, "flash_attn_varlen_func"),
    }
    for who, function in functions.items():

        def load(function: Callable[[], Any] = function) -> Call:
            called = function()
            return _timed(work, lambda: called(*rows, causal=True, **ends), rows, d_rows)

        work.calls[who], work.as_heads[who] = load, _of_tokens
    return work


class _Pair(torch.autograd.Function):  # type: ignore[misc]
    """FlashAttention-3's forward pass and FlashAttention-4's backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse, *_ = _flash_attention(3)(q, k, v, return_attn_probs=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, lse = ctx.saved_tensors
        options = dict(ctx.options)
        before, after = options.pop("window_size", (None, None))
        dq, dk, dv, *_ = _flash_attn_bwd(
            q, k, v, out, d_out, lse, window_size_left=before, window_size_right=after, **options
        )
        return dq, dk, dv, None


def pair(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention by :class:`_Pair`."""
    made: Tensor = _Pair.apply(q, k, v, options)
    return made


def _sdpa(work: Training, backend: str) -> Callable[[], Call]:
    """PyTorch's SDPA in the layout of FlashAttention, which is what models hold."""

    def load() -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (work.q, work.k, work.v)]
        inputs = [x.requires_grad_() for x in tensors]
        gqa = work.q.shape[1] != work.k.shape[1]

        def forward() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)) if work.q.is_cuda else contextlib.nullcontext():
                return F.scaled_dot_product_attention(*inputs, is_causal=work.mask is not None, enable_gqa=gqa)

        return _timed(work, forward, inputs, work.d_out)

    return load
