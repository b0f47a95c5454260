"""FlashCore as PyTorch's flash attention.

PyTorch's operators of flash attention have no kernels for the CPU: the overrides are installed there, so that the
operators, their derivatives and what is built on them run for real. On a GPU the overrides have PyTorch's place.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import flashcore_attn as fa  # noqa: E402

attention = torch.nn.attention
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("PyTorch takes no implementations of flash attention", allow_module_level=True)

from torch.nn.attention.varlen import varlen_attn  # noqa: E402

from flashcore_attn.engines import pytorch as engine  # noqa: E402

aten = torch.ops.aten
VARLEN = inspect.signature(varlen_attn).parameters
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def installed():
    handle = engine.install("CPU")
    yield handle
    handle.remove()
    with pytest.raises(NotImplementedError):
        aten._flash_attention_forward(*drawn(2, 4, 3, 8), None, None, 3, 3, 0.0, False, False)


def drawn(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(3)]


def varlen(*tensors, function=varlen_attn, window=(-1, -1), **named):
    """PyTorch's function; a release before 2.13 has no windows, and not all options."""
    named |= {"window_size": window} if "window_size" in VARLEN else {"is_causal": window == (-1, 0)}
    missing = [name for name in named if name not in VARLEN]
    if missing or ("window_size" not in VARLEN and window not in ((-1, -1), (-1, 0))):
        pytest.skip(f"varlen_attn of PyTorch {torch.__version__} lacks {missing or 'windows'}")
    return function(*tensors, **named)


def math(q, k, v, **options):
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return sdpa(q, k, v, **options)


def test_the_name_is_registered_and_not_active():
    assert engine.NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


def test_activation_installs_for_cuda_and_restores(monkeypatch):
    keys = []

    class Library:
        """Records what is registered."""

        def __init__(self, *namespace):
            assert namespace == ("aten", "IMPL")

        def impl(self, name, function, key, *, with_keyset):
            keys.append((name, key))
            assert with_keyset and callable(function) and hasattr(aten, name)

        def _destroy(self):
            keys.clear()

    monkeypatch.setattr(torch.library, "Library", Library)
    attention.activate_flash_attention_impl(engine.NAME)
    assert attention.current_flash_attention_impl() == engine.NAME
    # PyTorch before 2.12 has no `_flash_attention_forward_no_dropout_inplace`.
    known = {name for name in engine._OVERRIDES if hasattr(aten, name)}
    assert {key for _, key in keys} == {"CUDA"} and {name for name, _ in keys} == known and len(known) >= 4
    attention.restore_flash_attention_impl()
    assert not keys and attention.current_flash_attention_impl() is None


def test_the_operator_of_sdpa_and_its_derivative(installed):
    tensors = [x.requires_grad_() for x in drawn(2, 4, 9, 16)]
    made = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True, False, scale=0.3)
    meta = aten._scaled_dot_product_flash_attention(*(x.detach().to("meta") for x in tensors), 0.0, True, False)
    for ours, theirs in zip(made, meta):
        if isinstance(theirs, torch.Tensor):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        else:
            assert ours == theirs
    twins = [x.detach().clone().requires_grad_() for x in tensors]
    expected = math(*twins, is_causal=True, scale=0.3)
    torch.testing.assert_close(made[0], expected)
    d_out = drawn(2, 4, 9, 16)[0]
    made[0].backward(d_out)
    expected.backward(d_out)
    for ours, theirs in zip(tensors, twins):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        assert ours.grad.stride() == ours.stride()


