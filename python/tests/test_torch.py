"""PyTorch tensors, on the CPU and on a GPU, against attention in float64 and against PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import OnlyDlpack

import flashcore_attn

torch = pytest.importorskip("torch")
F = torch.nn.functional
TORCH_SDPA = F.scaled_dot_product_attention

CUDA = pytest.param("cuda", marks=pytest.mark.needs_cuda)
DEVICES = ["cpu", CUDA]
# On the CPU one type and one dimension are enough, because tests/test_numpy.py runs the kernels on all of
# them.
CASES = [("cpu", torch.float32, 64), ("cpu", torch.bfloat16, 64)] + [
    pytest.param("cuda", dtype, dim, marks=pytest.mark.needs_cuda)
    for dtype in (torch.float16, torch.bfloat16)
    for dim in (64, 128, 256, 40, 59, 512)
]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def three(device, dtype, rows=96, keys=96, heads=4, heads_k=4, dim=64, batch=2, transposed=False):
    """q, k and v as (batch, heads, sequence, dim), dense in that order, or in FlashAttention's if transposed."""

    def make(h, s, seed):
        if transposed:
            return draw(batch, s, h, dim, dtype=dtype, device=device, seed=seed).transpose(1, 2)
        return draw(batch, h, s, dim, dtype=dtype, device=device, seed=seed)

    return make(heads, rows, 1), make(heads_k, keys, 2), make(heads_k, keys, 3)


def reference(q, k, v, causal=False, scale=None, top_left=False):
    """Attention in float64 of (batch, heads, sequence, dim) tensors, and its log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = scores.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(0 if top_left else keys - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def close(ours, exact, dtype):
    worst = (ours.double() - exact).abs().max().item()
    assert worst <= TOLERANCE[dtype], worst


@pytest.fixture
def matmul_precision():
    """Sets PyTorch's precision of float32 matrix products, and restores it."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_products_in_tf32_follow_pytorch(matmul_precision):
    from flashcore_attn import _cuda

    for precision, code in (("highest", 0x2222), ("high", 0x12222), ("medium", 0x12222)):
        matmul_precision(precision)
        assert _cuda._code(torch.float32) == code and _cuda._code(torch.bfloat16) == 0x1111
        x = torch.zeros(1, 1, 1, 8)
        assert _cuda.codes(x, x, x) == (code, torch.float32)
    matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = True
    assert _cuda._code(torch.float32) == 0x12222


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dim", [64, 128, 59, 256])
def test_products_in_tf32(dim, matmul_precision):
    q, k, v = three("cuda", torch.float32, rows=300, keys=517, heads_k=2, dim=dim)
    exact, _ = reference(q, k, v)
    attend = lambda: flashcore_attn.scaled_dot_product_attention(q, k, v, enable_gqa=True).double()  # noqa: E731
    in_full = attend()
    matmul_precision("high")
    rounded = attend()
    assert (in_full - exact).abs().max().item() < 1e-5
    assert 1e-5 < (rounded - exact).abs().max().item() < 3e-3


@pytest.mark.parametrize(("device", "dtype", "dim"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "heads_k"), [(512, 512, 8, 8), (77, 300, 8, 2), (130, 65, 4, 1), (1, 1000, 4, 4)]
)
def test_flash_attn_func(device, dtype, dim, causal, rows, keys, heads, heads_k):
    q, k, v = three(device, dtype, rows, keys, heads, heads_k, dim, transposed=True)
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, _ = flashcore_attn.flash_attn_func(*arguments, causal=causal, return_attn_probs=True)
    exact, exact_lse = reference(q, k, v, causal)
    assert out.dtype == dtype and out.device == q.device and out.shape == arguments[0].shape and out.is_contiguous()
    close(out.transpose(1, 2), exact, dtype)
    assert lse.dtype == torch.float32 and lse.shape == (2, heads, rows)
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-3, rtol=1e-5)
    alone = flashcore_attn.flash_attn_func(*arguments, causal=causal)
    assert torch.equal(flashcore_attn.flash_attn_func(*arguments, causal=causal), alone), (
        "bits are the same from run to run"
    )
    # On a CPU, 16-bit numbers may be multiplied as integers if the log-sum-exp is not requested.
    if device == "cpu" and dtype != torch.float32:
        close(alone.transpose(1, 2), exact, dtype)
    else:
        assert torch.equal(alone, out), "with and without the log-sum-exp, bits are the same"


