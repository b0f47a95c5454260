"""Triton kernels of the tests: right ones, and one for each hazard. The tests copy this file."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


@triton.jit
def racy_sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    total = tl.load(out_ptr)  # the racing read
    tl.store(out_ptr, total + tl.sum(x))


@triton.jit
def copy_kernel(x_ptr, out_ptr, rows, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * x_stride + at, mask=at < columns)
    tl.store(out_ptr + row * out_stride + at, value, mask=at < columns)


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, half, add: tl.int64, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out_ptr + at, tl.load(x_ptr + at) * factor * half + add)
    else:
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor * half + add, mask=at < n)


tuned_scale_kernel = triton.autotune(
    [triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 512}, num_warps=4)], key=["n"]
)(triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(scale_kernel))


@triton.jit
def gather_kernel(table_ptr, out_ptr, n, BLOCK: tl.constexpr):
    source = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * n + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def product_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(tl.float16))


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=128)
    return out
