"""The folder that `cargo xtask hub` made, opened by the package `kernels` without a network."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(os.environ["FLASHCORE_HUB"])
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LOCAL_KERNELS"] = f"flashcore/attention={FOLDER}"

import kernels  # noqa: E402  (reads the environment)
import tvm_ffi  # noqa: E402

HUB = kernels.get_kernel("flashcore/attention", version=1)
SHAPES = [(2, 13, 4, 16), (2, 21, 2, 16), (2, 21, 2, 16)]
CLOSE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def drawn(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def reference(q, k, v, causal=False, softcap=0.0, sink=None):
    """(out, lse) in f32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=bool).tril(s.shape[-1] - s.shape[-2]), -math.inf)
    lse = s.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink[:, None])
    return ((s - lse[..., None]).exp() @ v).transpose(1, 2), lse


def test_a_folder_is_a_kernel_too():
    assert kernels.get_local_kernel(FOLDER).flash_attn_func is not None
    assert {path.name for path in (FOLDER / "build").iterdir()} == {
        f"tvm-ffi01-{backend}-{os.uname().machine}-linux" for backend in ("cpu", "cu120", "cu130")
    }


@pytest.mark.parametrize("dtype", CLOSE)
def test_results_and_gradients_are_those_of_pytorch(dtype):
    ours, theirs = ([x.requires_grad_() for x in drawn(dtype)] for _ in range(2))
    sinks = [torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2)]
    named = {"causal": True, "softcap": 3.0}
    out, lse, _ = HUB.flash_attn_func(*ours, **named, learnable_sink=sinks[0], return_attn_probs=True)
    expected, expected_lse = reference(*theirs, **named, sink=sinks[1])
    assert out.dtype == dtype
    weights = torch.randn(out.shape)
    for results in ((out, lse), (expected, expected_lse)):
        ((results[0].float() * weights).sum() + results[1].square().sum()).backward()
    pairs = [(out, expected), (lse, expected_lse), (sinks[0].grad, sinks[1].grad)]
    for a, b in pairs + [(x.grad, y.grad) for x, y in zip(ours, theirs)]:
        torch.testing.assert_close(a.float(), b.float(), atol=4 * CLOSE[dtype], rtol=2 * CLOSE[dtype])


def test_strided_tensors_are_read_in_place():
    packed = torch.randn(2, 9, 3, 4, 16)
    q, k, v = packed.unbind(2)
    torch.testing.assert_close(HUB.flash_attn_func(q, k, v), reference(q, k, v)[0], atol=2e-5, rtol=0)
    first, last = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    out = torch.empty(2, 4, 9, 16)
    HUB.attention("q k v out; heads_first", first, last, last, out)
    expected = reference(*(x.transpose(1, 2) for x in (first, last, last)))[0].transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


def test_packed_sequences_and_pages():
    q, k, v = (x[0] for x in drawn())
    starts, ends = torch.tensor([0, 4, 13], dtype=torch.int32), torch.tensor([0, 9, 21], dtype=torch.int32)
    out = HUB.flash_attn_varlen_func(q, k, v, starts, ends, 9, 12, causal=True)
    parts = [((0, 4), (0, 9)), ((4, 13), (9, 21))]
    expected = [reference(q[None, a:b], k[None, c:d], v[None, c:d], causal=True)[0][0] for (a, b), (c, d) in parts]
    torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=0)

    q, new_k, new_v = drawn(shapes=[(2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 2, 16)])
    pools = [torch.randn(8, 8, 2, 16) for _ in range(2)]
    table = torch.tensor([[3, 0, 7, 1], [2, 6, 5, 4]], dtype=torch.int32)
    lengths = torch.tensor([5, 11], dtype=torch.int32)
    out = HUB.flash_attn_with_kvcache(q, *pools, new_k, new_v, cache_seqlens=lengths, block_table=table)
    assert torch.equal(pools[0][3, 5], new_k[0, 0]) and torch.equal(pools[1][6, 3], new_v[1, 0])
    rows = [[pool[table[b]].flatten(0, 1)[None, : n + 1] for pool in pools] for b, n in enumerate((5, 11))]
    expected = torch.cat([reference(q[b, None], *rows[b])[0] for b in range(2)])
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_rows_go_to_their_slots(wide):
    new = [torch.randn(4, 2, 16) for _ in range(2)]
    caches = [torch.zeros(3, 8, 2, 16) for _ in range(2)]
    slots = torch.tensor([17, -1, 0, 9], dtype=wide)
    HUB.attention("k_new v_new slot_mapping k v; write_slots", *new, slots, *caches)
    for rows, cache in zip(new, caches):
        expected = torch.zeros_like(cache).flatten(0, 1)
        expected[slots[[0, 2, 3]].long()] = rows[[0, 2, 3]]
        assert torch.equal(cache.flatten(0, 1), expected)
    with pytest.raises(ValueError, match="'24' for the slot of slot_mapping: expected below 24"):
        HUB.attention("k_new v_new slot_mapping k v; write_slots", *new, slots + 7, *caches)
    with pytest.raises(ValueError, match="slot_mapping is missing: the problem has it"):
        HUB.attention("k_new v_new k v; write_slots", *new, *caches)
    with pytest.raises(ValueError, match="q is given, but the problem has none"):
        HUB.attention("q k_new v_new slot_mapping k v; write_slots", new[0], *new, slots, *caches)
    with pytest.raises(ValueError, match="slot_mapping is given, but the problem has none"):
        HUB.attention("q k v out slot_mapping", *[caches[0]] * 4, slots)


def test_transformers_finds_the_parameters_that_it_looks_for():
    import inspect

    wanted = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic"}
    for function in (HUB.flash_attn_func, HUB.flash_attn_varlen_func):
        assert wanted <= set(inspect.signature(function).parameters)
    assert {"cache_seqlens", "block_table", "page_table"} <= set(
        inspect.signature(HUB.flash_attn_with_kvcache).parameters
    )


def test_errors_are_those_of_tvm_ffi_and_name_the_argument():
    q, k, v = drawn()
    out = torch.empty_like(q)
    cases = [
        (("q k v out", q, k, v), "'3' for the number of the tensors: expected 4"),
        (("q k v banana", q, k, v, out), "'banana' for the name of a tensor of the call's text"),
        (("q k v out; causa", q, k, v, out), "'causa' for the item of the call's text: expected causal"),
        (("q k v out; softcap=x", q, k, v, out), "'x' for the item 'softcap' of the call's text"),
        (("q q v out", q, k, v, out), "q is given twice"),
        (("q k v out", q, k, v, out.double()), "'0x14002' for the dtype of out: expected 0x12002 (f32)"),
        (("q k v out", q, k, 3, out), "'type index 1' for the type of v: expected a tensor"),
        ((q, k, v), "for the type of the first argument: expected a string"),
        ((), "'0' for the number of the arguments"),
        (("q k v out", q, k[:, :, :1].expand(2, 21, 3, 16), v, out), "v has heads = 2, but k has 3"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError) as raised:
            HUB.attention(*arguments)
        assert words in str(raised.value), raised.value
    module = tvm_ffi.load_module(next((FOLDER / "build").glob("*cpu*")) / "libflashcore.so")
    assert module.workspace_size("q k v out", q, k, v, out) == 0 and module.prepare("q k v out", q, k, v, out) is None


def test_the_example_agrees_with_pytorch():
    example = Path(__file__).resolve().parents[1] / "examples/hub.py"
    ran = subprocess.run([sys.executable, example, FOLDER], capture_output=True, text=True)
    assert ran.stdout.startswith("the largest difference from PyTorch is "), ran.stderr