@pytest.mark.parametrize(("device", "dtype", "dim"), CASES)
@pytest.mark.parametrize(("rows", "keys"), [(96, 96), (50, 200), (200, 50)])
@pytest.mark.parametrize("transposed", [False, True])
def test_sdpa(device, dtype, dim, rows, keys, transposed):
    q, k, v = three(device, dtype, rows, keys, 8, 2, dim, transposed=transposed)
    for causal in (False, True):
        out = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True)
        close(out, reference(q, k, v, causal, 0.2, top_left=True)[0], dtype)
        assert out.stride() == q.stride(), "the output is in q's order in memory"


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_every_kind(device):
    dtype = torch.bfloat16
    packed = draw(2, 100, 3, 4, 64, dtype=dtype, device=device)
    padded = draw(2, 4, 100, 72, dtype=dtype, device=device)[..., :64]
    odd = draw(2, 4, 100, 67, dtype=dtype, device=device)[..., 1:65]  # rows at no multiple of 16 bytes
    off = draw(2 * 4 * 100 * 64 + 1, dtype=dtype, device=device)[1:].view(2, 4, 100, 64)  # neither is the address
    views = {
        "packed": [packed[:, :, i].transpose(1, 2) for i in range(3)],
        "padded rows": [padded] * 3,
        "misaligned rows": [odd] * 3,
        "misaligned address": [off, off, off],
        "broadcast heads": [padded, padded[:, :1].expand(2, 4, 100, 64), padded[:1].expand(2, 4, 100, 64)],
        "last dimension strided": [draw(2, 4, 64, 100, dtype=dtype, device=device).mT] * 3,
        "every other row": [padded[:, :, ::2]] * 3,
    }
    for name, (q, k, v) in views.items():
        out = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True)
        worst = (out.double() - reference(q, k, v, True)[0]).abs().max().item()
        assert worst <= TOLERANCE[dtype], (name, worst)


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_of_an_expanded_q_has_contiguous_rows(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    k = draw(1, 7, 2, 64, dtype=torch.float32, device=device)
    column = draw(1, 64, 1, dtype=torch.float32, device=device)
    q = column.transpose(1, 2)[:, None].expand(1, 2, 1, 64).transpose(1, 2)
    assert q.stride(3) == 1 and torch.empty_like(q).stride(3) == 2
    out = flashcore_attn.flash_attn_func(q, k, k)
    assert out.stride(3) == 1
    torch.testing.assert_close(out, flashcore_attn.flash_attn_func(q.contiguous(), k, k))
    with FakeTensorMode() as mode:
        fake = flashcore_attn.flash_attn_func(*(mode.from_tensor(x) for x in (q, k, k)))
    assert fake.stride() == out.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [
    ((6, 32), (7, 32), (7, 32)), ((3, 6, 32), (3, 7, 32), (3, 7, 32)), ((5, 1, 3, 6, 32), (2, 3, 7, 32), (7, 32)),
    ((2, 3, 6, 32), (2, 1, 7, 32), (1, 3, 7, 32)),
])  # fmt: skip
def test_shapes_broadcast_as_in_pytorch(device, shapes):
    q, k, v = (draw(*shape, dtype=torch.float16, device=device, seed=i) for i, shape in enumerate(shapes))
    out = flashcore_attn.scaled_dot_product_attention(q, k, v)
    wide = TORCH_SDPA(q.double(), k.double(), v.double())
    assert out.shape == wide.shape
    close(out, wide, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_without_a_break(device, causal):
    dtype = torch.float16
    q, k, v = three(device, dtype, transposed=True)

    def layer(q, k, v):
        out = flashcore_attn.scaled_dot_product_attention(q * 1.0, k, v, is_causal=causal)
        flash, lse, _ = flashcore_attn.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=causal, return_attn_probs=True
        )
        return out + flash.transpose(1, 2), lse

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    with torch.no_grad():
        out, lse = compiled(q, k, v)
        exact, exact_lse = layer(q, k, v)
    torch.testing.assert_close(out, exact)
    assert torch.equal(lse, exact_lse) and out.stride() == exact.stride()


