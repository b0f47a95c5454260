# Each element becomes the sum of itself and its right neighbour. In place, a program may read what the next
# program has already changed.
#! [launch]
#! grid = [4]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "f32"
#! elements = 513
#! init = "random"
#! [[arg]]
#! name = "y"
#! role = "buffer"
#! dtype = "f32"
#! elements = 513
#! init = "zeros"
import triton
import triton.language as tl


@triton.jit
def wrong(x, y):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    sums = tl.load(x + at) + tl.load(x + at + 1)  # hazard: race
    tl.store(x + at, sums)  # hazard: race


@triton.jit
def right(x, y):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y + at, tl.load(x + at) + tl.load(x + at + 1))
