"""Tests that need a GPU: streams, graphs, several devices, and the cost of a call."""

from __future__ import annotations

import time

import pytest
from conftest import OnlyDlpack

import flashcore_attn

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_cuda


def three(dtype=torch.float16, batch=2, heads=8, rows=512, dim=64, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    make = lambda: torch.randn(batch, heads, rows, dim, generator=generator, device="cuda").to(dtype)  # noqa: E731
    return make(), make(), make()


def exact(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())


def test_a_graph_captures_and_replays():
    q, k, v = three()
    flashcore_attn.scaled_dot_product_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashcore_attn.scaled_dot_product_attention(q, k, v)
    for seed in (1, 2):
        for tensor, fresh in zip((q, k, v), three(seed=seed)):
            tensor.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert (out.double() - exact(q, k, v)).abs().max().item() < 3e-3


def test_a_first_call_may_be_inside_a_capture():
    q, k, v = three(rows=333)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashcore_attn.scaled_dot_product_attention(q, k, v, scale=0.11)
    graph.replay()
    torch.cuda.synchronize()
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.11)
    assert (out.double() - want).abs().max().item() < 3e-3


def test_the_current_stream_is_used():
    """The inputs are written late on a side stream, so only a kernel on that stream sees them."""
    q, k, v = three(rows=256)
    fresh = three(rows=256, seed=3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for tensor, new in zip((q, k, v), fresh):
            tensor.copy_(new)
        out = flashcore_attn.scaled_dot_product_attention(q, k, v)
    side.synchronize()
    assert (out.double() - exact(*fresh)).abs().max().item() < 3e-3


def test_nothing_waits_for_the_device():
    q, k, v = three()
    flashcore_attn.scaled_dot_product_attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    start = time.perf_counter()
    flashcore_attn.scaled_dot_product_attention(q, k, v)
    waited = time.perf_counter() - start
    torch.cuda.synchronize()
    assert waited < 0.2


def test_equal_bits_from_run_to_run():
    q, k, v = three(torch.bfloat16)
    first = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert all(
        torch.equal(first, flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True)) for _ in range(20)
    )


def test_devices_may_not_be_mixed():
    q, k, v = three()
    with pytest.raises(ValueError, match="k is on cpu, q on cuda:0"):
        flashcore_attn.scaled_dot_product_attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="k is on cuda:0, q on cpu"):
        flashcore_attn.scaled_dot_product_attention(q.cpu(), k, v)


def test_what_no_kernel_computes_is_refused_and_leaves_the_device_usable():
    q, k, v = three()
    wide = torch.zeros(1, 1, 16, 600, dtype=torch.float16, device="cuda")
    with pytest.raises(NotImplementedError, match="invalid value '600' for head_dim"):
        flashcore_attn.scaled_dot_product_attention(wide, wide, wide)
    flashcore_attn.compat.reset_stats()
    with flashcore_attn.compat.enabled():
        torch.nn.functional.scaled_dot_product_attention(wide, wide, wide)
    assert list(flashcore_attn.compat.stats()["reasons"].values()) == [1]
    assert (flashcore_attn.scaled_dot_product_attention(q, k, v).double() - exact(q, k, v)).abs().max().item() < 3e-3


def test_negative_and_huge_strides():
    q, k, v = three(rows=64)
    huge = torch.empty((1 << 31) + 64 * 64, dtype=torch.float16, device="cuda")
    far = huge.as_strided((2, 8, 64, 64), (1 << 31, 0, 64, 1))
    far[:, 0].copy_(k[:, 0])
    out = flashcore_attn.scaled_dot_product_attention(q, far, v)
    assert (out.double() - exact(q, far, v)).abs().max().item() < 3e-3


def test_arrays_of_other_libraries():
    q, k, v = three()
    out = flashcore_attn.scaled_dot_product_attention(*(OnlyDlpack(x) for x in (q, k, v)))
    assert torch.equal(out, flashcore_attn.scaled_dot_product_attention(q, k, v))


def test_the_plan_is_told():
    q, k, v = (x.transpose(1, 2) for x in three())
    for asked in ({"causal": True}, {"window_size": (63, 0), "softcap": 20.0}):
        told = flashcore_attn.explain(q, k, v, **asked)
        assert told["registers"] > 0 and told["plan"] and told["why"]


def test_cost_of_a_call(capsys):
    """Prints the cost and asserts nothing. `python -m flashcore_bench host` measures it."""
    q, k, v = three(batch=1)
    for _ in range(100):
        flashcore_attn.scaled_dot_product_attention(q, k, v)
    torch.cuda.synchronize()
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            flashcore_attn.scaled_dot_product_attention(q, k, v)
        samples.append((time.perf_counter() - start) / 50 * 1e6)
        torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nenqueue through Python: {sorted(samples)[10]:.2f} us a call, output allocated")
