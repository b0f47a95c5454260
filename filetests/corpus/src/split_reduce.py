"""Merges the partial results of split-KV decode: acc [head][split][64], top and sum [head][split]."""
import triton
import triton.language as tl


@triton.jit
def kernel(acc, top, total, out, splits, SPLITS: tl.constexpr, D: tl.constexpr):
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    dims = tl.arange(0, D)
    inside = s < splits
    tops = tl.load(top + head * splits + s, mask=inside, other=-float("inf"))
    weights = tl.exp(tops - tl.max(tops, axis=0))
    sums = tl.load(total + head * splits + s, mask=inside, other=0.0)
    parts = tl.load(acc + (head * splits + s)[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
    merged = tl.sum(parts * weights[:, None], axis=0)
    tl.store(out + head * D + dims, merged / tl.sum(sums * weights, axis=0))


SIGNATURE = {"acc": "*fp32", "top": "*fp32", "total": "*fp32", "out": "*fp32", "splits": "i32", "SPLITS": "constexpr", "D": "constexpr"}
CONSTANTS = {"SPLITS": 16, "D": 64}
ATTRIBUTES = {(i,): [["tt.divisibility", 16]] for i in range(4)}
OPTIONS = {"num_warps": 2}
