"""The suite ``decode``: new queries of each sequence against a cache in pages, of 16 rows if unsaid."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashcore_attn import flash_attn_func, flash_attn_with_kvcache

from . import _cpu_peers
from ._features import Call, Work, _bound, _flash_attention, _heads_first, _sdpa_peer, _transposed
from ._problem import OURS

#: The factor of a cache in e4m3, which holds magnitudes up to 448. A power of two keeps products exact.
_FACTOR = 2.0**-6


def _ragged(mean: int) -> list[int]:
    """64 lengths of 100 to 32k tokens; most are short with a small mean."""
    generator = torch.Generator().manual_seed(mean)
    drawn = torch.empty(64).exponential_(1.0, generator=generator) * mean
    return [int(min(max(x, 100), 32000)) for x in drawn.tolist()]


class Problem(NamedTuple):
    """A problem of the suite."""

    name: str
    #: Keys of each sequence.
    lengths: list[int]
    heads: int = 32
    heads_k: int = 8
    dim: int = 128
    #: Rows of a page.
    page: int = 16
    #: Whether the cache is in e4m3, with a factor for each key head of a sequence.
    narrow: bool = False
    #: Keys that a query sees, its own among them; 0 for all.
    window: int = 0
    #: Queries of each sequence: its last positions, under a causal mask.
    rows: int = 1
    #: The first columns of a key that are its value, in latent attention; 0 for values of their own.
    value_dim: int = 0


PROBLEMS = [
    *(Problem(f"B{b} x {n}", [n] * b) for b, n in ((1, 1024), (1, 8192), (1, 131072), (16, 8192))),
    *(Problem(f"B{b} x {n}", [n] * b) for b, n in ((64, 4096), (128, 1024))),
    Problem("B4 x 16384 H64/8", [16384] * 4, 64),
    Problem("B8 x 4096 H8/1", [4096] * 8, 8, 1),
    Problem("B32 x 2048 H32/4", [2048] * 32, 32, 4),
    Problem("B16 x 4096 H64/8 D64", [4096] * 16, 64, 8, 64),
    Problem("B16 x 4096 H16/8 D256", [4096] * 16, 16, 8, 256),
    Problem("64 ragged, mean 2000", _ragged(2000)),
    Problem("64 ragged, mean 8000", _ragged(8000)),
    *(
        Problem(f"B{b} x {n} e4m3", [n] * b, narrow=True)
        for b, n in ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096))
    ),
    *(Problem(f"B16 x 8192 pages of {page}", [8192] * 16, page=page) for page in (64, 1)),
    Problem("B16 x 32768 window 128", [32768] * 16, window=128),
    Problem("B1 x 32768, 512 queries", [32768], rows=512),
    *(Problem(f"B{b} x {n} H16/2 D512", [n] * b, 16, 2, 512, 64) for b, n in ((1, 8192), (16, 4096))),
    *(
        Problem(f"B{b} x {n} H{heads} latent", [n] * b, heads, 1, 576, 64, value_dim=512)
        for b, n, heads in ((1, 8192, 16), (64, 4096, 16), (32, 4096, 128), (64, 4096, 128), (64, 4096, 64))
    ),
]


#: The problems on a CPU.
CPU_PROBLEMS = [
    *(Problem(f"B{b} x {n}", [n] * b) for b, n in ((1, 1024), (1, 8192), (16, 8192))),
    Problem("B4 x 4096 H32/32", [4096] * 4, 32, 32),
    Problem("B4 x 4096 H64/8 D64", [4096] * 4, 64, 8, 64),
    Problem("16 ragged, mean 2000", _ragged(2000)[:16]),
    *(Problem(f"B{b} x {n} e4m3", [n] * b, narrow=True) for b, n in ((1, 8192), (16, 8192))),
]


def works_on_cpu() -> Iterator[Work]:
    """The problems on a CPU, one after another, in bfloat16."""
    for problem in CPU_PROBLEMS:
        work = _work("cpu", torch.bfloat16, problem, problem.lengths)
        work.calls = {OURS: work.calls[OURS]}
        q, k, v = _transposed(work.q, work.k, work.v)
        if not problem.narrow and min(problem.lengths) == max(problem.lengths):
            work.calls["sdpa"] = _sdpa_dense(work)
            work.calls["llama.cpp"] = functools.partial(_cpu_peers.llama_cpp, q[:, 0], k, v)
        lengths = torch.tensor(problem.lengths, dtype=torch.int32)
        factor = _FACTOR if problem.narrow else 1.0
        work.calls["vllm"] = functools.partial(_cpu_peers.vllm, q[:, 0], k, v, lengths, factor)
        work.as_heads.update(dict.fromkeys(("llama.cpp", "vllm"), _heads_first))
        yield work


def works(device: str, dtype: torch.dtype, shrunk: int) -> list[Work]:
    """The problems one after another: their caches take gigabytes."""
    return [_work(device, dtype, problem, [max(n // shrunk, 1) for n in problem.lengths]) for problem in PROBLEMS]


def _work(device: str, dtype: torch.dtype, problem: Problem, lengths: list[int]) -> Work:
    torch.manual_seed(0)
    batch, longest, dim = len(lengths), max(lengths), problem.dim
    count = min(problem.rows, min(lengths))
    shapes = [(batch, problem.heads, count, dim), *[(batch, problem.heads_k, longest, dim)] * 2]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    if problem.value_dim:
        v = k[..., : problem.value_dim]
    factors = None
    if problem.narrow:
        factors = torch.full((batch, problem.heads_k), _FACTOR, device=device)
        k, v = ((x / _FACTOR).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    seen = problem.window or longest

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        after = used[b] - count + q - k
        return (after >= 0) & (after < seen)

    pairs = float(sum(min(n - i, seen) for n in lengths for i in range(count)))
    keys, values = (x if factors is None else x.to(dtype) * _FACTOR for x in (k, v))
    work = Work(f"decode {problem.name}", q, keys, values, {}, mask=mask, pairs=pairs)
    read = float(sum(min(n, seen + count - 1) for n in lengths))
    if count == 1:
        work.bytes = (1.0 if problem.value_dim else 2.0) * read * problem.heads_k * dim * k.element_size()
    rows = _transposed(q, k, v)
    options: dict[str, Any] = {"cache_seqlens": used, "causal": True}
    if problem.window:
        options["window_size"] = (problem.window - 1, 0)
    if factors is not None:
        options |= {"k_descale": factors, "v_descale": factors}

    def paged(function: Callable[[], Any], **more: Any) -> Callable[[], Call]:
        def load() -> Call:
            table, pools = _pages(rows[1:2] if problem.value_dim else rows[1:], problem.page)
            if problem.value_dim:
                pools.append(pools[0][..., : problem.value_dim])
            return _bound(function(), rows[0], *pools, page_table=table, **options, **more)

        return load

    add: dict[str, Callable[[], Call]] = {OURS: paged(lambda: flash_attn_with_kvcache)}
    if dim <= 256:
        # The kernel of "batch" is the same one.
        add[f"{OURS}-invariant"] = paged(lambda: flash_attn_with_kvcache, invariant="phase")
    if factors is None and dim <= 256:
        add["fa3"] = paged(lambda: _flash_attention(3, "flash_attn_with_kvcache"))
    if factors is not None:
        add["flashinfer-tensor-cores"] = _flashinfer(rows, lengths, True, problem.page, _FACTOR)
    elif not problem.window and not problem.value_dim and count == 1:
        if min(lengths) == longest and problem.page == 16:
            add[f"{OURS}-dense"] = lambda: _bound(flash_attn_func, *rows)
            work.calls["sdpa-cudnn"] = _sdpa_dense(work)
        for kind in ("tensor-cores", "cuda-cores"):
            add[f"flashinfer-{kind}"] = _flashinfer(rows, lengths, kind == "tensor-cores", problem.page)
    work.calls = add | work.calls
    work.as_heads.update(dict.fromkeys(add, _heads_first))
    return work


def _pages(caches: list[Tensor], page: int) -> tuple[Tensor, list[Tensor]]:
    """The page table and both pools, whose pages are in random order."""
    batch, length, heads, _ = caches[0].shape
    each = -(-length // page)
    order = torch.randperm(batch * each, device=caches[0].device)
    pools = []
    for cache in caches:
        # As bytes: PyTorch does not assign 8-bit floats by index.
        as_bytes = cache.view(torch.uint8)
        pool = as_bytes.new_zeros(batch * each, page, heads, as_bytes.shape[3])
        padded = torch.nn.functional.pad(as_bytes, (0, 0, 0, 0, 0, each * page - length))
        pool[order] = padded.reshape(pool.shape)
        pools.append(pool.view(cache.dtype))
    return order.reshape(batch, each).to(torch.int32), pools


def _sdpa_dense(work: Work) -> Callable[[], Call]:
    """PyTorch's SDPA through cuDNN, on the cache as dense rows; all keys are visible."""
    k, v = (_transposed(x)[0].transpose(1, 2) for x in (work.k, work.v))
    dense = Work(work.name, work.q, k, v, {})
    return _sdpa_peer(dense, "CUDNN_ATTENTION" if work.q.is_cuda else None)


def _flashinfer(
    rows: list[Tensor], lengths: list[int], tensor_cores: bool, page: int, factor: float = 1.0
) -> Callable[[], Call]:
    """FlashInfer on the same pages; its plan of the batch, made on the host, is not timed. ``factor`` is that of an
    8-bit cache."""

    def load() -> Call:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        table, pools = _pages(rows[1:], page)
        counts = [-(-n // page) for n in lengths]
        device, heads_k, dim = rows[0].device, rows[1].shape[2], rows[1].shape[3]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ends = integers([0, *counts]).cumsum(0).to(torch.int32)
        pages = torch.cat([row[:count] for row, count in zip(table, counts)])
        last = integers([(n - 1) % page + 1 for n in lengths])
        wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        types = {"q_data_type": rows[0].dtype, "kv_data_type": rows[1].dtype}
        wrapper.plan(ends, pages, last, rows[0].shape[2], heads_k, dim, page, **types)
        q, cache = rows[0][:, 0].contiguous(), tuple(pools)
        scales = {} if factor == 1.0 else {"k_scale": factor, "v_scale": factor}
        return lambda: wrapper.run(q, cache, **scales)[:, None]

    return load