def test_gradients_have_the_layout_of_their_tensors(installed):
    """``(batch, sequence, heads, dim)`` in memory, as most models have it."""
    tensors = [x.transpose(1, 2).detach().requires_grad_() for x in drawn(2, 9, 4, 16)]
    out, *_ = aten._scaled_dot_product_flash_attention(*tensors)
    assert out.stride() == tensors[0].stride()
    found = torch.autograd.grad(out.sum(), tensors)
    assert [x.stride() for x in found] == [x.stride() for x in tensors]
    expected = torch.autograd.grad(math(*tensors).sum(), tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_varlen_attn_and_its_gradients(installed, window):
    q, k, v = drawn(12, 4, 16)
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    tensors, twins = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    ours, lse = varlen(
        *tensors, starts, starts, 7, 7, window=window, scale=0.2, enable_gqa=True,
        return_aux=attention.varlen.AuxRequest(lse=True),
    )  # fmt: skip
    theirs, wanted = fa.flash_attn_varlen_func(
        *twins, starts, starts, 7, 7, softmax_scale=0.2, window_size=window, return_lse=True
    )
    assert torch.equal(ours, theirs) and torch.equal(lse, wanted)
    ours.sum().backward()
    theirs.sum().backward()
    for a, b in zip(tensors, twins):
        assert torch.equal(a.grad, b.grad) and b.grad.abs().max() > 0


@pytest.mark.parametrize("page", [1, 3, 16])
def test_varlen_attn_of_pages(installed, page):
    q = drawn(4, 4, 16)[0]
    used, starts = torch.tensor([7, 13], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    pages = -(-13 // page)
    _, k, v = drawn(2 * pages + 1, page, 2, 16)
    table = torch.randperm(2 * pages).to(torch.int32).reshape(2, pages)
    named = {"window": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
    with torch.no_grad():
        out = varlen(q, k, v, starts, None, 3, 13, **named)
        place = torch.empty_like(q)
        in_place = attention.varlen.varlen_attn_out
        written = varlen(place, q, k, v, starts, None, 3, 13, function=in_place, **named)
    for b, rows in enumerate((q[:1], q[1:])):
        keys, values = (x[table[b].long()].flatten(0, 1)[: used[b]] for x in (k, v))
        expected = fa.flash_attn_func(rows[None], keys[None], values[None], causal=True)[0]
        torch.testing.assert_close(out[starts[b] : starts[b + 1]], expected)
    assert written is place and torch.equal(place, out)


def test_a_call_that_is_not_supported_runs_in_pytorch_with_one_warning(monkeypatch):
    calls = []

    class Kernel:
        def call_boxed(self, keyset, *args, **kwargs):
            calls.append((args, kwargs))
            return "theirs"

    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Kernel())
    kernel = engine._override("_flash_attention_forward", engine._flash_attention_forward, "CUDA")
    q, k, v = drawn(2, 3, 4, 8)
    arguments = (q, k, v, None, None, 3, 3, 0.0, False, True)
    with pytest.warns(UserWarning, match="PyTorch's own kernel: invalid value 'True' for return_softmax") as caught:
        assert kernel(None, *arguments, scale=0.2) == kernel(None, *arguments, scale=0.2) == "theirs"
    assert len(caught) == 1 and len(calls) == 2 and calls[0] == (arguments, {"scale": 0.2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, *_ = kernel(None, *arguments[:9], False)
    assert torch.equal(out, fa.flash_attn_func(q, k, v))


def test_compiled_graphs_run_it(installed):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q, k, v):
        return aten._scaled_dot_product_flash_attention(q * 2, k, v, 0.0, True)[0].sin()

    tensors = [x.requires_grad_() for x in drawn(1, 2, 8, 16)]
    out = step(*tensors)
    torch.testing.assert_close(out, math(tensors[0] * 2, *tensors[1:], is_causal=True).sin())
    out.sum().backward()
    assert all(x.grad is not None for x in tensors)


RING = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as cp
import torch.distributed.tensor.experimental._context_parallel._attention as ring
from flashcore_attn.engines import pytorch

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()
handle = pytorch.install("CPU")
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
whole = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
d_out = torch.randn(1, 2, 32, 16)
grads = torch.autograd.grad(expected, whole, d_out)
# Each rank has one chunk from the start and one from the end, as PyTorch balances causal masks.
chunks = [rank, 2 * size - 1 - rank]
local = lambda x: torch.cat([x.chunk(2 * size, 2)[i] for i in chunks], 2).detach().contiguous()
ring._cp_options.enable_load_balance = True
q, k, v = (local(x) for x in whole)
out, lse, *rest = ring._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=True)
torch.testing.assert_close(out, local(expected), rtol=1e-4, atol=1e-5)
found = ring._scaled_dot_product_ring_flash_attention_backward(
    mesh, local(d_out), q, k, v, out, lse, *rest[:4], 0.0, True, *rest[4:6]
)
for ours, theirs in zip(found, grads):
    torch.testing.assert_close(ours, local(theirs), rtol=1e-4, atol=1e-5)
print("equal")
dist.destroy_process_group()
"""


def test_pytorchs_context_parallelism_runs_it(tmp_path):
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place.pop("MASTER_PORT", None)
    code = RING.replace('"gloo"', f'"gloo", init_method="file://{tmp_path}/store"')
    started = [
        subprocess.Popen([sys.executable, "-c", code.replace('store"', f'store", rank={rank}, world_size=2')],
                         env=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert "equal" in out


@pytest.mark.needs_cuda
def test_on_a_gpu_sdpa_and_varlen_attn_run_it():
    q, k, v = (x.cuda().half().requires_grad_() for x in drawn(2, 4, 200, 64))
    d_out = torch.randn_like(q)
    expected = math(q, k, v, is_causal=True)
    grads = torch.autograd.grad(expected, (q, k, v), d_out)
    attention.activate_flash_attention_impl(engine.NAME)
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = sdpa(q, k, v, is_causal=True)
            found = torch.autograd.grad(out, (q, k, v), d_out)
            assert torch.equal(out, fa.scaled_dot_product_attention(q, k, v, is_causal=True))
            starts = torch.tensor([0, 90, 200], dtype=torch.int32, device="cuda")
            packed = [x[0].transpose(0, 1).detach() for x in (q, k, v)]
            ours = varlen(*packed, starts, starts, 110, 110, window=(-1, 0))
            theirs = fa.flash_attn_varlen_func(*packed, starts, starts, 110, 110, causal=True)
            assert torch.equal(ours, theirs)
            dropped = sdpa(q, k, v, dropout_p=0.5)
            assert not torch.equal(dropped, sdpa(q, k, v))
    finally:
        attention.restore_flash_attention_impl()
    for ours, theirs in zip((out, *found), (expected, *grads)):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
