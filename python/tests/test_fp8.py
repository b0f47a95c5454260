"""8-bit inputs with descale factors, of NumPy and of PyTorch on the CPU."""

import sys

import ml_dtypes
import numpy as np
import pytest
from conftest import reference

from flashcore_attn import (
    ArgumentError,
    DTypeError,
    FlashCoreError,
    UnsupportedError,
    flash_attn_func,
    flash_attn_varlen_func,
    quantize,
)

TYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


SHAPES = [(2, 70, 4, 64), (2, 150, 2, 64), (2, 150, 2, 96)]
NAMES = ("descale_q", "descale_k", "descale_v")


# `pretended` runs the code of a CUDA tensor up to the launch, which the CPU kernels replace.
@pytest.fixture(params=["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def device(request):
    """The device of PyTorch's tensors."""
    pytest.importorskip("torch")
    if request.param == "pretended":
        request.getfixturevalue("pretended_gpu")
    return "cuda" if request.param == "cuda" else "cpu"


def on(device, kind, arrays):
    """PyTorch's tensors of the arrays, which are of an 8-bit type."""
    import torch

    return [torch.from_numpy(x.view(np.uint8)).to(device).view(getattr(torch, kind)) for x in arrays]


def attention(q, k, v, causal=False):
    """Attention in float64 of ``(batch, sequence, heads, dim)``."""
    out, _ = reference(*(x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v)), causal)
    return out.transpose(0, 2, 1, 3)


def restored(x, factors, rows=None):
    """The tensor in float64, times the factors of its KV heads, or of their blocks of rows."""
    of_blocks = factors[..., None] if rows is None else factors
    of_rows = np.repeat(of_blocks, rows or x.shape[1], 2)[:, :, : x.shape[1]].transpose(0, 2, 1)
    return x.astype(np.float64) * np.repeat(of_rows, x.shape[2] // factors.shape[1], 2)[..., None]


def draw(kinds, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, 33, 4, 64), (2, 70, 2, 64), (2, 70, 2, 64)]
    tensors = [rng.standard_normal(shape).astype(np.float32).astype(kind) for shape, kind in zip(shapes, kinds)]
    return tensors, [rng.uniform(0.3, 2.0, (2, 2)).astype(np.float32) for _ in range(3)]


def close(out, exact, within=0.01):
    """Whether an output, an array or a tensor, is near the result in float64."""
    found = out.astype(np.float64) if isinstance(out, np.ndarray) else out.cpu().double().numpy()
    assert np.abs(found - exact).max() <= within * np.abs(exact).max()


@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("last", [*TYPES, np.float16, ml_dtypes.bfloat16])
def test_numpy(first, last):
    (q, k, v), (dq, dk, dv) = draw([first, TYPES[0], last])
    eight = last in TYPES
    factors = {"descale_q": dq, "descale_k": dk, **({"descale_v": dv} if eight else {})}
    out = flash_attn_func(q, k, v, causal=True, **factors)
    assert out.dtype == (ml_dtypes.bfloat16 if eight else last)
    values = restored(v, dv) if eight else v
    close(out, attention(restored(q, dq), restored(k, dk), values, causal=True))


def test_factors_have_any_strides():
    (q, k, v), _ = draw([TYPES[0]] * 3)
    one = np.broadcast_to(np.float32(0.5), (2, 2))
    strided = np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2] / 8 + 0.25
    out, lse, _ = flash_attn_func(
        q, k, v, descale_q=one, descale_k=strided, descale_v=strided.T, return_attn_probs=True
    )
    close(out, attention(*map(restored, (q, k, v), (one, strided, strided.T))))
    assert np.isfinite(lse).all()


def test_factors_of_blocks_of_rows():
    """Blocks of 64 rows have a factor each; their number tells them from blocks of 128 rows."""
    (q, k, v), _ = draw([TYPES[0]] * 3)
    factors = np.random.default_rng(2).uniform(0.3, 2.0, (2, 2, 2)).astype(np.float32)
    out = flash_attn_func(q, k, v, descale_k=factors, descale_v=factors[:, :, :1])
    close(out, attention(q, restored(k, factors, 64), restored(v, factors[:, :, 0])))


