// Softmax over the rows of a matrix: one CTA a row, warp shuffles, then one round through shared memory.
__device__ float warp_max(float v) {
    for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

__device__ float warp_sum(float v) {
    for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

extern "C" __global__ void __launch_bounds__(128) softmax(const float* __restrict__ x, float* __restrict__ y, int cols) {
    __shared__ float partial[2][4];
    const float* row = x + (size_t)blockIdx.x * cols;
    float* out = y + (size_t)blockIdx.x * cols;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    float top = __int_as_float(0xff800000);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) top = fmaxf(top, row[c]);
    top = warp_max(top);
    if (lane == 0) partial[0][warp] = top;
    __syncthreads();
    top = fmaxf(fmaxf(partial[0][0], partial[0][1]), fmaxf(partial[0][2], partial[0][3]));

    float sum = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += __expf(row[c] - top);
    sum = warp_sum(sum);
    if (lane == 0) partial[1][warp] = sum;
    __syncthreads();
    sum = (partial[1][0] + partial[1][1]) + (partial[1][2] + partial[1][3]);

    const float scale = 1.0f / sum;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[c] = __expf(row[c] - top) * scale;
}