def test_compiled_with_shapes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(
        flashcore_attn.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (5, 64, 77):
        q, k, v = three("cpu", torch.float32, rows, rows)
        close(compiled(q, k, v), reference(q, k, v)[0], torch.float32)


def test_compiled_first_thing_in_a_process():
    """Compiled before any eager call, with PyTorch imported after FlashCore."""
    code = """
import flashcore_attn, torch
q = torch.randn(1, 2, 8, 16)
f = torch.compile(lambda q: flashcore_attn.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="aot_eager")
print((f(q) - torch.nn.functional.scaled_dot_product_attention(q, q, q)).abs().max().item() < 1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@pytest.mark.parametrize("device", DEVICES)
def test_operator_passes_pytorchs_own_checks(device):
    from torch import library

    q, k, v = three(device, torch.float16, 33, 33, dim=32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for want_lse in (False, True):
        flashcore_attn.scaled_dot_product_attention(q, k, v)
        for terms in [(False, -1, -1, None, 0.0), (True, -1, 0, 0.3, 0.0), (False, 5, 2, None, 3.0)]:
            library.opcheck(torch.ops.flashcore_attn.attention, (q, k, v, 1, *terms, want_lse), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
def test_fake_and_meta_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = three(device, torch.float16, transposed=True)
    real = flashcore_attn.scaled_dot_product_attention(q, k, v)
    with FakeTensorMode() as mode:
        fake = flashcore_attn.scaled_dot_product_attention(*(mode.from_tensor(x) for x in (q, k, v)))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    meta = flashcore_attn.scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v)))
    assert meta.is_meta and meta.shape == real.shape


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q, k, v = three(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        assert flashcore_attn.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        mask = torch.randn(q.shape[2], k.shape[2], device=device, dtype=torch.float16)
        theirs = TORCH_SDPA(q, k, v, mask).float()
        close(flashcore_attn.scaled_dot_product_attention(q, k, v, mask), theirs, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_without_gradients_record_nothing(device):
    q, k, v = three(device, torch.float16)
    assert flashcore_attn.scaled_dot_product_attention(q, k.requires_grad_(), v).requires_grad
    with torch.no_grad():
        assert not flashcore_attn.scaled_dot_product_attention(q, k, v).requires_grad
    parameter = torch.nn.Parameter(q)
    with torch.inference_mode():
        flashcore_attn.scaled_dot_product_attention(parameter, k, v)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    q, k, v = three(device, torch.float16)
    assert flashcore_attn.scaled_dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, 4, 96, 64)
    assert flashcore_attn.scaled_dot_product_attention(q[:, :, :0], k, v).shape == (2, 4, 0, 64)
    x = [t.transpose(1, 2) for t in (q, k[:, :, :0], v[:, :, :0])]
    out, lse, _ = flashcore_attn.flash_attn_func(*x, return_attn_probs=True)
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("device", DEVICES)
def test_refusals(device):
    q, k, v = three(device, torch.float16)
    refuse = [
        ((q, k.float(), v), TypeError, "k has dtype torch.float32, but q has torch.float16"),
        (
            (q.double(), k.double(), v.double()),
            TypeError,
            "for the dtype of q: expected torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn",
        ),
        ((q, k[..., :32], v), ValueError, "k has head_dim = 32, but q has 64"),
        ((q, k[:, :, :5], v), ValueError, "v has sequence length = 96, but k has 5"),
        ((q, k[:, :3], v[:, :3]), ValueError, "do not broadcast"),
        ((q, None, v), ValueError, "k is a NoneType"),
    ]
    for arguments, error, words in refuse:
        with pytest.raises(error, match=words):
            flashcore_attn.scaled_dot_product_attention(*arguments)
    with pytest.raises(
        NotImplementedError, match="^invalid value 'torch.sparse_coo' for the layout of q: expected torch.strided"
    ):
        flashcore_attn.flash_attn_func(q.to_sparse(), k, v)
    with pytest.raises(ValueError, match="invalid value 'inf' for softmax_scale: expected a finite number"):
        flashcore_attn.flash_attn_func(q, k, v, softmax_scale=float("inf"))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_other_layouts_and_arrays_for_numbers_are_named():
    q, two = draw(2, 4, 4, 8), torch.tensor([0.0, 0.0])
    nested = torch.nested.nested_tensor([q[0], q[1, :, :3]])
    sdpa, call = flashcore_attn.scaled_dot_product_attention, flashcore_attn.flash_attn_func
    sparse = torch.eye(4).to_sparse()
    for refused, name in (
        (lambda: sdpa(nested, nested, nested), "the layout of query"),
        (lambda: flashcore_attn.flex_attention(nested, nested, nested), "the layout of query"),
        (lambda: sdpa(q, q, q, nested), "the layout of attn_mask"),
        (lambda: sdpa(q, q, q, sparse), "the layout of attn_mask"),
        (lambda: call(q, q, q, alibi_slopes=sparse[0]), "the layout of alibi_slopes"),
        (lambda: call(q, q, q, learnable_sink=sparse[0]), "the layout of learnable_sink"),
        (lambda: call(q, q, q, softmax_scale=two), "softmax_scale"),
        (lambda: sdpa(q, q, q, scale=two.numpy()), "scale"),
        (lambda: sdpa(q, q, q, scale="1"), "scale"),
        (lambda: call(q, q, q, dropout_p=two), "dropout_p"),
    ):
        with pytest.raises(flashcore_attn.FlashCoreError, match=f"invalid value .* for {name}"):
            refused()

    @torch.compile(backend="eager")
    def compiled(q, mask):
        return sdpa(q, q, q, mask, is_causal=True)

    with pytest.raises(flashcore_attn.ArgumentError, match="invalid value 'True' for is_causal"):
        compiled(q, torch.ones(4, 4, dtype=torch.bool))


def test_arrays_without_a_view_are_named():
    for tensor in (draw(1, 4, 2, 8).bfloat16(), draw(1, 4, 2, 8).requires_grad_()):
        with pytest.raises(flashcore_attn.UnsupportedError, match="^q cannot be viewed as an array"):
            flashcore_attn.flash_attn_func(*[OnlyDlpack(tensor)] * 3)


def test_what_a_gpu_lacks_is_known_beforehand(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flashcore_attn import _flashcore, _torch

    asked = []
    monkeypatch.setattr(_flashcore, "check_gpu", asked.append)
    with FakeTensorMode():

        def lacks(dtype, dim, dim_v=64):
            make = lambda dim: torch.empty(1, 2, 8, dim, dtype=dtype, device="cuda:0")  # noqa: E731
            return _torch.lacks(make(dim), make(dim), make(dim_v))

        assert [lacks(torch.float16, *dims) for dims in ((580,), (64, 520))] == ["head_dim"] * 2
        assert asked == []
        assert [lacks(torch.float16, 8), lacks(torch.bfloat16, 256, 40), asked] == [None, None, [0, 0]]
        with monkeypatch.context() as autocast:  # without a GPU PyTorch turns it off
            autocast.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
            autocast.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
            assert lacks(torch.float32, 64) is None

        def refuse(ordinal):
            raise flashcore_attn.UnsupportedError("invalid value 'sm_75' for device: expected sm_80")

        monkeypatch.setattr(_flashcore, "check_gpu", refuse)
        assert lacks(torch.float16, 64) == "UnsupportedError"


@pytest.mark.filterwarnings("ignore")  # PyTorch's own warning that tracing to TorchScript is deprecated
def test_traced_by_torch_jit(slow_path):
    inputs, others = three("cpu", torch.float32), [x.roll(1, 1) for x in three("cpu", torch.float32)]
    traced = torch.jit.trace(lambda q, k, v: flashcore_attn.scaled_dot_product_attention(q, k, v), inputs)
    assert "flashcore_attn::attention" in str(traced.graph)
    close(traced(*others), reference(*others)[0], torch.float32)
    with flashcore_attn.compat.enabled():
        traced = torch.jit.trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), inputs)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert set(flashcore_attn.compat.stats()["reasons"]) == {"tracing"}


@pytest.mark.filterwarnings("ignore")
def test_a_trace_serves_masks_of_other_shapes():
    def attention(q, mask):
        return flashcore_attn.scaled_dot_product_attention(q, q, q, mask)

    q = torch.randn(2, 2, 6, 16)
    every = torch.rand(2, 2, 6, 6) < 0.7
    for shape in ((2, 1, 1, 6), (1, 1, 6, 6), (6, 6)):
        traced = torch.jit.trace(attention, (q, torch.ones(shape, dtype=torch.bool)))
        for mask in (every[: shape[0], :1] if len(shape) == 4 else every[0, 0], every[:, :, :1]):
            if mask.ndim == len(shape):
                close(traced(q, mask), attention(q, mask), torch.float32)
    traced = torch.jit.trace(attention, (q[:1], every[:1, :1]))
    close(traced(q, every[:, :1]), attention(q, every[:, :1]), torch.float32)


def test_the_operator_checks_what_it_reads():
    q, starts = torch.randn(1, 9, 2, 16), torch.tensor([0, 4, 9, 99], dtype=torch.int32)

    def call(starts=None, batch=0, sink=None, scale=None, rows=0):
        return torch.ops.flashcore_attn.attention_with(
            q, q, q, 2, False, -1, -1, None, 0.0, False, starts, starts, None, None, None, batch, 9, 9, sink, "", "",
            [], [], [], scale, None, None, [rows, 0, 0],
        )[0]  # fmt: skip

    strided = torch.tensor([0, -5, 4, -5, 9], dtype=torch.int32)[::2]  # as slices of `torch.vmap`
    assert torch.equal(call(strided, 2), call(starts[:3], 2))
    assert torch.equal(call(sink=torch.tensor([0.5, -9.0, 1.5])[::2]), call(sink=torch.tensor([0.5, 1.5])))
    refused = [
        ({"starts": starts[:3], "batch": 3}, ValueError, "cu_seqlens_q has shape (3,); expected (4,)"),
        ({"starts": starts[:3].long(), "batch": 2}, TypeError, "the dtype of cu_seqlens_q"),
        ({"starts": starts[None, :3], "batch": 2}, ValueError, "cu_seqlens_q has shape (1, 3)"),
        ({"sink": torch.ones(1)}, ValueError, "the shape of sink"),
        ({"sink": torch.ones(2).half()}, TypeError, "the dtype of sink"),
        ({"scale": torch.ones(1, 1)}, ValueError, "the shape of descale_q"),
        ({"scale": torch.ones(1, 2), "rows": 64}, ValueError, "the shape of descale_q"),
    ]
    for arguments, error, words in refused:
        with pytest.raises(error, match=re.escape(words)):
            call(**arguments)


def test_forward_mode_derivatives_are_refused(slow_path):
    from torch.autograd import forward_ad
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = three("cpu", torch.float32, 8, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flashcore_attn.scaled_dot_product_attention(dual, k, v)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flashcore_attn.scaled_dot_product_attention(q, k, v), (q,), (q,))
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's own derivatives
        expected = torch.func.jvp(lambda q: TORCH_SDPA(q, k, v), (q,), (q,))
        with flashcore_attn.compat.enabled():
            ours = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (q,))
    torch.testing.assert_close(ours, expected)
    assert flashcore_attn.compat.stats()["reasons"] == {"forward_ad": 1}


def ran(code):
    """The output of a program that runs in its own process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_an_old_pytorch_is_refused_by_name():
    code = """
import torch, flashcore_attn
torch.__version__ = torch.torch_version.TorchVersion("2.4.1")
q = torch.ones(1, 1, 4, 8)
for call in (flashcore_attn.scaled_dot_product_attention, lambda *_: flashcore_attn.compat.enable()):
    try:
        call(q, q, q)
    except flashcore_attn.UnsupportedError as error:
        print(error)
print(flashcore_attn.doctor()["torch"])
"""
    told = ran(code)
    assert told.count("PyTorch 2.4.1 is too old; needed is 2.5 or later") >= 3, told


@pytest.mark.parametrize("lazy", [torch.device("meta"), "fake"])
def test_shapes_of_tensors_without_memory_are_checked(lazy):
    def messages(make):
        found = []
        for k, v in (
            ((3, 7, 2, 16), (3, 7, 2, 16)), ((2, 7, 2, 8), (2, 7, 2, 16)), ((2, 7, 3, 16), (2, 7, 3, 16)),
            ((2, 7, 2, 16), (2, 7, 4, 16)), ((2, 7, 2, 16), (2, 6, 2, 16)),
        ):  # fmt: skip
            with pytest.raises(flashcore_attn.ArgumentError) as error:
                flashcore_attn.flash_attn_func(make(2, 5, 4, 16), make(*k), make(*v))
            found.append(str(error.value))
        return found

    expected = messages(torch.zeros)
    if lazy == "fake":
        with torch._subclasses.fake_tensor.FakeTensorMode():
            assert messages(torch.zeros) == expected
    else:
        assert messages(lambda *shape: torch.zeros(shape, device=lazy)) == expected
    used = torch.zeros(2, dtype=torch.int32, device="meta")
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    q, k = torch.zeros(9, 4, 16, device="meta"), torch.zeros(2, 7, 4, 16, device="meta")
    assert flashcore_attn.flash_attn_varlen_func(q, k, k, starts, None, seqused_k=used).shape == q.shape


def test_an_exported_program_takes_other_types():
    class Layer(torch.nn.Module):
        def forward(self, q):
            return flashcore_attn.scaled_dot_product_attention(q, q, q)

    q = draw(1, 2, 8, 16)
    with torch.no_grad():
        program = torch.export.export(Layer(), (q,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in targets if "getitem" not in name] == ["flashcore_attn.attention.default"]


def test_grouped_heads_without_a_batch():
    q, k, v = draw(4, 5, 8, seed=1), draw(2, 7, 8, seed=2), draw(2, 7, 8, seed=3)
    mask = draw(4, 5, 7, seed=4)
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
        ours = flashcore_attn.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs)


def test_flop_are_counted_as_those_of_pytorchs_attention():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = three("cpu", torch.float32, rows=16, keys=24)
    mask = torch.zeros(16, 24, dtype=torch.bool)

    def counted(function, *arguments, **options):
        with FlopCounterMode(display=False) as counter:
            function(*arguments, **options)
        return counter.get_total_flops()

    expected = 2 * 2 * q.shape[0] * q.shape[1] * 16 * 24 * 64
    assert counted(TORCH_SDPA, q, k, v) in (expected, 0)  # older versions count none on the CPU
    assert counted(flashcore_attn.scaled_dot_product_attention, q, k, v) == expected
    assert counted(flashcore_attn.scaled_dot_product_attention, q, k, v, attn_mask=mask) == expected
    starts = torch.tensor([0, 4, 16], dtype=torch.int32)
    rows = [x[0].transpose(0, 1)[:16] for x in (q, k, v)]
    packed = counted(flashcore_attn.flash_attn_varlen_func, *rows, starts, starts)
    assert packed == 2 * 2 * q.shape[1] * (4 * 4 + 12 * 12) * 64


def test_a_profiler_sees_the_operator():
    q = draw(2, 4, 16, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashcore_attn.scaled_dot_product_attention(q, q, q)
    assert "flashcore_attn::attention" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim_v", [64, 32])
def test_what_is_handed_to_the_gpu(pretended_gpu, transposed, dim_v):
    q, k, v = three("cpu", torch.float16, 30, 50, 4, 2, transposed=transposed)
    v = v[..., :dim_v]
    exact, exact_lse = reference(q, k, v, causal=True)
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, _ = flashcore_attn.flash_attn_func(*bshd, causal=True, return_attn_probs=True)
    close(out.transpose(1, 2), exact, torch.float16)
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-3, rtol=1e-5)
    assert out.transpose(1, 2).is_contiguous() != transposed
    top_left = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(top_left, reference(q, k, v, causal=True, top_left=True)[0], torch.float16)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    out = flashcore_attn.scaled_dot_product_attention(*strided, enable_gqa=True)
    close(out, reference(q, k, v)[0], torch.float16)
    negated = torch.complex(torch.zeros_like(q, dtype=torch.float32), q.float()).conj().imag
    assert negated.is_neg()
    out = flashcore_attn.scaled_dot_product_attention(negated, k.float(), v.float(), enable_gqa=True)
    close(out, reference(-q, k, v)[0], torch.float16)


def test_memory_that_pytorch_keeps_unused_is_asked_back(pretended_gpu, monkeypatch):
    from flashcore_attn import _cuda

    attend, freed = _cuda._attend, []

    def full(*arguments):
        if not freed:
            raise flashcore_attn.DeviceMemoryError("out of memory: cuMemAlloc")
        return attend(*arguments)

    capturing = [True]
    monkeypatch.setattr(_cuda, "_attend", full)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    q, k, v = three("cpu", torch.float16)
    with pytest.raises(MemoryError, match="out of memory"):
        flashcore_attn.scaled_dot_product_attention(q, k, v)
    capturing[0] = False
    close(flashcore_attn.scaled_dot_product_attention(q, k, v), reference(q, k, v)[0], torch.float16)
    assert freed == [1]


def test_memory_is_held_while_another_thread_replaces_it():
    code = """
import threading, time, torch, flashcore_attn
q = torch.ones(1, 4096, 8, 64)
F = flashcore_attn.flash_attn_func
F(q[:, :256], q[:, :256], q[:, :256])
entered = threading.Event()
def replace():
    entered.wait()
    time.sleep(0.05)
    q.data = torch.empty(0)
thread = threading.Thread(target=replace)
thread.start()
entered.set()
out = F(q, q, q)
thread.join()
print((out - 1).abs().max().item() < 1e-5)
"""
    assert ran(code) == "True"


class Wrapper(torch.Tensor):
    """A class without memory that supports no operator."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


def test_classes_without_attention_are_refused_by_name():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = draw(1, 4, 2, 8)
    jagged = torch.nested.nested_tensor([draw(4, 2, 8), draw(3, 2, 8)], layout=torch.jagged)
    fake = FakeTensorMode().from_tensor(q)
    refuse = [
        ((jagged, jagged, jagged), "^invalid value 'nested' for the layout of q: expected torch.strided"),
        ((Wrapper(q), Wrapper(q), Wrapper(q)), "^invalid value 'Wrapper' for the type of q: expected torch.Tensor"),
        ((q, q, Wrapper(q)), "^invalid value 'Wrapper' for the type of v"),
        ((q, fake, q), "^invalid value 'FakeTensor' for the type of k"),
    ]
    for inputs, words in refuse:
        with pytest.raises(flashcore_attn.UnsupportedError, match=words):
            flashcore_attn.flash_attn_func(*inputs)


def test_a_scale_beyond_every_float_is_refused():
    q = draw(1, 4, 2, 8)
    words = "scale: expected a number that is finite in float32, or None"
    with pytest.raises(
        flashcore_attn.ArgumentError, match=f"^invalid value 'an integer of 1329 bits' for softmax_{words}"
    ):
        flashcore_attn.flash_attn_func(q, q, q, softmax_scale=10**400)
    with pytest.raises(flashcore_attn.ArgumentError, match=f"^invalid value 'an integer of 1329 bits' for {words}"):
        flashcore_attn.scaled_dot_product_attention(q, q, q, scale=10**400)
