"""Suites of features other than even lengths and a causal mask: what is computed, and how each library is called."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashcore_attn import flash_attn_func, flash_attn_varlen_func, flex_attention, scaled_dot_product_attention

from ._problem import OURS, RANDOM_BACKWARD, RANDOM_CPU, ROWS_CPU

Call = Callable[[], Any]


@dataclasses.dataclass
class Work:
    """A problem with values, and the contestants that compute it.

    ``q``, ``k`` and ``v`` are ``(batch, heads, sequence, head_dim)``. ``score`` and ``mask`` are FlexAttention's
    functions, from which the reference follows. ``calls`` returns, by name, the loaders of the contestants: a loader
    imports and prepares, and returns a function without arguments, whose result has the layout of ``q`` after
    ``as_heads``.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    calls: dict[str, Callable[[], Call]]
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    sink: Tensor | None = None
    as_heads: dict[str, Callable[[Any], Tensor]] = dataclasses.field(default_factory=dict)
    pairs: float = 0.0  # visible pairs of query and key of a head, all batch entries together
    bytes: float = 0.0  # that the kernel must read, where reading limits it
    before: Callable[[], Any] = lambda: None  # what the process computes before each call, without being timed
    graphs = True  # calls are timed in a CUDA graph
    mode = staticmethod(torch.inference_mode)

    @property
    def flops(self) -> float:
        """FLOP of both products, over visible pairs."""
        return 2.0 * self.pairs * self.q.shape[1] * (self.q.shape[3] + self.v.shape[3])

    def rates(self, us: float) -> dict[str, float]:
        """What a row says besides the time."""
        found = {"tflops": self.flops / us / 1e6}
        return found | {"tb_per_s": self.bytes / us / 1e6} if self.bytes else found

    def output(self, who: str, result: Any) -> Tensor:
        """The result of a contestant as ``(batch, heads, sequence, head_dim)``."""
        out = result[0] if isinstance(result, tuple) else result
        return self.as_heads.get(who, lambda x: x)(out)

    def error(self, out: Tensor, rows: int = 32) -> tuple[float, float]:
        """The largest error of some rows against float64, and that of attention in the inputs' type."""
        worst = plain = 0.0
        generator = torch.Generator().manual_seed(1)
        batch, heads, length, dim = self.q.shape
        for _ in range(4):
            b, h = (int(torch.randint(n, (1,), generator=generator)) for n in (batch, heads))
            picked = torch.randint(length, (min(rows, length),), generator=generator).to(self.q.device)
            group = heads // self.k.shape[1]
            q, k, v = self.q[b, h, picked], self.k[b, h // group], self.v[b, h // group]
            keys = torch.arange(k.shape[0], device=q.device)
            index = (torch.tensor(b, device=q.device), torch.tensor(h, device=q.device), picked[:, None], keys)

            def attend(dtype: torch.dtype, rounded: torch.dtype, q: Tensor = q, k: Tensor = k, v: Tensor = v,
                       index: Any = index, h: int = h) -> Tensor:  # fmt: skip
                s = (q.to(dtype) @ k.to(dtype).T) * dim**-0.5
                if self.score is not None:
                    s = self.score(s, *index).to(dtype)
                if self.mask is not None:
                    s = s.masked_fill(~self.mask(*index), -math.inf)
                top = s.amax(-1, keepdim=True).clamp_min(-1e30)
                weights = torch.exp(s - top)
                total = weights.sum(-1, keepdim=True)
                if self.sink is not None:
                    total = total + torch.exp(self.sink[h].to(dtype) - top)
                return ((weights / total).to(rounded).to(dtype) @ v.to(dtype)).nan_to_num(0.0)

            exact = attend(torch.float64, torch.float64)
            worst = max(worst, (out[b, h, picked].double() - exact).abs().max().item())
            halved = attend(torch.float32, self.q.dtype).to(self.q.dtype)
            plain = max(plain, (halved.double() - exact).abs().max().item())
        return worst, plain


def _tensors(
    device: str, dtype: torch.dtype, batch: int, heads: tuple[int, int], length: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    of = [(batch, heads[0], length, dim), *[(batch, heads[1], length, dim)] * 2]
    q, k, v = (torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for shape in of)
    return q, k, v


def _transposed(*tensors: Tensor) -> list[Tensor]:
    """``(batch, sequence, heads, dim)``, dense, as FlashAttention takes it."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def _heads_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask function: keys up to the query."""
    return q >= k


def window(keys: int) -> Callable[..., Any]:
    """A mask function: the query's own key and those before it, ``keys`` in all."""
    return lambda b, h, q, k: (q >= k) & (q - k < keys)


def visible(mask: Callable[..., Any] | None, length: int, device: str) -> float:
    """Pairs of one head that a mask shows."""
    if mask is None:
        return float(length) ** 2
    none, keys, pairs = torch.zeros((), dtype=torch.long, device=device), torch.arange(length, device=device), 0
    for rows in torch.arange(length, device=device).split(256):
        pairs += int(mask(none, none, rows[:, None], keys).sum())
    return float(pairs)


# ---- Peers


def _flex_peer(work: Work) -> Callable[[], Call]:
    """PyTorch's FlexAttention, compiled, with the blocks that the mask leaves."""

    def load() -> Call:
        from torch.nn.attention.flex_attention import create_block_mask
        from torch.nn.attention.flex_attention import flex_attention as theirs

        torch._dynamo.reset()
        compiled = torch.compile(theirs, dynamic=False)
        options: dict[str, Any] = {"score_mod": work.score, "enable_gqa": work.q.shape[1] != work.k.shape[1]}
        if work.mask is not None:
            rows, keys = work.q.shape[2], work.k.shape[2]
            options["block_mask"] = create_block_mask(work.mask, None, None, rows, keys, device=str(work.q.device))
        if work.sink is None:
            return lambda: compiled(work.q, work.k, work.v, **options)
        sink = work.sink[None, :, None]

        def with_sink() -> Tensor:
            out, lse = compiled(work.q, work.k, work.v, return_lse=True, **options)
            return out * torch.sigmoid(lse - sink)[..., None].to(out.dtype)

        return with_sink

    return load


def _dense(work: Work) -> Tensor | None:
    """The scores' addition, or the mask, that PyTorch's SDPA takes: ``(1, heads or 1, rows, keys)``."""
    rows, keys = work.q.shape[2], work.k.shape[2]
    device = work.q.device
    index = [torch.arange(n, device=device) for n in (work.q.shape[1], rows, keys)]
    h, q, k = index[0][:, None, None], index[1][:, None], index[2]
    none = torch.zeros((), dtype=torch.long, device=device)
    seen = None if work.mask is None else work.mask(none, h, q, k)
    if work.score is None:
        if seen is None:
            return None
        seen = seen.broadcast_to((seen.shape[0] if seen.ndim > 2 else 1, rows, keys))
        return seen[None]
    added = work.score(torch.zeros((), device=device), none, h, q, k).to(work.q.dtype)
    added = added.broadcast_to((work.q.shape[1], rows, keys))
    return (added if seen is None else added.masked_fill(~seen, -math.inf))[None].contiguous()


def _sdpa_peer(work: Work, backend: str | None = None) -> Callable[[], Call]:
    """PyTorch's SDPA with an ``attn_mask`` that was made before. It supports no sinks and only sums."""

    def load() -> Call:
        mask, gqa = _dense(work), work.q.shape[1] != work.k.shape[1]

        def call() -> Tensor:
            return F.scaled_dot_product_attention(work.q, work.k, work.v, attn_mask=mask, enable_gqa=gqa)

        if backend is None:
            return call
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def with_backend() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return call()

        return with_backend

    return load


def _flash_attention(version: int, name: str = "flash_attn_func") -> Any:
    if version == 3:
        import fa3_fwd_interface as module
    else:
        import flash_attn.cute as module
    return getattr(module, name)


# ---- Problems. ``shrunk`` divides lengths, so that a CPU can run the problems of a GPU.


def _simple(
    name: str, q: Tensor, k: Tensor, v: Tensor, ours: Callable[[], Call], score: Any = None, mask: Any = None,
    sink: Tensor | None = None, sdpa: bool = True, transposed: bool = True,
) -> Work:  # fmt: skip
    length = q.shape[2]
    pairs = visible(mask, length, str(q.device)) * q.shape[0]
    work = Work(name, q, k, v, {OURS: ours}, score, mask, sink, pairs=pairs)
    if transposed:
        work.as_heads[OURS] = _heads_first
    if sdpa and sink is None:
        work.calls["sdpa"] = _sdpa_peer(work)
    work.calls["flex"] = _flex_peer(work)
    return work


def _of_flash_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Callable[[], Call]:
    tensors = _transposed(q, k, v)
    return lambda: lambda: flash_attn_func(*tensors, **options)


def softcap(device: str, dtype: torch.dtype, shrunk: int, length: int = 8192, heads: int = 8, dim: int = 256) -> Work:
    """Gemma 2: a cap of 50 under a causal mask."""
    q, k, v = _tensors(device, dtype, 1 if shrunk > 1 else 2, (heads, heads), length // shrunk, dim)
    work = _simple(
        f"softcap 50 causal H{heads} S{length // shrunk} D{dim}", q, k, v,
        _of_flash_attn(q, k, v, causal=True, softcap=50.0),
        score=lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), mask=causal, sdpa=False,
    )  # fmt: skip
    tensors = _transposed(q, k, v)
    _add_flash_attention(work, tensors, causal=True, softcap=50.0)
    return work


def _add_flash_attention(work: Work, tensors: list[Tensor], versions: tuple[int, ...] = (3, 4), **options: Any) -> None:
    for version in versions:

        def load(version: int = version) -> Call:
            return _bound(_flash_attention(version), *tensors, **options)

        work.calls[f"fa{version}"], work.as_heads[f"fa{version}"] = load, _heads_first


def _bound(function: Any, *args: Any, **kwargs: Any) -> Call:
    return lambda: function(*args, **kwargs)


def sinks(device: str, dtype: torch.dtype, shrunk: int, length: int = 8192, keys: int = 128) -> Work:
    """GPT-OSS: sinks and a window of 128, eight query heads for a key head."""
    q, k, v = _tensors(device, dtype, 1 if shrunk > 1 else 2, (64, 8), length // shrunk, 64)
    sink = torch.randn(64, device=device)
    options = {"causal": True, "window_size": (keys - 1, 0), "learnable_sink": sink}
    work = _simple(
        f"sinks window {keys} H64/8 S{length // shrunk} D64", q, k, v, _of_flash_attn(q, k, v, **options),
        mask=window(keys), sink=sink,
    )  # fmt: skip
    theirs = {"causal": True, "window_size": (keys - 1, 0), "learnable_sink": sink.to(dtype)}
    _add_flash_attention(work, _transposed(q, k, v), (4,), **theirs)
    return work


def lengths_of(mean: int, total: int) -> list[int]:
    """Uneven lengths of about that mean, from a tenth to three times the mean, that sum to ``total``."""
    generator = torch.Generator().manual_seed(mean)
    found: list[int] = []
    while sum(found) < total:
        draw = float(torch.empty(1).exponential_(1.0, generator=generator)) * mean
        found.append(int(min(max(draw, mean / 10, 1), 3 * mean, total - sum(found))))
    return found


def packed(device: str, dtype: torch.dtype, shrunk: int) -> list[Work]:
    """Packed batches: uneven sequences, even ones beside our own dense rate, and a long one beside its parts."""
    total, works = 32768 // shrunk, []
    for mean in (max(mean // shrunk, 4) for mean in (500, 1000, 4000)):
        uneven, even = lengths_of(mean, total), [mean] * (total // mean)
        for kind, lengths, is_causal in (("uneven", uneven, True), ("even", even, True), ("even", even, False)):
            name = f"packed {kind}, mean {mean}, {sum(lengths)} tokens H16 D128{'' if is_causal else ' full'}"
            work, (q, k, v) = _packed(name, device, dtype, lengths, is_causal)
            works.append(work)
            if kind == "even":
                dense = [x.view(len(lengths), mean, 16, 128) for x in (q, k, v)]
                call = _bound(flash_attn_func, *dense, causal=is_causal)
                _also(work, "flashcore-dense", call, lambda x: x.flatten(0, 1))
    for is_causal in (True, False):
        long, short = 16384 // shrunk, max(200 // shrunk, 4)
        name = f"packed 1 x {long} and 63 x {short} tokens H16 D128{'' if is_causal else ' full'}"
        work, tensors = _packed(name, device, dtype, [long] + 63 * [short], is_causal)
        parts = [
            _varlen(device, [x[:long] for x in tensors], [long], is_causal),
            _varlen(device, [x[long:] for x in tensors], 63 * [short], is_causal),
        ]
        _also(work, "flashcore-parts", lambda parts=parts: [part() for part in parts], torch.cat)  # type: ignore[misc]
        works.append(work)
    return works


def _packed(
    name: str, device: str, dtype: torch.dtype, lengths: list[int], is_causal: bool
) -> tuple[Work, list[Tensor]]:
    """A packed batch of 16 heads of 128 elements, and its tensors ``(tokens, heads, head_dim)``."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _tensors(device, dtype, 1, (16, 16), sum(lengths), 128))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = document[q] == document[k]
        return seen & (q >= k) if is_causal else seen

    pairs = float(sum(n * (n + 1) // 2 if is_causal else n * n for n in lengths))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    work = Work(name, heads[0], heads[1], heads[2], {}, mask=mask, pairs=pairs)
    _also(work, OURS, _varlen(device, [q, k, v], lengths, is_causal))
    for version in (3, 4):

        def load(version: int = version) -> Call:
            cu, longest = _ends(lengths, device), max(lengths)
            return _bound(
                _flash_attention(version, "flash_attn_varlen_func"), q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu,
                max_seqlen_q=longest, max_seqlen_k=longest, causal=is_causal,
            )  # fmt: skip

        work.calls[f"fa{version}"], work.as_heads[f"fa{version}"] = load, _of_tokens
    return work, [q, k, v]


def _also(work: Work, name: str, call: Call, as_tokens: Callable[[Any], Tensor] = lambda x: x) -> None:
    """Adds a contestant whose result becomes ``(tokens, heads, head_dim)`` by ``as_tokens``."""
    work.calls[name], work.as_heads[name] = lambda: call, lambda out: _of_tokens(as_tokens(out))


def _of_tokens(out: Tensor) -> Tensor:
    return out.transpose(0, 1)[None]


def _ends(lengths: list[int], device: str) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _varlen(device: str, tensors: list[Tensor], lengths: list[int], is_causal: bool) -> Call:
    """FlashCore on a packed batch."""
    cu, longest = _ends(lengths, device), max(lengths)
    return _bound(flash_attn_varlen_func, *tensors, cu, cu, longest, longest, causal=is_causal)


def documents(
    device: str, dtype: torch.dtype, shrunk: int, length: int = 16384, heads: int = 16, dim: int = 128, count: int = 16
) -> Work:
    """Documents of uneven lengths in one sequence, under a causal mask; as a mask, and as a packed batch."""
    length //= shrunk
    lengths = lengths_of(length // count, length)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device, torch.int32)
    q, k, v = _tensors(device, dtype, 1, (heads, heads), length, dim)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[q] == document[k]) & (q >= k)

    ours: Callable[[], Call] = lambda: _bound(flex_attention, q, k, v, None, mask)  # noqa: E731
    name = f"{len(lengths)} documents causal H{heads} S{length} D{dim}"
    work = _simple(name, q, k, v, ours, mask=mask, transposed=False, sdpa=length <= 8192)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    _also(work, "flashcore-varlen", _varlen(device, rows, lengths, is_causal=True))
    return work


def bias(
    device: str, dtype: torch.dtype, shrunk: int, length: int = 4096, heads: int = 16, dim: int = 64,
    backends: tuple[str, ...] = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"),
) -> Work:  # fmt: skip
    """A tensor ``[1, heads, sequence, sequence]`` that is added to the scores."""
    length //= shrunk
    q, k, v = _tensors(device, dtype, 1, (heads, heads), length, dim)
    added = torch.randn(1, heads, length, length, device=device).to(dtype)
    ours: Callable[[], Call] = lambda: _bound(scaled_dot_product_attention, q, k, v, added)  # noqa: E731
    work = _simple(
        f"bias [1, {heads}, {length}, {length}] D{dim}", q, k, v, ours,
        score=lambda s, b, h, q, k: s + added[0, h, q, k], transposed=False, sdpa=not backends,
    )  # fmt: skip
    for backend in backends:
        work.calls[f"sdpa-{backend.split('_')[0].lower()}"] = _sdpa_peer(work, backend)
    return work


def on_cpu(dtype: torch.dtype = torch.float32, length: int = 2048, heads: int = 8, dim: int = 64) -> list[Work]:
    """Every feature, with PyTorch's SDPA and compiled FlexAttention as peers."""
    q, k, v = _tensors("cpu", dtype, 1, (heads, heads), length, dim)
    at = f"H{heads} S{length} D{dim}"
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
    relative = torch.randn(heads, 2 * length).to(dtype)
    buckets = torch.randn(32, heads)
    shown = torch.rand(1, 1, length, length) < 0.5
    sink = torch.randn(heads)

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * abs(q - k)

    def by_distance(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + relative[h, q - k + length]

    def t5(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = abs(q - k)
        ratio = torch.log(torch.maximum(distance, 0 * distance + 1).to(torch.float32) / 8) / math.log(16)
        far = torch.minimum(8 + (ratio * 8).to(torch.int32), 0 * distance + 15)
        bucket = torch.where(k > q, 16, 0) + torch.where(distance < 8, distance, far)
        return s + buckets[bucket, h]

    def random(b: Any, h: Any, q: Any, k: Any) -> Any:
        return shown[0, 0, q, k]

    def ours_flex(score: Any = None, mask: Any = None) -> Callable[[], Call]:
        return lambda: _bound(flex_attention, q, k, v, score, mask)

    dense = _simple(f"none {at}", q, k, v, lambda: _bound(scaled_dot_product_attention, q, k, v), transposed=False)
    return [
        dense,
        _simple(f"window 128 {at}", q, k, v, _of_flash_attn(q, k, v, window_size=(127, 0)), mask=window(128)),
        softcap("cpu", dtype, 4, length=length * 4, heads=heads, dim=dim),
        _simple(f"ALiBi {at}", q, k, v, _of_flash_attn(q, k, v, alibi_slopes=slopes), score=alibi),
        bias("cpu", dtype, 1, length, heads, dim, backends=()),
        _simple(
            f"boolean mask {at}", q, k, v, lambda: _bound(scaled_dot_product_attention, q, k, v, shown), mask=random,
            transposed=False,
        ),
        documents("cpu", dtype, 1, length, heads, dim, count=8),
        _simple(
            f"sinks window 128 {at}", q, k, v,
            _of_flash_attn(q, k, v, window_size=(127, 0), learnable_sink=sink), mask=window(128), sink=sink,
        ),
        _simple(f"relative bias {at}", q, k, v, ours_flex(by_distance), score=by_distance, transposed=False),
        _simple(f"T5 bias {at}", q, k, v, ours_flex(t5), score=t5, transposed=False),
    ]  # fmt: skip


def _decode(device: str, dtype: torch.dtype, shrunk: int) -> list[Work]:
    from ._decode import works

    return works(device, dtype, shrunk)


def _training(whole: bool) -> Callable[[str, torch.dtype, int], Iterable[Work]]:
    def made(device: str, dtype: torch.dtype, shrunk: int) -> Iterable[Work]:
        from ._training import works

        return works(device, dtype, shrunk, whole)

    return made


def _gpt(device: str, dtype: torch.dtype, shrunk: int) -> Iterable[Work]:
    from ._gpt import works

    return works(device, dtype, shrunk)


def _decode_on_cpu() -> Iterable[Work]:
    from ._decode import works_on_cpu

    return works_on_cpu()


def _training_on_cpu() -> Iterable[Work]:
    from ._training import works_on_cpu

    return works_on_cpu()


#: Suites that are raced on a GPU, with other problems on a CPU.
CPU_SUITES: dict[str, Callable[[], Iterable[Work]]] = {
    "decode": _decode_on_cpu,
    "backward": _training_on_cpu,
}

#: Suites by name. Each takes a device, a type and by how much to divide lengths.
GPU_SUITES: dict[str, Callable[[str, torch.dtype, int], Iterable[Work]]] = {
    "softcap": lambda device, dtype, shrunk: [softcap(device, dtype, shrunk)],
    "sinks": lambda device, dtype, shrunk: [sinks(device, dtype, shrunk)],
    "packed": packed,
    "documents": lambda device, dtype, shrunk: [documents(device, dtype, shrunk)],
    "bias": lambda device, dtype, shrunk: [bias(device, dtype, shrunk)],
    "decode": _decode,
    "backward": _training(whole=False),
    "step": _training(whole=True),
    "gpt": _gpt,
}


def works(
    suite: str, device: str, dtype: torch.dtype, shrunk: int = 1, draw: tuple[int, int] = (1, 1)
) -> Iterable[Work]:
    """The problems of a suite, with values. ``draw``: the seed and the number of random problems."""
    if suite == RANDOM_BACKWARD:
        from ._training import random_works

        return random_works(device, shrunk, *draw)
    if suite in (RANDOM_CPU, ROWS_CPU):
        from ._on_cpu import works as on_cpu_drawn

        return on_cpu_drawn(suite, *draw)
    if suite == "features":
        return on_cpu(dtype) if shrunk == 1 else on_cpu(dtype, 2048 // shrunk, 2, 32)
    return GPU_SUITES[suite](device, dtype, shrunk)
