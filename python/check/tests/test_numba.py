"""The plugin on suites with kernels of numba-cuda, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numba_cuda")

SUITE = """
import numpy as np
from numba import cuda, float32


@cuda.jit
def scale(x, y, factor, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] * factor


@cuda.jit
def total(x, out):
    part = cuda.shared.array(128, float32)
    i = cuda.threadIdx.x
    part[i] = x[i]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if i < half:
            part[i] += part[i + half]
        cuda.syncthreads()
        half //= 2
    if i == 0:
        out[0] = part[0]


@cuda.jit
def transpose(x, y):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        y[j, i] = x[i, j]


@cuda.jit
def racy_sum(x, out):
    out[0] += x[cuda.threadIdx.x]  # the race


def test_device_arrays_and_numbers():
    x = np.arange(100, dtype=np.float32)
    given, y = cuda.to_device(x), cuda.device_array(100, np.float32)
    scale[1, 128](given, y, 2.5, 100)
    np.testing.assert_allclose(y.copy_to_host(), 2.5 * x)
    scale.forall(100)(given, y, -1, 100)
    np.testing.assert_allclose(y, -x)


def test_shared_memory():
    x, out = np.random.rand(128).astype(np.float32), np.zeros(1, np.float32)
    total[1, 128](x, out)
    np.testing.assert_allclose(out[0], x.sum(), rtol=1e-5)


def test_strides():
    x, y = np.arange(60, dtype=np.int32).reshape(6, 10), np.zeros((10, 6), np.int32)
    transpose[(1, 2), (8, 8)](x, y)
    assert (y == x.T).all()
    transpose[(1, 2), (8, 8)](x[::2], y)
    assert (y[:, :3] == x[::2].T).all()


def test_out_of_bounds():
    scale[1, 128](np.ones(100, np.float32), np.ones(100, np.float32), 2.0, 128)


def test_race():
    racy_sum[1, 64](np.ones(64, np.float32), np.zeros(1, np.float32))
"""


def test_a_suite(report_of: Callable[..., str]) -> None:
    report = report_of(SUITE, passed=3, failed=2)
    assert "race at test_suite.py:" in report and "out[0] += x[cuda.threadIdx.x]  # the race" in report
    assert "out_of_bounds at test_suite.py:" in report
