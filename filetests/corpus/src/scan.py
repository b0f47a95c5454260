"""Inclusive prefix sum of each program's numbers."""
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < count, other=0)
    tl.store(y + i, tl.cumsum(values, axis=0), mask=i < count)


SIGNATURE = {"x": "*i32", "y": "*i32", "count": "i32", "BLOCK": "constexpr"}
CONSTANTS = {"BLOCK": 512}
ATTRIBUTES = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
OPTIONS = {"num_warps": 4}
