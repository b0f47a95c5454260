"""Shared by the tests: the reference implementation, tolerances, and conditions for skipping."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest


def reference(q, k, v, causal=False, scale=None, top_left=False):
    """Attention in float64 of ``(batch, heads, sequence, dim)`` arrays, and its log-sum-exp; written for clarity."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = scores.shape[-2:]
        seen = np.tri(rows, keys, 0 if top_left else keys - rows, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    peak = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0.0))
    mass = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(mass) + np.where(np.isfinite(peak), peak, -np.inf))[..., 0]
    return weights @ v / np.where(mass == 0, 1.0, mass), lse


# Absolute, for inputs of standard normal values: a few units of the type's rounding near 1.
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2.5e-2}


def bf16():
    """ml_dtypes' bfloat16. Skips the test if ml_dtypes is not installed."""
    return pytest.importorskip("ml_dtypes").bfloat16


@pytest.fixture
def fresh_counts():
    """Counts of `compat` from 0, and nothing compiled before the test."""
    import torch

    from flashcore_attn import compat

    compat.reset_stats()
    torch._dynamo.reset()
    yield
    compat.reset_stats()


class OnlyDlpack:
    """An array that offers DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Runs the code of a CUDA call with the CPU kernels in place of launches: tensors report the device -1."""
    from flashcore_attn import _cuda, _flashcore, _torch

    compute = _flashcore.attend

    def attend(q, k, v, out, lse, heads, code, terms, place, *features):
        assert place == (-1, 7)
        compute(q, k, v, out, lse, heads, code, terms, (None, 0), *features)

    def enqueue_quantization(*described):
        *call, device, stream = described
        assert (device, stream) == (-1, 7)
        address, shape, strides = call[1]
        size = {"f16": 2, "bf16": 2, "f32": 4}[call[3]]
        assert address % 16 == 0 and strides[3] == 1  # as the kernels load rows
        assert all(stride * size % 16 == 0 for extent, stride in zip(shape[:3], strides) if extent > 1)
        _flashcore.quantize_cpu(*call)

    monkeypatch.setattr(_cuda, "_attend", attend)
    monkeypatch.setattr(_cuda, "_enqueue_quantization", enqueue_quantization)
    monkeypatch.setattr(_cuda, "_current_device", lambda: -1)
    monkeypatch.setattr(_cuda, "_current_stream", lambda device: 7)
    monkeypatch.setattr(_torch, "_now", _cuda.attend)
    monkeypatch.setattr(_torch, "eager", None)  # it calls no Python code
    monkeypatch.setattr(_torch, "_quantize_now", _cuda.quantize)


# `pretended` runs the code of a CUDA tensor up to the launch, which the CPU kernels replace.
TENSORS = ["numpy"]
if importlib.util.find_spec("torch") is not None:
    TENSORS += ["torch", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)]


@pytest.fixture
def tensors(request):
    """Makes tensors of a kind from arrays, and arrays in float64 of tensors."""
    kind = request.param
    if kind == "pretended":
        request.getfixturevalue("pretended_gpu")
    return Tensors(kind)


class Tensors:
    def __init__(self, kind):
        self.kind = kind

    def of(self, array, dtype):
        if self.kind == "numpy":
            return array.astype(bf16() if dtype == "bfloat16" else dtype)
        import torch

        device = "cuda" if self.kind == "cuda" else "cpu"
        return torch.from_numpy(array).to(device, getattr(torch, dtype))

    def array(self, tensor):
        if self.kind == "numpy":
            return np.asarray(tensor, np.float64)
        return tensor.double().cpu().numpy()

    def draw(self, shape, dtype, seed):
        return self.of(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)

    def three(self, rows, keys, heads, heads_k, dim, dtype, batch=2):
        shapes = (batch, rows, heads, dim), (batch, keys, heads_k, dim), (batch, keys, heads_k, dim)
        return [self.draw(shape, dtype, seed) for seed, shape in enumerate(shapes)]

    def bits(self, tensor):
        return self.array(tensor).tobytes()  # float64 keeps every bit of the smaller types


every_kind = pytest.mark.parametrize("tensors", TENSORS, indirect=True)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_cuda: needs a CUDA device that PyTorch sees")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("needs_cuda")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def ranks():
    """Runs functions on several processes, the ranks of a group over gloo (of the tests in ``parallel``)."""
    from rank_pool import Ranks

    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def slow_path():
    """nn.TransformerEncoderLayer without its fused C++ path, which would call no Python function."""
    import torch

    import flashcore_attn

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    flashcore_attn.compat.reset_stats()
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)
