"""The suite ``decode``: one new query of each sequence against a cache in pages of 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashcore_attn import flash_attn_func, flash_attn_with_kvcache

from ._features import Call, Work, _bound, _heads_first, _sdpa_peer, _transposed
from ._problem import OURS

PAGE = 16


def _ragged(mean: int) -> list[int]:
    """64 lengths of 100 to 32k tokens; most are short with a small mean."""
    generator = torch.Generator().manual_seed(mean)
    drawn = torch.empty(64).exponential_(1.0, generator=generator) * mean
    return [int(min(max(x, 100), 32000)) for x in drawn.tolist()]


#: Name, lengths, query heads, key heads, head dim.
PROBLEMS: list[tuple[str, list[int], int, int, int]] = [
    *((f"B{b} x {n}", [n] * b, 32, 8, 128) for b, n in ((1, 1024), (1, 8192), (1, 131072), (16, 8192))),
    *((f"B{b} x {n}", [n] * b, 32, 8, 128) for b, n in ((64, 4096), (128, 1024))),
    ("B4 x 16384 H64/8", [16384] * 4, 64, 8, 128),
    ("B8 x 4096 H8/1", [4096] * 8, 8, 1, 128),
    ("B32 x 2048 H32/4", [2048] * 32, 32, 4, 128),
    ("B16 x 4096 H64/8 D64", [4096] * 16, 64, 8, 64),
    ("B16 x 4096 H16/8 D256", [4096] * 16, 16, 8, 256),
    ("64 ragged, mean 2000", _ragged(2000), 32, 8, 128),
    ("64 ragged, mean 8000", _ragged(8000), 32, 8, 128),
]


def works(device: str, dtype: torch.dtype, shrunk: int) -> list[Work]:
    """The problems one after another: their caches take gigabytes."""
    return [_work(device, dtype, name, [max(n // shrunk, 1) for n in lengths], *shape)
            for name, lengths, *shape in PROBLEMS]  # fmt: skip


def _work(device: str, dtype: torch.dtype, name: str, lengths: list[int], heads: int, heads_k: int, dim: int) -> Work:
    torch.manual_seed(0)
    batch, longest = len(lengths), max(lengths)
    shapes = [(batch, heads, 1, dim), *[(batch, heads_k, longest, dim)] * 2]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    pairs = float(sum(lengths))
    work = Work(f"decode {name}", q, k, v, {}, mask=lambda b, h, q, k: k < used[b], pairs=pairs)
    work.bytes = 2.0 * pairs * heads_k * dim * dtype.itemsize
    rows = _transposed(q, k, v)

    def paged() -> Call:
        table, pools = _pages(rows[1:])
        return _bound(flash_attn_with_kvcache, rows[0], *pools, cache_seqlens=used, page_table=table, causal=True)

    add: dict[str, Callable[[], Call]] = {OURS: paged}
    if min(lengths) == longest:
        add[f"{OURS}-dense"] = lambda: _bound(flash_attn_func, *rows)
        work.calls["sdpa-cudnn"] = _sdpa_dense(work)
    for kind in ("tensor-cores", "cuda-cores"):
        add[f"flashinfer-{kind}"] = _flashinfer(rows, lengths, kind == "tensor-cores")
    work.calls = add | work.calls
    work.as_heads.update(dict.fromkeys(add, _heads_first))
    return work


def _pages(caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The page table and both pools, whose pages are in random order."""
    batch, length, heads, dim = caches[0].shape
    each = -(-length // PAGE)
    order = torch.randperm(batch * each, device=caches[0].device)
    pools = []
    for cache in caches:
        pool = cache.new_zeros(batch * each, PAGE, heads, dim)
        padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, each * PAGE - length))
        pool[order] = padded.reshape(batch * each, PAGE, heads, dim)
        pools.append(pool)
    return order.reshape(batch, each).to(torch.int32), pools


def _sdpa_dense(work: Work) -> Callable[[], Call]:
    """PyTorch's SDPA through cuDNN, on the cache as dense rows; all keys are visible."""
    k, v = (_transposed(x)[0].transpose(1, 2) for x in (work.k, work.v))
    dense = Work(work.name, work.q, k, v, {})
    return _sdpa_peer(dense, "CUDNN_ATTENTION" if work.q.is_cuda else None)


def _flashinfer(rows: list[Tensor], lengths: list[int], tensor_cores: bool) -> Callable[[], Call]:
    """FlashInfer on the same pages; its plan of the batch, made on the host, is not timed."""

    def load() -> Call:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        table, pools = _pages(rows[1:])
        counts = [-(-n // PAGE) for n in lengths]
        device, heads_k, dim = rows[0].device, rows[1].shape[2], rows[1].shape[3]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ends = integers([0, *counts]).cumsum(0).to(torch.int32)
        pages = torch.cat([row[:count] for row, count in zip(table, counts)])
        last = integers([(n - 1) % PAGE + 1 for n in lengths])
        wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        types = {"q_data_type": rows[0].dtype, "kv_data_type": rows[0].dtype}
        wrapper.plan(ends, pages, last, rows[0].shape[2], heads_k, dim, PAGE, **types)
        q, cache = rows[0][:, 0].contiguous(), tuple(pools)
        return lambda: wrapper.run(q, cache)[:, None]

    return load
