"""Suites of random calls on the CPU, each between other PyTorch operations of the process.

``random-cpu`` draws shapes of 17 query rows and more. ``rows-cpu`` draws calls of 1 to 16 query rows, as in decoding,
half of them with a mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from flashcore_attn import scaled_dot_product_attention

from ._features import Call, Work, causal
from ._problem import OURS, RANDOM_CPU

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_DIMS = (32, 48, 64, 80, 96, 128)
#: The largest number of products of a call, and of elements of K: a call takes less than 0.1 s.
_MOST_PRODUCTS, _MOST_ELEMENTS = 1 << 30, 6_000_000


def works(suite: str, seed: int, count: int) -> Iterator[Work]:
    """``count`` calls that ``seed`` stands for."""
    draws = random.Random(seed)
    for _ in range(count):
        yield _work(draws, suite == RANDOM_CPU)


def _between(draws: random.Random, least: int, most: int) -> int:
    """A log-uniform whole number between two numbers, both included."""
    return min(int(least * ((most + 1) / least) ** draws.random()), most)


def _work(draws: random.Random, is_long: bool) -> Work:
    dim, kind = draws.choice(_DIMS), draws.choice(list(_DTYPES))
    while True:
        batch, kv_heads = _between(draws, 1, 4), _between(draws, 1, 8)
        heads = kv_heads * (_between(draws, 2, 8) if draws.random() < 0.5 else 1)
        rows = _between(draws, 17, 2048) if is_long else _between(draws, 1, 16)
        keys = rows if is_long and draws.random() < 0.5 else _between(draws, 17 if is_long else 32, 8192)
        mask = draws.choice(("", "causal") if is_long else ("", "", "boolean mask", "float mask"))
        keys = rows if mask == "causal" else keys
        products = batch * heads * rows * keys * dim
        if products <= _MOST_PRODUCTS and batch * kv_heads * keys * dim <= _MOST_ELEMENTS:
            break
    values = torch.Generator().manual_seed(draws.getrandbits(32))
    q, k, v = (
        torch.randn(batch, n, length, dim, generator=values).to(_DTYPES[kind])
        for n, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    of_heads = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
    of_rows = f"{rows}" if rows == keys else f"{rows}x{keys}"
    work = Work(f"B{batch} H{of_heads} S{of_rows} D{dim} {kind} {mask}".rstrip(), q, k, v, {})
    options: dict[str, Any] = {"enable_gqa": True} if heads != kv_heads else {}
    work.pairs = float(batch * rows * keys)
    if mask == "causal":
        options["is_causal"], work.mask, work.pairs = True, causal, batch * rows * (rows + 1) / 2
    elif mask == "boolean mask":
        shown = torch.rand(batch, 1, rows, keys, generator=values) < 0.7
        options["attn_mask"], work.mask = shown, lambda b, h, q, k: shown[b, 0, q, k]
    elif mask == "float mask":
        added = torch.randn(batch, 1, rows, keys, generator=values).to(_DTYPES[kind])
        options["attn_mask"], work.score = added, lambda s, b, h, q, k: s + added[b, 0, q, k]
    layer = torch.nn.Linear(256, 256)
    x = torch.randn(64, layer.in_features, generator=values)
    work.before = lambda: layer(x)

    def ours() -> Call:
        return lambda: scaled_dot_product_attention(q, k, v, **options)

    def peer() -> Call:
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    work.calls = {OURS: ours, "sdpa": peer}
    return work