def test_packed_batches():
    """Factors belong to sequences; blocks of rows are counted from the first row of each."""
    rng = np.random.default_rng(3)
    starts = np.array([0, 30, 130], np.int32)
    q, k, v = (rng.standard_normal((130, heads, 64)).astype(np.float32).astype(TYPES[0]) for heads in (4, 2, 2))
    dq, dk = (rng.uniform(0.3, 2.0, (2, 2)).astype(np.float32) for _ in range(2))
    dv = rng.uniform(0.3, 2.0, (2, 2, 2)).astype(np.float32)
    out = flash_attn_varlen_func(q, k, v, starts, starts, 100, 100, descale_q=dq, k_descale=dk, descale_v=dv)
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        one = slice(i, i + 1)
        own_q, own_k, own_v = (x[None, start:end] for x in (q, k, v))
        exact = attention(restored(own_q, dq[one]), restored(own_k, dk[one]), restored(own_v, dv[one], 64))
        close(out[None, start:end], exact)
    with pytest.raises(FlashCoreError, match=r"the shape of descale_v.*\(2, 2, 2\) or \(2, 2, 1\)"):
        flash_attn_varlen_func(q, k, v, starts, starts, 100, 100, descale_v=np.ones((2, 2, 3), np.float32))
    with pytest.raises(FlashCoreError, match="q_descale.*None beside descale_q"):
        flash_attn_varlen_func(q, k, v, starts, starts, descale_q=dq, q_descale=dq)


def test_wrong_types_and_factors_are_named():
    (q, k, v), (dq, *_) = draw([TYPES[0]] * 3)
    with pytest.raises(DTypeError, match="e4m3"):
        flash_attn_func(q, k.astype(np.float16), v)
    with pytest.raises(DTypeError, match="must be equal"):
        flash_attn_func(q.astype(np.float32), k, v)
    with pytest.raises(DTypeError, match="must be equal"):
        flash_attn_func(q.astype(np.float16), k, v.astype(np.float16))
    with pytest.raises(FlashCoreError, match=r"the shape of descale_q.*\(2, 2\)"):
        flash_attn_func(q, k, v, descale_q=dq[:, :1])
    with pytest.raises(FlashCoreError, match=r"the shape of descale_k.*\(2, 2, 2\) or \(2, 2, 1\) for blocks of 64 or"):
        flash_attn_func(q, k, v, descale_k=np.ones((2, 2, 3), np.float32))
    with pytest.raises(DTypeError, match="dtype of descale_q"):
        flash_attn_func(q, k, v, descale_q=dq.astype(np.float64))
    half = [x.astype(np.float16) for x in (q, k, v)]
    with pytest.raises(FlashCoreError, match="descale_q"):
        flash_attn_func(*half, descale_q=dq)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_torch(device, kind):
    import torch

    # A tensor core multiplies with P in e4m3.
    within = 0.05 if device == "cuda" else 0.01
    (q, k, v), factors = draw([getattr(ml_dtypes, kind)] * 3)
    tensors = on(device, kind, (q, k, v))
    scales = [torch.from_numpy(x).to(device) for x in factors]

    def near(out, exact):
        assert out.dtype == torch.bfloat16 and out.device == tensors[0].device
        close(out, exact, within)

    exact = attention(*map(restored, (q, k, v), factors))
    near(flash_attn_func(*tensors, **dict(zip(NAMES, scales))), exact)
    expanded = torch.tensor([[0.5]], device=device).expand(2, 2)  # strides of 0
    near(flash_attn_func(*tensors, descale_q=expanded), attention(0.5 * q.astype(np.float64), k, v))
    near(flash_attn_func(*tensors, causal=True), attention(q, k, v, causal=True))
    starts_q, starts_k = (torch.arange(3, dtype=torch.int32, device=device) * rows for rows in (33, 70))
    packed = [x.flatten(0, 1) for x in tensors]
    out = flash_attn_varlen_func(*packed, starts_q, starts_k, 33, 70, **dict(zip(NAMES, scales)))
    near(out.unflatten(0, (2, 33)), exact)
    with pytest.raises(DTypeError):
        flash_attn_func(tensors[0], tensors[1].to(torch.bfloat16), tensors[2])


