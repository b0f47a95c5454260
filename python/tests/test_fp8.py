"""8-bit inputs with descale factors, of NumPy and of PyTorch on the CPU."""

import ml_dtypes
import numpy as np
import pytest

from flashcore_attn import DTypeError, FlashCoreError, flash_attn_func

TYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def attention(q, k, v, factors, causal=False):
    """Attention in float64 of ``(batch, sequence, heads, dim)``."""
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (np.float64(x)[:, :, None, None] for x in factors)
    q, k, v = q * np.repeat(dq, group, 1), np.repeat(k * dk, group, 1), np.repeat(v * dv, group, 1)
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[3])
    if causal:
        rows, keys = scores.shape[2:]
        scores = np.where(np.tril(np.ones((rows, keys), bool), keys - rows), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def draw(kinds, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, 33, 4, 64), (2, 70, 2, 64), (2, 70, 2, 64)]
    tensors = [rng.standard_normal(shape).astype(np.float32).astype(kind) for shape, kind in zip(shapes, kinds)]
    return tensors, [rng.uniform(0.3, 2.0, (2, 2)).astype(np.float32) for _ in range(3)]


def close(out, exact, kind=ml_dtypes.bfloat16):
    assert out.dtype == kind
    assert np.abs(out.astype(np.float64) - exact).max() <= 0.01 * np.abs(exact).max()


@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("last", [*TYPES, np.float16, ml_dtypes.bfloat16])
def test_numpy(first, last):
    (q, k, v), (dq, dk, dv) = draw([first, TYPES[0], last])
    eight = last in TYPES
    factors = {"descale_q": dq, "descale_k": dk, **({"descale_v": dv} if eight else {})}
    out = flash_attn_func(q, k, v, causal=True, **factors)
    exact = attention(q, k, v, (dq, dk, dv if eight else np.ones_like(dv)), causal=True)
    close(out, exact, ml_dtypes.bfloat16 if eight else last)


def test_factors_have_any_strides():
    (q, k, v), _ = draw([TYPES[0]] * 3)
    one = np.broadcast_to(np.float32(0.5), (2, 2))
    strided = np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2] / 8 + 0.25
    out, lse, _ = flash_attn_func(
        q, k, v, descale_q=one, descale_k=strided, descale_v=strided.T, return_attn_probs=True
    )
    close(out, attention(q, k, v, (one, strided, strided.T)))
    assert np.isfinite(lse).all()


def test_wrong_types_and_factors_are_named():
    (q, k, v), (dq, *_) = draw([TYPES[0]] * 3)
    with pytest.raises(DTypeError, match="e4m3"):
        flash_attn_func(q, k.astype(np.float16), v)
    with pytest.raises(DTypeError, match="must be equal"):
        flash_attn_func(q.astype(np.float16), k, v)
    with pytest.raises(FlashCoreError, match=r"the shape of descale_q.*\(2, 2\)"):
        flash_attn_func(q, k, v, descale_q=dq[:, :1])
    with pytest.raises(DTypeError, match="dtype of descale_q"):
        flash_attn_func(q, k, v, descale_q=dq.astype(np.float64))
    half = [x.astype(np.float16) for x in (q, k, v)]
    with pytest.raises(FlashCoreError, match="descale_q"):
        flash_attn_func(*half, descale_q=dq)


# `pretended` runs the code of a CUDA tensor up to the launch, which the CPU kernels replace.
@pytest.mark.parametrize("where", ["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_torch(where, kind, request):
    torch = pytest.importorskip("torch")
    if where == "pretended":
        request.getfixturevalue("pretended_gpu")
    device = "cuda" if where == "cuda" else "cpu"
    # A tensor core multiplies with P in e4m3.
    within = 0.05 if where == "cuda" else 0.01
    (q, k, v), factors = draw([getattr(ml_dtypes, kind)] * 3)
    tensors = [torch.from_numpy(x.view(np.uint8)).to(device).view(getattr(torch, kind)) for x in (q, k, v)]
    scales = [torch.from_numpy(x).to(device) for x in factors]
    names = ("descale_q", "descale_k", "descale_v")

    def near(out, exact):
        assert out.dtype == torch.bfloat16 and out.device == tensors[0].device
        assert np.abs(out.cpu().double().numpy() - exact).max() <= within * np.abs(exact).max()

    near(flash_attn_func(*tensors, **dict(zip(names, scales))), attention(q, k, v, factors))
    expanded = torch.tensor([[0.5]], device=device).expand(2, 2)  # strides of 0
    ones = np.ones((2, 2))
    near(flash_attn_func(*tensors, descale_q=expanded), attention(q, k, v, (0.5 * ones, ones, ones)))
    near(flash_attn_func(*tensors, causal=True), attention(q, k, v, (ones, ones, ones), causal=True))
    with pytest.raises(DTypeError):
        flash_attn_func(tensors[0], tensors[1].to(torch.bfloat16), tensors[2])
