"""8-bit inputs with descale factors, of NumPy and of PyTorch on the CPU."""

import sys

import ml_dtypes
import numpy as np
import pytest

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


def test_factors_of_blocks_of_rows():
    """Blocks of 64 rows have a factor each; their number tells them from blocks of 128 rows."""
    (q, k, v), _ = draw([TYPES[0]] * 3)
    factors = np.random.default_rng(2).uniform(0.3, 2.0, (2, 2, 2)).astype(np.float32)
    out = flash_attn_func(q, k, v, descale_k=factors, descale_v=factors[:, :, :1])
    of_rows = np.repeat(factors, 64, 2)[:, :, :70].transpose(0, 2, 1)[..., None]
    exact = attention(q, k.astype(np.float64) * of_rows, v, (np.ones((2, 2)), np.ones((2, 2)), factors[:, :, 0]))
    close(out, exact)


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
        of_rows = np.repeat(dv[one], 64, 2)[:, :, : end - start].transpose(0, 2, 1)[..., None]
        tensors = (x[None, start:end].astype(np.float64) for x in (q, k, v))
        exact = attention(*(x * y for x, y in zip(tensors, (1, 1, of_rows))), (dq[one], dk[one], np.ones((1, 2))))
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
        flash_attn_func(q.astype(np.float16), k, v)
    with pytest.raises(FlashCoreError, match=r"the shape of descale_q.*\(2, 2\)"):
        flash_attn_func(q, k, v, descale_q=dq[:, :1])
    with pytest.raises(FlashCoreError, match=r"the shape of descale_k.*\(2, 2, 2\) or \(2, 2, 1\) for blocks of 64 or"):
        flash_attn_func(q, k, v, descale_k=np.ones((2, 2, 3), np.float32))
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
    starts_q, starts_k = (torch.arange(3, dtype=torch.int32, device=device) * rows for rows in (33, 70))
    packed = [x.flatten(0, 1) for x in tensors]
    out = flash_attn_varlen_func(*packed, starts_q, starts_k, 33, 70, **dict(zip(names, scales)))
    near(out.unflatten(0, (2, 33)), attention(q, k, v, factors))
    with pytest.raises(DTypeError):
        flash_attn_func(tensors[0], tensors[1].to(torch.bfloat16), tensors[2])