def test_mixtures_of_types_are_named(device):
    import torch

    x = torch.zeros(1, 4, 2, 16, device=device)
    e4m3, e5m2 = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)
    eight = "torch.float8_e4m3fn, torch.float8_e5m2"
    for tensors, words in (
        (
            (e4m3, x, x),
            f"invalid value 'torch.float32' for the dtype of k: expected {eight} beside q of torch.float8_e4",
        ),
        ((e4m3, e5m2, x), f"for the dtype of v: expected {eight}, torch.float16, torch.bfloat16 beside q of"),
        ((x, e4m3, x), "k has dtype torch.float8_e4m3fn, but q has torch.float32; they must be equal"),
        ((x, x, e5m2), "v has dtype torch.float8_e5m2, but q has torch.float32; they must be equal"),
        ((x.double(),) * 3, f"for the dtype of q: expected torch.float16, torch.bfloat16, torch.float32, {eight}"),
    ):
        with pytest.raises(DTypeError) as error:
            flash_attn_func(*tensors)
        assert words in str(error.value)
    q = np.zeros((1, 4, 2, 16), np.float32)
    with pytest.raises(DTypeError, match="'float32' for the dtype of k: expected float8_e4m3fn, float8_e5m2 beside"):
        flash_attn_func(q.astype(TYPES[0]), q, q)


def test_a_profiler_changes_nothing(device):
    import torch

    originals = [torch.from_numpy(x.astype(np.float32)).to(device) for x in draw([TYPES[0]] * 3)[0]]
    expected = flash_attn_func(**quantize(*originals)._asdict(), attention_chunk=16)
    with torch.profiler.profile() as profile:
        found = flash_attn_func(**quantize(*originals)._asdict(), attention_chunk=16)
    assert torch.equal(found, expected)
    seen = {event.key for event in profile.key_averages()}
    assert {"flashcore_attn::quantize", "flashcore_attn::attention_with"} <= seen


def test_compiled_calls(device):
    import torch

    arrays, factors = draw([TYPES[0], TYPES[1], np.float16])
    q, k = on(device, TYPES[0].__name__, arrays[:1])[0], on(device, TYPES[1].__name__, arrays[1:2])[0]
    v, dq = torch.from_numpy(arrays[2]).to(device), torch.from_numpy(factors[0]).to(device)
    e4m3 = on(device, TYPES[0].__name__, [arrays[2].astype(TYPES[0])])[0]
    layers = (
        lambda: flash_attn_func(q, k, v, causal=True),
        lambda: flash_attn_func(q, k, e4m3),
        lambda: flash_attn_func(q, k, e4m3, descale_q=dq, descale_k=dq[..., None].expand(2, 2, 2)),
    )
    for layer in layers:
        torch._dynamo.reset()
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")()
        assert found.dtype == layer().dtype and torch.equal(found, layer())


