"""Tests of 8-bit caches with 16-bit queries, against attention to the widened cache, and on a GPU against the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import flashcore_attn as fa

torch = pytest.importorskip("torch")

HEADS, DIM, PAGE = 2, 64, 8
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
EVERY_TYPE = pytest.mark.parametrize(
    ("dtype", "eight"),
    [
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)


def made(dtype: Any, eight: Any, rows: int = 1, group: int = 4, dim: int = DIM) -> dict[str, Any]:
    """Three sequences in pages, and their descale factors."""
    generator = torch.Generator().manual_seed(rows + group + dim)
    pages, lengths = 16, [0, 13, 30]

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    return {
        "q": random(3, rows, group * HEADS, dim).to(dtype),
        "k_cache": random(pages, PAGE, HEADS, dim).to(eight),
        "v_cache": random(pages, PAGE, HEADS, dim).to(eight),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "page_table": torch.randperm(pages, generator=generator)[:15].reshape(3, 5).to(torch.int32),
        "k_descale": 0.5 + torch.rand(3, HEADS, generator=generator),
        "v_descale": 0.5 + torch.rand(1, 1, generator=generator).expand(3, HEADS),
    }


def on(case: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.items()}


def widened(case: dict[str, Any]) -> dict[str, Any]:
    """The call on a cache in float32, for each sequence in pages of its own, so that factors of heads fit."""
    case = dict(case)
    table = case["page_table"].long()
    for name in ("k", "v"):
        factors = case.pop(f"{name}_descale")[:, None, None, :, None]
        case[f"{name}_cache"] = (case[f"{name}_cache"].float()[table] * factors).flatten(0, 1)
    case["page_table"] = torch.arange(table.numel(), dtype=torch.int32).reshape(table.shape)
    return {**case, "q": case["q"].float()}


def close(found: Any, wanted: Any, dtype: Any) -> None:
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(found.float().cpu(), wanted, atol=tolerance, rtol=tolerance)


@EVERY_DEVICE
@EVERY_TYPE
@pytest.mark.parametrize(("rows", "group", "dim"), [(1, 4, 64), (1, 1, 128), (5, 8, 128), (2, 2, 256)])
def test_factors_and_types(device: str, dtype: Any, eight: Any, rows: int, group: int, dim: int) -> None:
    case = made(dtype, eight, rows, group, dim)
    for options in ({"causal": True}, {"window_size": (5, 0), "softcap": 3.0}):
        wanted, sums = fa.flash_attn_with_kvcache(**widened(case), **options, return_softmax_lse=True)
        out, lse = fa.flash_attn_with_kvcache(**on(case, device), **options, return_softmax_lse=True)
        assert out.dtype == dtype
        close(out, wanted, dtype)
        close(lse, sums, dtype)


@EVERY_DEVICE
def test_large_queries_fit(device: str) -> None:
    """f16 holds no number above 65504; kernels scale rows of bfloat16 by powers of two."""
    case = made(torch.bfloat16, torch.float8_e4m3fn)
    case["q"] *= 3e5
    case["softmax_scale"] = 1e-6
    wanted = fa.flash_attn_with_kvcache(**widened(case))
    close(fa.flash_attn_with_kvcache(**on(case, device)), wanted, torch.bfloat16)


@EVERY_DEVICE
@EVERY_TYPE
def test_rows_are_rounded_to_the_cache(device: str, dtype: Any, eight: Any) -> None:
    case, angles = made(dtype, eight, rows=2), torch.linspace(0, 3, 40 * 16).reshape(40, 16)
    torch.manual_seed(1)
    new = {"k": torch.randn(3, 2, HEADS, DIM).to(dtype), "v": torch.randn(3, 2, HEADS, DIM).to(dtype)}
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    wide = widened(case)
    wanted = fa.flash_attn_with_kvcache(**wide, **{name: x.float() for name, x in new.items()}, **rotary, causal=True)
    gpu = on(case, device)
    out = fa.flash_attn_with_kvcache(**gpu, **on({**new, **rotary}, device), causal=True)
    step = torch.finfo(eight).eps  # a row that is almost alone in its softmax is off by half of it, times its size
    torch.testing.assert_close(out.float().cpu(), wanted, atol=2 * step, rtol=step)
    table, lengths = case["page_table"].long(), case["cache_seqlens"].tolist()
    largest = torch.finfo(eight).max
    for b, length in enumerate(lengths):
        for i in range(2):
            page, row = int(table[b, (length + i) // PAGE]), (length + i) % PAGE
            value = new["v"][b, i].float() / case["v_descale"][b][:, None]
            expected = value.clamp(-largest, largest).to(eight)
            assert torch.equal(gpu["v_cache"][page, row].cpu().view(torch.uint8), expected.view(torch.uint8))
    if device == "cuda":
        host = on(case, "cpu")
        fa.flash_attn_with_kvcache(**host, **new, **rotary, causal=True)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(gpu[name].cpu().view(torch.uint8), host[name].view(torch.uint8))


def test_types_that_do_not_fit_are_refused() -> None:
    case = made(torch.float16, torch.float8_e4m3fn)
    for change in ({"v_cache": case["v_cache"].half()}, {"q": case["q"].float()}):
        with pytest.raises(fa.DTypeError):
            fa.flash_attn_with_kvcache(**{**case, **change})
    with pytest.raises(fa.DTypeError, match="k has dtype"):
        new = torch.zeros(3, 1, HEADS, DIM)
        fa.flash_attn_with_kvcache(**case, k=new, v=new)
