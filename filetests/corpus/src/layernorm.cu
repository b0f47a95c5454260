// Layer normalisation with vector loads and a reduction that is a real call.
__device__ __noinline__ float2 block_sum(float2 v) {
    __shared__ float2 partial[8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int offset = 16; offset > 0; offset >>= 1) {
        v.x += __shfl_down_sync(0xffffffffu, v.x, offset);
        v.y += __shfl_down_sync(0xffffffffu, v.y, offset);
    }
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    float2 total = make_float2(0.0f, 0.0f);
    for (int w = 0; w < blockDim.x / 32; ++w) {
        total.x += partial[w].x;
        total.y += partial[w].y;
    }
    return total;
}

extern "C" __global__ void layernorm(const float4* x, const float4* weight, const float4* bias, float4* y, int cols4, float eps) {
    const float4* row = x + (size_t)blockIdx.x * cols4;
    float2 moments = make_float2(0.0f, 0.0f);
    for (int c = threadIdx.x; c < cols4; c += blockDim.x) {
        const float4 v = row[c];
        moments.x += (v.x + v.y) + (v.z + v.w);
        moments.y += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    moments = block_sum(moments);
    const float mean = moments.x / (4 * cols4);
    const float variance = fmaxf(moments.y / (4 * cols4) - mean * mean, 0.0f);
    const float inverse = rsqrtf(variance + eps);
    for (int c = threadIdx.x; c < cols4; c += blockDim.x) {
        const float4 v = row[c], w = weight[c], b = bias[c];
        y[(size_t)blockIdx.x * cols4 + c] = make_float4((v.x - mean) * inverse * w.x + b.x, (v.y - mean) * inverse * w.y + b.y,
                                                        (v.z - mean) * inverse * w.z + b.z, (v.w - mean) * inverse * w.w + b.w);
    }
}
