# The programs along axis 1 multiply a part of K each, on tensor cores. Each must have a tile of its own, for
# another kernel to add.
# sm: 90
#! [launch]
#! grid = [1, 2]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "f16"
#! shape = [64, 128]
#! init = "random"
#! [[arg]]
#! name = "y"
#! role = "buffer"
#! dtype = "f16"
#! shape = [128, 64]
#! init = "random"
#! [[arg]]
#! name = "z"
#! role = "buffer"
#! dtype = "f32"
#! shape = [2, 64, 64]
#! init = "zeros"
import triton
import triton.language as tl


@triton.jit
def part(x, y):
    rows = tl.arange(0, 64)
    k = 64 * tl.program_id(1) + tl.arange(0, 64)
    a = tl.load(x + rows[:, None] * 128 + k[None, :])
    b = tl.load(y + k[:, None] * 64 + rows[None, :])
    return tl.dot(a, b), rows[:, None] * 64 + rows[None, :]


@triton.jit
def wrong(x, y, z):
    product, at = part(x, y)
    tl.store(z + at, product)  # hazard: race


@triton.jit
def right(x, y, z):
    product, at = part(x, y)
    tl.store(z + tl.program_id(1) * 64 * 64 + at, product)
