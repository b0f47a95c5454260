"""The plugin on suites with raw kernels of CuPy, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("cupy")

SUITE = '''
import cupy as cp
import numpy as np
import pytest

SCALE = cp.RawKernel(
    r"""
    extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] * factor;
    }
    """,
    "scale",
)

MODULE = r"""
template <typename T>
__global__ void total(const T* x, T* out, int n) {
    extern __shared__ char memory[];
    T* part = reinterpret_cast<T*>(memory);
    part[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : T(0);
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = part[0];
}

template <typename T>
__global__ void racy(const T* x, T* out) {
    out[0] += x[threadIdx.x];  // the race
}
"""


def module():
    return cp.RawModule(code=MODULE, options=("-std=c++17",), name_expressions=["total<double>", "racy<int>"])


def test_arrays_and_numbers():
    x = cp.arange(100, dtype=cp.float32)
    y = cp.empty_like(x)
    SCALE((1,), (128,), (x, y, cp.float32(2.5), 100))
    cp.testing.assert_allclose(y, 2.5 * x)
    assert isinstance(y, cp.ndarray) and type(cp.asnumpy(y)) is np.ndarray
    SCALE((2,), (64,), (x[10:], y[10:], np.float32(-1), 90))
    assert (y.get()[10:] == -x.get()[10:]).all() and y[0] == 0


def test_a_module_with_templates():
    x, out = cp.random.rand(100), cp.zeros(1)
    module().get_function("total<double>")((1,), (128,), (x, out, 100), shared_mem=1024)
    assert cp.allclose(out[0], x.sum())


def test_what_is_not_emulated_is_named():
    with pytest.raises(NotImplementedError, match="cupy.ElementwiseKernel are not emulated"):
        cp.ElementwiseKernel("float32 x", "float32 y", "y = x", "copy")
    with pytest.raises(TypeError, match="scale takes 4 arguments, but 1 were given"):
        SCALE((1,), (32,), (cp.zeros(4),))
    with pytest.raises(TypeError, match="arg2 is .* of 2 bytes, but the kernel takes 4"):
        SCALE((1,), (32,), (cp.zeros(4), cp.zeros(4), np.float16(1), 4))


def test_out_of_bounds():
    x = cp.ones(100, dtype=cp.float32)
    SCALE((1,), (128,), (x, x.copy(), cp.float32(2), 128))


def test_race():
    module().get_function("racy<int>")((1,), (64,), (cp.ones(64, cp.int32), cp.zeros(1, cp.int32)))
'''


def test_a_suite(report_of: Callable[..., str]) -> None:
    report = report_of(SUITE, passed=3, failed=2)
    assert "out[0] += x[threadIdx.x];  // the race" in report and "raw_kernel_" in report
    assert "out_of_bounds" in report and "y[i] = x[i] * factor" in report
