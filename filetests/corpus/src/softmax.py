"""Softmax over the rows of a matrix, one program a row."""
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    values = tl.load(x + row * cols + columns, mask=inside, other=-float("inf"))
    shifted = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * cols + columns, shifted / tl.sum(shifted, axis=0), mask=inside)


SIGNATURE = {"x": "*fp32", "y": "*fp32", "cols": "i32", "BLOCK": "constexpr"}
CONSTANTS = {"BLOCK": 512}
ATTRIBUTES = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
OPTIONS = {"num_warps": 4}
