# Programs write tiles of 64. With a step of 32 the tiles overlap, and two programs write different values to
# one place.
#! [launch]
#! grid = [4]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "f32"
#! elements = 256
#! init = "random"
#! [[arg]]
#! name = "y"
#! role = "buffer"
#! dtype = "f32"
#! elements = 256
#! init = "zeros"
import triton
import triton.language as tl


@triton.jit
def wrong(x, y):
    at = tl.arange(0, 64)
    tile = tl.load(x + tl.program_id(0) * 64 + at)
    tl.store(y + tl.program_id(0) * 32 + at, tile)  # hazard: race


@triton.jit
def right(x, y):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(y + at, tl.load(x + at))
