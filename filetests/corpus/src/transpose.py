"""Transpose of a matrix of f32 in tiles."""
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, rows, cols, TILE: tl.constexpr):
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tile = tl.load(x + r[:, None] * cols + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < cols), other=0.0)
    tl.store(y + c[:, None] * rows + r[None, :], tl.trans(tile), mask=(c[:, None] < cols) & (r[None, :] < rows))


SIGNATURE = {"x": "*fp32", "y": "*fp32", "rows": "i32", "cols": "i32", "TILE": "constexpr"}
CONSTANTS = {"TILE": 32}
ATTRIBUTES = {(i,): [["tt.divisibility", 16]] for i in range(4)}
OPTIONS = {"num_warps": 4}
