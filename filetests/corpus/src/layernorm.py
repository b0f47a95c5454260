"""Layer normalisation of f16 rows, statistics in f32."""
import triton
import triton.language as tl


@triton.jit
def kernel(x, weight, bias, y, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    values = tl.load(x + row * cols + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / cols
    centred = tl.where(inside, values - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=0) / cols + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    b = tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(y + row * cols + columns, (centred * inverse * w + b).to(tl.float16), mask=inside)


SIGNATURE = {"x": "*fp16", "weight": "*fp32", "bias": "*fp32", "y": "*fp16", "cols": "i32", "eps": "fp32", "BLOCK": "constexpr"}
CONSTANTS = {"BLOCK": 1024}
ATTRIBUTES = {(i,): [["tt.divisibility", 16]] for i in range(5)}
OPTIONS = {"num_warps": 4}
