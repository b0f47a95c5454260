"""The plugin on suites that launch by cuda.bindings and cuda.core, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("cuda.bindings")

BINDINGS = '''
import ctypes
import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = b"""
extern "C" __global__ void add(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}
extern "C" __global__ void racy(const float* x, float* y, int n) {
    y[0] += x[threadIdx.x];  // the race
}
"""


def done(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else None


def launched(name, threads, n=64):
    done(driver.cuInit(0))
    done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(0))))))
    program = done(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
    done(nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=compute_90"]))
    ptx = b" " * done(nvrtc.nvrtcGetPTXSize(program))
    done(nvrtc.nvrtcGetPTX(program, ptx))
    kernel = done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(ptx)), name))
    x = np.arange(64, dtype=np.float32)
    at_x, at_y = done(driver.cuMemAlloc(x.nbytes)), done(driver.cuMemAlloc(x.nbytes))
    done(driver.cuMemcpyHtoD(at_x, x.ctypes.data, x.nbytes))
    done(driver.cuMemsetD32(at_y, 0, 64))
    args = ((at_x, at_y, n), (None, None, ctypes.c_int))
    result = driver.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, args, 0)
    y = np.empty_like(x)
    done(driver.cuMemcpyDtoH(y.ctypes.data, at_y, y.nbytes))
    done(driver.cuMemFree(at_x))
    done(driver.cuMemFree(at_y))
    return result[0], x, y


def test_add():
    result, x, y = launched(b"add", 64)
    assert result == 0 and (x == y).all()


def test_out_of_bounds():
    launched(b"add", 128, 65)


def test_race():
    assert launched(b"racy", 64)[0] == driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
'''

CORE = '''
import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
template <typename T> __global__ void fill(T* y, T value) { y[threadIdx.x] = value; }
"""


def test_fill():
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}", lineinfo=True)
    module = Program(SOURCE, "c++", options).compile("ptx", name_expressions=("fill<float>",))
    memory = device.allocate(256, stream=stream)
    config = LaunchConfig(grid=1, block=64)
    launch(stream, config, module.get_kernel("fill<float>"), memory, np.float32(1.5))
    stream.sync()
    host = np.empty(64, np.float32)
    from cuda.bindings import driver

    assert driver.cuMemcpyDtoH(host.ctypes.data, int(memory.handle), 256)[0] == 0
    assert (host == 1.5).all()
'''


def test_a_suite_of_cuda_bindings(report_of: Callable[..., str]) -> None:
    report = report_of(BINDINGS, passed=1, failed=2)
    assert "race at line" in report and "out_of_bounds at line" in report


def test_a_suite_of_cuda_core(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cuda.core")
    pytester.makepyfile(test_suite=CORE)
    result = pytester.runpytest_subprocess("--flashcore")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*1 kernel, 1 launch: 1 passed*"])
