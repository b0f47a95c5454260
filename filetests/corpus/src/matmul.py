"""C = A B in bf16 with f32 accumulators, pipelined through cp.async."""
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, c, m, n, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, depth, BK):
        left = tl.load(a + rows[:, None] * depth + (k + ks)[None, :], mask=(rows[:, None] < m) & ((k + ks)[None, :] < depth), other=0.0)
        right = tl.load(b + (k + ks)[:, None] * n + cols[None, :], mask=((k + ks)[:, None] < depth) & (cols[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + cols[None, :], total.to(tl.bfloat16), mask=(rows[:, None] < m) & (cols[None, :] < n))


SIGNATURE = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "m": "i32", "n": "i32", "depth": "i32",
             "BM": "constexpr", "BN": "constexpr", "BK": "constexpr"}
CONSTANTS = {"BM": 64, "BN": 64, "BK": 32}
ATTRIBUTES = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 4, 5)}
OPTIONS = {"num_warps": 4, "num_stages": 3}
TARGETS = ("80", "89", "90a", "100a")
