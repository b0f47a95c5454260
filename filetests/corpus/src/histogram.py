"""Histogram of small integers: one atomic a value, on global memory."""
import triton
import triton.language as tl


@triton.jit
def kernel(values, bins, count, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    which = tl.load(values + i, mask=inside, other=0)
    tl.atomic_add(bins + (which & (BINS - 1)), 1, mask=inside)


SIGNATURE = {"values": "*i32", "bins": "*i32", "count": "i32", "BLOCK": "constexpr", "BINS": "constexpr"}
CONSTANTS = {"BLOCK": 512, "BINS": 64}
ATTRIBUTES = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
OPTIONS = {"num_warps": 4}
