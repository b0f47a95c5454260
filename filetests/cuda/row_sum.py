# One program sums one row. `wrong` reads whole blocks beyond the end of the last row.
#! [launch]
#! grid = [3]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "f32"
#! elements = 300
#! init = "random"
#! [[arg]]
#! name = "y"
#! role = "buffer"
#! dtype = "f32"
#! elements = 3
#! init = "uninitialised"
#! [[arg]]
#! role = "i32"
#! value = 100
import triton
import triton.language as tl


@triton.jit
def wrong(x, y, n):
    row = tl.program_id(0)
    at = tl.arange(0, 128)
    part = tl.load(x + row * n + at)  # hazard: out_of_bounds
    tl.store(y + row, tl.sum(tl.where(at < n, part, 0.0), 0))


@triton.jit
def right(x, y, n):
    row = tl.program_id(0)
    at = tl.arange(0, 128)
    part = tl.load(x + row * n + at, at < n, 0.0)
    tl.store(y + row, tl.sum(part, 0))
