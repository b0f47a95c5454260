# All programs add to one total. A load and a store are no atomic.
#! [launch]
#! grid = [4]
#! [[arg]]
#! name = "x"
#! role = "buffer"
#! dtype = "i32"
#! elements = 512
#! init = "iota"
#! [[arg]]
#! name = "total"
#! role = "buffer"
#! dtype = "i32"
#! elements = 1
#! init = "zeros"
import triton
import triton.language as tl


@triton.jit
def wrong(x, total):
    part = tl.sum(tl.load(x + tl.program_id(0) * 128 + tl.arange(0, 128)), 0)
    before = tl.load(total)  # hazard: race
    tl.store(total, before + part)  # hazard: race


@triton.jit
def right(x, total):
    part = tl.sum(tl.load(x + tl.program_id(0) * 128 + tl.arange(0, 128)), 0)
    tl.atomic_add(total, part)