def test_a_factor_that_pytorch_negates_when_it_is_read(device):
    import torch

    tensors = on(device, TYPES[0].__name__, draw([TYPES[0]] * 3)[0])
    factors = torch.full((2, 2), -0.5, device=device)
    negated = torch.complex(torch.zeros_like(factors), factors).conj().imag
    assert negated.is_neg()
    out = flash_attn_func(*tensors, descale_q=negated, descale_v=negated)
    assert torch.equal(out, flash_attn_func(*tensors, descale_q=-factors, descale_v=-factors))


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_factors_of_blocks_of_rows(device, rows, kind):
    """Factors of any strides, NaN in some, of 8-bit tensors and of a 16-bit v."""
    import torch

    within = 0.05 if device == "cuda" else 0.01
    rng = np.random.default_rng(3)
    dtype = getattr(ml_dtypes, kind)
    arrays = [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in SHAPES]
    q, k, v = on(device, kind, arrays)
    blocks = [-(-shape[1] // rows) for shape in SHAPES]
    factors = [rng.uniform(0.3, 2.0, (n, 2, 2)).astype(np.float32).transpose(1, 2, 0) for n in blocks]

    def out(v, *given):
        scales = [torch.from_numpy(x).to(device) for x in given]
        return flash_attn_func(q, k, v, causal=True, **dict(zip(NAMES, scales))).cpu().double().numpy()

    exact_q, exact_k, exact_v = (restored(x, of_blocks, rows) for x, of_blocks in zip(arrays, factors))
    exact = attention(exact_q, exact_k, exact_v, causal=True)
    close(out(v, *factors), exact, within)
    mixed = attention(exact_q, exact_k, arrays[2], causal=True)
    close(out(v.to(torch.bfloat16), *factors[:2]), mixed, within)
    # Row i sees keys up to i + 80, so the last block of 64 keys is hidden from rows below 48.
    bad = factors[2].copy()
    bad[:, :, -1] = np.nan
    found = out(v, *factors[:2], bad)
    first = rows * (blocks[2] - 1) - (SHAPES[1][1] - SHAPES[0][1])
    assert np.isnan(found[:, max(first, 0) :]).all()
    if device == "cuda" and first > 0:
        close(found[:, :first], exact[:, :first], within)


@pytest.mark.parametrize("rows", [None, 64])
def test_torch_programs_beside_factors(device, rows):
    """Chunks, ALiBi slopes and both, beside factors of heads and of blocks of rows."""
    import torch

    within = 0.05 if device == "cuda" else 0.01
    arrays, factors = draw([TYPES[0]] * 3, 4)
    if rows:
        rng = np.random.default_rng(6)
        factors = [rng.uniform(0.3, 2.0, (2, 2, -(-x.shape[1] // rows))).astype(np.float32) for x in arrays]
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    q, k, v = (restored(x, of_rows, rows).transpose(0, 2, 1, 3) for x, of_rows in zip(arrays, factors))
    k, v = (np.repeat(x, 2, 1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / 8
    positions, keys = np.arange(33)[:, None] + 70 - 33, np.arange(70)
    chunk = (positions // 16 == keys // 16) & (keys <= positions)
    bias = -slopes[:, None, None] * abs(positions - keys)

    def expected(scores, seen):
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)

    scales = {name: torch.from_numpy(x).to(device) for name, x in zip(NAMES, factors)}
    tensors = on(device, "float8_e4m3fn", arrays)
    out = lambda **given: flash_attn_func(*tensors, causal=True, **scales, **given)  # noqa: E731
    slopes = torch.from_numpy(slopes).to(device)
    close(out(attention_chunk=16), expected(scores, chunk), within)
    close(out(alibi_slopes=slopes), expected(scores + bias, keys <= positions), within)
    close(out(alibi_slopes=slopes, attention_chunk=16), expected(scores + bias, chunk), within)


def originals(outlier=1.0):
    """Tensors in float32. A channel of q and k is larger by a factor."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in SHAPES)
    q[..., 3] *= outlier
    k[..., 3] *= outlier
    return q, k, v


def error(quantised, exact, causal=True):
    """The root mean square of the error of attention of the quantised tensors, relative to that of the output."""
    out = np.asarray(flash_attn_func(**quantised._asdict(), causal=causal)).astype(np.float64)
    return np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2))


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("rows", [None, 64, 128])
def test_quantised_numpy_arrays(kind, to, rows):
    q, k, v = (x.astype(kind) for x in originals())
    quantised = quantize(q, k, v, dtype=to, rows=rows)
    blocks = [() if rows is None else (-(-n // rows),) for n in (70, 150, 150)]
    for x, original, factors, tail in zip(quantised[:3], (q, k, v), quantised[3:], blocks):
        assert (x.dtype, x.shape) == (to, original.shape)
        assert (factors.dtype, factors.shape) == (np.float32, (2, 2, *tail))
        # A KV head's largest element is the largest number of the type.
        wide = np.abs(x.astype(np.float32))
        assert wide.max() == float(ml_dtypes.finfo(to).max)
        step = 2.0**-4 if to is TYPES[0] else 2.0**-3
        wanted = original.astype(np.float64)
        errors = np.abs(restored(x, factors, rows) - wanted)
        assert (errors <= step * np.abs(wanted) + 1e-3 * np.abs(wanted).max()).all()
    assert error(quantised, attention(q, k, v, causal=True)) < (0.1 if to is TYPES[0] else 0.2)


def test_a_rotation_lowers_the_error_of_an_outlier_channel():
    """Without it, the product of the outlier channels has one rounding error; with it, that of many channels."""
    q, k, v = originals(outlier=8.0)
    exact = attention(q, k, v, causal=True)
    plain, rotated, other = (quantize(q, k, v, hadamard=seed) for seed in (None, 1, 2))
    assert not np.array_equal(rotated.q.view(np.uint8), other.q.view(np.uint8))
    assert np.array_equal(plain.v.view(np.uint8), rotated.v.view(np.uint8))
    assert error(rotated, exact) < 0.6 * error(plain, exact)


def test_smoothing_lowers_the_error_of_a_shifted_channel():
    q, k, v = originals()
    k[..., 9] += 40.0
    exact = attention(q, k, v, causal=True)
    assert error(quantize(q, k, v, smooth_keys=True), exact) < 0.5 * error(quantize(q, k, v), exact)


def test_strided_and_empty_arrays_are_quantised():
    q, k, v = originals()
    dense = quantize(q, k, v, hadamard=7)
    strided = quantize(*(np.asfortranarray(x)[:, ::-1][:, ::-1] for x in (q, k, v)), hadamard=7)
    for a, b in zip(dense, strided):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))
    none = quantize(q[:, :0], k[:, :0], v[:, :0])
    assert none.k.shape == (2, 0, 2, 64) and np.array_equal(none.descale_k, np.ones((2, 2)))
    for rows in (None, 64):
        no_keys = quantize(q, k[:, :0], v[:, :0], rows=rows)
        assert no_keys.descale_k.shape == ((2, 2) if rows is None else (2, 2, 0))
        assert not np.asarray(flash_attn_func(**no_keys._asdict()), np.float32).any()
        no_rows = quantize(q[:, :0], k, v, rows=rows)
        assert flash_attn_func(**no_rows._asdict()).shape == (2, 0, 4, 96)
    special = np.zeros((1, 2, 1, 16), np.float32)
    special[0, 0, 0, :4] = np.nan, np.inf, -np.inf, 224.0
    codes, *_, factor = (lambda x: (x.v, x.descale_v))(quantize(special, special, special))
    assert factor == 0.5
    assert codes[0, 0, 0, :4].astype(np.float32).tolist()[1:] == [448.0, -448.0, 448.0]
    assert np.isnan(codes[0, 0, 0, 0].astype(np.float32))


def test_wrong_arguments_of_quantize_are_named():
    q, k, v = originals()
    for options, match in [
        ({"dtype": np.float16}, "invalid value 'float16' for dtype: expected float8_e4m3fn or float8_e5m2"),
        ({"rows": 32}, "invalid value '32' for rows: expected 64, 128, or None"),
        ({"rows": True}, "invalid value 'True' for rows"),
        ({"hadamard": -1}, "invalid value '-1' for hadamard"),
        ({"hadamard": True}, "invalid value 'True' for hadamard"),
        ({"hadamard": 2**64}, "for hadamard"),
        ({"hadamard": 0.5}, "invalid value '0.5' for hadamard"),
        ({"smooth_keys": "no"}, "invalid value 'no' for smooth_keys"),
    ]:
        with pytest.raises(FlashCoreError, match=match):
            quantize(q, k, v, **options)
    with pytest.raises(DTypeError, match="invalid value 'float64' for the dtype of k"):
        quantize(q, k.astype(np.float64), v)
    with pytest.raises(DTypeError, match="the dtype of v"):
        quantize(q, k, v.astype(TYPES[0]))
    with pytest.raises(ArgumentError, match="v has sequence length = 149, but k has 150"):
        quantize(q, k, v[:, 1:])
    with pytest.raises(ArgumentError, match="k has head_dim = 63, but q has 64"):
        quantize(q, k[..., 1:], v)
    with pytest.raises(ArgumentError, match="invalid value '3' for heads_q: expected a multiple of heads_kv = 2"):
        quantize(q[:, :, 1:], k, v)
    with pytest.raises(ArgumentError, match="q has 3 dimensions"):
        quantize(q[0], k, v)
    with pytest.raises(ArgumentError, match="k is a list, q a NumPy array"):
        quantize(q, k.tolist(), v)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("rows", [None, 64])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_quantised_torch_tensors(device, kind, rows, smooth):
    """Codes and factors on every device are those of NumPy arrays."""
    import torch

    arrays = originals()
    tensors = [torch.from_numpy(x).to(device) for x in arrays]
    expected = quantize(*arrays, dtype=kind, rows=rows, hadamard=3, smooth_keys=smooth)
    found = quantize(*tensors, dtype=getattr(torch, kind), rows=rows, hadamard=3, smooth_keys=smooth)
    for name, a, b in zip(found._fields, found, expected):
        assert a.device == tensors[0].device and tuple(a.shape) == b.shape, name
        assert a.dtype == (torch.float32 if name.startswith("descale") else getattr(torch, kind)), name
        codes = a.contiguous().view(torch.uint8).cpu().numpy()
        assert np.array_equal(codes, np.ascontiguousarray(b).view(np.uint8)), name
    out = flash_attn_func(**found._asdict(), causal=True)
    exact = attention(*arrays, causal=True)
    assert np.abs(out.cpu().double().numpy() - exact).max() < 0.25 * np.abs(exact).max()
    # Rows at addresses that are no multiples of 16 bytes, and a strided last dimension.
    shifted = torch.zeros(2, 70, 4, 65, device=device)[..., 1:].copy_(tensors[0])
    across = tensors[1].transpose(1, 3).contiguous().transpose(1, 3)
    again = quantize(shifted, across, tensors[2], dtype=kind, rows=rows, hadamard=3, smooth_keys=smooth)
    for a, b in zip(found, again):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    with pytest.raises(UnsupportedError, match="requires grad"):
        quantize(tensors[0].clone().requires_grad_(), *tensors[1:])
    with pytest.raises(DTypeError, match=r"invalid value 'torch.float64' for the dtype of q"):
        quantize(tensors[0].double(), *tensors[1:])
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, pytest.raises(UnsupportedError, match="plain tensors"):
        quantize(*map(mode.from_tensor, tensors))


@pytest.mark.needs_cuda
def test_a_gpu_refuses_what_its_kernels_do_not_have():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).cuda() for x in originals())
    with pytest.raises(UnsupportedError, match="'60' for head_dim"):
        quantize(q[..., :60], k[..., :60], v)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = quantize(q, k, v, hadamard=1, smooth_keys=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = quantize(q, k, v, hadamard=1, smooth_keys=True)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(first, captured):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_quantising_numpy_arrays_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = np.zeros((1, 4, 1, 32), np.float32)
    with pytest.raises(UnsupportedError, match="pip install ml_dtypes"):
        quantize(x, x, x)
