# A product on tensor cores, with 100 rows of keys in blocks of 64. `wrong` has no mask for the last block.
# sm: 90
#! [launch]
#! grid = [1]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "f16"
#! shape = [64, 64]
#! init = "random"
#! [[arg]]
#! name = "y"
#! role = "buffer"
#! dtype = "f16"
#! shape = [100, 64]
#! init = "random"
#! [[arg]]
#! name = "z"
#! role = "buffer"
#! dtype = "f32"
#! shape = [64, 128]
#! [[arg]]
#! role = "i32"
#! value = 100
import triton
import triton.language as tl


@triton.jit
def wrong(x, y, z, n):
    at = tl.arange(0, 64)
    a = tl.load(x + at[:, None] * 64 + at[None, :])
    for first in range(0, n, 64):
        row = first + at
        b = tl.load(y + row[None, :] * 64 + at[:, None])  # hazard: out_of_bounds
        tl.store(z + at[:, None] * 128 + row[None, :], tl.dot(a, b))


@triton.jit
def right(x, y, z, n):
    at = tl.arange(0, 64)
    a = tl.load(x + at[:, None] * 64 + at[None, :])
    for first in range(0, n, 64):
        row = first + at
        b = tl.load(y + row[None, :] * 64 + at[:, None], row[None, :] < n, 0.0)
        tl.store(z + at[:, None] * 128 + row[None, :], tl.dot(a, b))
