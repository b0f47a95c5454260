"""C = A B in f16 with f32 accumulators, operands and result moved box by box with tensor maps made by the host."""
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, c, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, depth, BK):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(tl.float16))


SIGNATURE = {"a": "tensordesc<fp16[64, 64]>", "b": "tensordesc<fp16[64, 64]>", "c": "tensordesc<fp16[64, 64]>", "depth": "i32",
             "BM": "constexpr", "BN": "constexpr", "BK": "constexpr"}
CONSTANTS = {"BM": 64, "BN": 64, "BK": 64}
ATTRIBUTES = {}
OPTIONS = {"num_warps": 4, "num_stages": 3}
TARGETS = ("90a",)
