"""Fused attention forward, f16, head dim 64, [batch·head][sequence][64], with LSE."""
import triton
import triton.language as tl


@triton.jit
def kernel(q, k, v, out, lse, seq_q, seq_kv, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    q_tile = tl.load(q + head * seq_q * D + rows[:, None] * D + dims[None, :], mask=rows[:, None] < seq_q, other=0.0)
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, D), dtype=tl.float32)
    end = seq_kv
    if CAUSAL:
        end = tl.minimum(seq_kv, (tl.program_id(0) + 1) * BM + seq_kv - seq_q)
    for start in range(0, end, BN):
        cols = start + tl.arange(0, BN)
        k_tile = tl.load(k + head * seq_kv * D + cols[None, :] * D + dims[:, None], mask=cols[None, :] < seq_kv, other=0.0)
        scores = tl.dot(q_tile, k_tile) * (scale * 1.4426950408889634)
        keep = cols[None, :] < seq_kv
        if CAUSAL:
            keep = keep & (cols[None, :] <= rows[:, None] + seq_kv - seq_q)
        scores = tl.where(keep, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        v_tile = tl.load(v + head * seq_kv * D + cols[:, None] * D + dims[None, :], mask=cols[:, None] < seq_kv, other=0.0)
        acc = tl.dot(p.to(tl.float16), v_tile, acc)
        top = new_top
    safe = tl.where(total == 0.0, 1.0, total)  # NaN stays NaN
    tl.store(out + head * seq_q * D + rows[:, None] * D + dims[None, :], (acc / safe[:, None]).to(tl.float16), mask=rows[:, None] < seq_q)
    tl.store(lse + head * seq_q + rows, (top + tl.log2(safe)) * 0.6931471805599453, mask=rows < seq_q)


SIGNATURE = {"q": "*fp16", "k": "*fp16", "v": "*fp16", "out": "*fp16", "lse": "*fp32", "seq_q": "i32", "seq_kv": "i32", "scale": "fp32",
             "BM": "constexpr", "BN": "constexpr", "D": "constexpr", "CAUSAL": "constexpr"}
CONSTANTS = {"BM": 64, "BN": 32, "D": 64, "CAUSAL": True}
ATTRIBUTES = {(i,): [["tt.divisibility", 16]] for i in range(5)}
OPTIONS = {"num_warps": 4, "num_stages": 2}
TARGETS = ("80", "89", "90a")