@pytest.mark.parametrize("where", ["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_factors_of_blocks_of_rows(where, rows, kind, request):
    """Factors of any strides, NaN in some, of 8-bit tensors and of a 16-bit v."""
    torch = pytest.importorskip("torch")
    if where == "pretended":
        request.getfixturevalue("pretended_gpu")
    device = "cuda" if where == "cuda" else "cpu"
    within = 0.05 if where == "cuda" else 0.01
    rng = np.random.default_rng(3)
    dtype = getattr(ml_dtypes, kind)
    arrays = [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in SHAPES]
    q, k, v = (torch.from_numpy(x.view(np.uint8)).to(device).view(getattr(torch, kind)) for x in arrays)
    blocks = [-(-shape[1] // rows) for shape in SHAPES]
    factors = [rng.uniform(0.3, 2.0, (n, 2, 2)).astype(np.float32).transpose(1, 2, 0) for n in blocks]
    names = ("descale_q", "descale_k", "descale_v")

    def of_rows(x, of_blocks):
        wide = np.repeat(of_blocks, rows, 2)[:, :, : x.shape[1]].transpose(0, 2, 1)
        return x.astype(np.float64) * np.repeat(wide, x.shape[2] // 2, 2)[..., None]

    def out(v, **given):
        scales = {name: torch.from_numpy(x).to(device) for name, x in given.items()}
        return flash_attn_func(q, k, v, causal=True, **scales).cpu().double().numpy()

    def near(found, exact):
        assert np.abs(found - exact).max() <= within * np.abs(exact).max()

    dequantised = [of_rows(x, of_blocks) for x, of_blocks in zip(arrays, factors)]
    near(out(v, **dict(zip(names, factors))), whole(*dequantised))
    halves = v.to(torch.bfloat16)
    mixed = [*dequantised[:2], arrays[2].astype(np.float64)]
    near(out(halves, **dict(zip(names, factors[:2]))), whole(*mixed))
    # Row i sees keys up to i + 80, so the last block of 64 keys is hidden from rows below 48.
    bad = factors[2].copy()
    bad[:, :, -1] = np.nan
    found = out(v, descale_q=factors[0], descale_k=factors[1], descale_v=bad)
    first = rows * (blocks[2] - 1) - (SHAPES[1][1] - SHAPES[0][1])
    assert np.isnan(found[:, max(first, 0) :]).all()
    if where == "cuda" and first > 0:
        near(found[:, :first], whole(*dequantised)[:, :first])


@pytest.mark.parametrize("where", ["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("blocks", [None, 64])
def test_torch_programs_beside_factors(where, blocks, request):
    """Chunks, ALiBi slopes and both, beside factors of heads and of blocks of rows."""
    torch = pytest.importorskip("torch")
    if where == "pretended":
        request.getfixturevalue("pretended_gpu")
    device = "cuda" if where == "cuda" else "cpu"
    within = 0.05 if where == "cuda" else 0.01
    (q, k, v), factors = draw([TYPES[0]] * 3, 4)
    if blocks:
        rng = np.random.default_rng(6)
        factors = [rng.uniform(0.3, 2.0, (2, 2, -(-x.shape[1] // blocks))).astype(np.float32) for x in (q, k, v)]
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

    def of_rows(x, of_blocks):
        wide = np.repeat(of_blocks.reshape(2, 2, -1), blocks or x.shape[1], 2)[:, :, : x.shape[1]]
        return x.astype(np.float64) * np.repeat(wide.transpose(0, 2, 1), x.shape[2] // 2, 2)[..., None]

    exact = [of_rows(x, of_blocks).transpose(0, 2, 1, 3) for x, of_blocks in zip((q, k, v), factors)]
    exact[1:] = (np.repeat(x, 2, 1) for x in exact[1:])
    scores = exact[0] @ exact[1].transpose(0, 1, 3, 2) / 8
    rows, keys = np.arange(33)[:, None] + 70 - 33, np.arange(70)
    chunk = (rows // 16 == keys // 16) & (keys <= rows)
    bias = -slopes[:, None, None] * abs(rows - keys)

    def expected(scores, seen):
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ exact[2]).transpose(0, 2, 1, 3)

    def out(**given):
        tensors = [torch.from_numpy(x.view(np.uint8)).to(device).view(torch.float8_e4m3fn) for x in (q, k, v)]
        names = ("descale_q", "descale_k", "descale_v")
        scales = {name: torch.from_numpy(x).to(device) for name, x in zip(names, factors)}
        return flash_attn_func(*tensors, causal=True, **scales, **given).cpu().double().numpy()

    def near(found, exact):
        assert np.abs(found - exact).max() <= within * np.abs(exact).max()

    on_device = torch.from_numpy(slopes).to(device)
    near(out(attention_chunk=16), expected(scores, chunk))
    near(out(alibi_slopes=on_device), expected(scores + bias, keys <= rows))
    near(out(alibi_slopes=on_device, attention_chunk=16), expected(scores + bias, chunk))


SHAPES = [(2, 70, 4, 64), (2, 150, 2, 64), (2, 150, 2, 96)]


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


def whole(q, k, v, causal=True):
    ones = np.ones((2, 2))
    return attention(q, k, v, (ones, ones, ones), causal)


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
        by_row = factors[..., None] if rows is None else np.repeat(factors, rows, 2)[:, :, : x.shape[1]]
        of_rows = by_row.transpose(0, 2, 1)
        group = x.shape[2] // 2
        restored = x.astype(np.float64) * np.repeat(of_rows, group, 2)[..., None]
        step = 2.0**-4 if to is TYPES[0] else 2.0**-3
        wanted = original.astype(np.float64)
        assert (np.abs(restored - wanted) <= step * np.abs(wanted) + 1e-3 * np.abs(wanted).max()).all()
    assert error(quantised, whole(q, k, v)) < (0.1 if to is TYPES[0] else 0.2)


def test_a_rotation_lowers_the_error_of_an_outlier_channel():
    """Without it, the product of the outlier channels has one rounding error; with it, that of many channels."""
    q, k, v = originals(outlier=8.0)
    exact = whole(q, k, v)
    plain, rotated, other = (quantize(q, k, v, hadamard=seed) for seed in (None, 1, 2))
    assert not np.array_equal(rotated.q.view(np.uint8), other.q.view(np.uint8))
    assert np.array_equal(plain.v.view(np.uint8), rotated.v.view(np.uint8))
    assert error(rotated, exact) < 0.6 * error(plain, exact)


def test_smoothing_lowers_the_error_of_a_shifted_channel():
    q, k, v = originals()
    k[..., 9] += 40.0
    exact = whole(q, k, v)
    assert error(quantize(q, k, v, smooth_keys=True), exact) < 0.5 * error(quantize(q, k, v), exact)


def test_strided_and_empty_arrays_are_quantised():
    q, k, v = originals()
    dense = quantize(q, k, v, hadamard=7)
    strided = quantize(*(np.asfortranarray(x)[:, ::-1][:, ::-1] for x in (q, k, v)), hadamard=7)
    for a, b in zip(dense, strided):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))
    none = quantize(q[:, :0], k[:, :0], v[:, :0])
    assert none.k.shape == (2, 0, 2, 64) and np.array_equal(none.descale_k, np.ones((2, 2)))
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


@pytest.mark.parametrize("where", ["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("rows", [None, 64])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_quantised_torch_tensors(where, kind, rows, request):
    """Codes and factors on every device are those of NumPy arrays."""
    torch = pytest.importorskip("torch")
    if where == "pretended":
        request.getfixturevalue("pretended_gpu")
    device = "cuda" if where == "cuda" else "cpu"
    arrays = originals()
    tensors = [torch.from_numpy(x).to(device) for x in arrays]
    expected = quantize(*arrays, dtype=kind, rows=rows, hadamard=3)
    found = quantize(*tensors, dtype=getattr(torch, kind), rows=rows, hadamard=3)
    for name, a, b in zip(found._fields, found, expected):
        assert a.device == tensors[0].device and tuple(a.shape) == b.shape, name
        assert a.dtype == (torch.float32 if name.startswith("descale") else getattr(torch, kind)), name
        codes = a.contiguous().view(torch.uint8).cpu().numpy()
        assert np.array_equal(codes, np.ascontiguousarray(b).view(np.uint8)), name
    out = flash_attn_func(**found._asdict(), causal=True)
    exact = whole(*arrays)
    assert np.abs(out.cpu().double().numpy() - exact).max() < 0.25 * np.abs(exact).max()
    # Rows at addresses that are no multiples of 16 bytes, and a strided last dimension.
    shifted = torch.zeros(2, 70, 4, 65, device=device)[..., 1:].copy_(tensors[0])
    across = tensors[1].transpose(1, 3).contiguous().transpose(1, 3)
    again = quantize(shifted, across, tensors[2], dtype=kind, rows=rows, hadamard=3)
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
    with pytest.raises(UnsupportedError, match="smooth_keys.*the CPU smooths keys"):
        quantize(q, k, v, smooth_keys=True)
    with pytest.raises(UnsupportedError, match="'60' for head_dim"):
        quantize(q[..., :60], k[..., :60], v)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = quantize(q, k, v, hadamard=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = quantize(q, k, v, hadamard=1)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(first, captured):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_quantising_numpy_arrays_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = np.zeros((1, 4, 1, 32), np.float32)
    with pytest.raises(UnsupportedError, match="pip install ml_dtypes"):
        quantize(x, x, x)
