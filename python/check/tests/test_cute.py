"""The plugin on a suite with kernels of the CuTe DSL, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("nvidia_cutlass_dsl")

SUITE = """
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 64 + thread
    if i < cute.size(x):
        out[i] = x[i] + y[i]


@cute.jit
def add(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor):
    add_kernel(x, y, out).launch(grid=[4, 1, 1], block=[64, 1, 1])


@cute.kernel
def racy_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    out[0] = out[0] + x[thread]  # the race


@cute.jit
def racy(x: cute.Tensor, out: cute.Tensor):
    racy_kernel(x, out).launch(grid=[1, 1, 1], block=[64, 1, 1])


def test_add():
    x, y, out = torch.randn(200, device="cuda"), torch.randn(200, device="cuda"), torch.empty(200, device="cuda")
    tensors = [from_dlpack(tensor) for tensor in (x, y, out)]
    add(*tensors)
    assert torch.equal(out, x + y)
    compiled = cute.compile(add, *tensors)
    y.fill_(1)
    compiled(*tensors)
    assert torch.equal(out, x + 1)


def test_race():
    racy(from_dlpack(torch.ones(64, device="cuda")), from_dlpack(torch.zeros(1, device="cuda")))
"""


def test_a_suite(report_of: Callable[..., str]) -> None:
    report = report_of(SUITE, passed=1, failed=1)
    assert "race at test_suite.py:" in report and "out[0] = out[0] + x[thread]  # the race" in report
    assert "cute.arch.sync_" in report
