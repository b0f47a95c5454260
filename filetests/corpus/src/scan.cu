// Inclusive prefix sum of each CTA's 256 numbers: shuffles inside a warp, the warps' totals scanned by the first one.
extern "C" __global__ void scan(const int* in, int* out, int count) {
    __shared__ int totals[8];
    const int i = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int value = i < count ? in[i] : 0;
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int below = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += below;
    }
    if (lane == 31) totals[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int total = lane < 8 ? totals[lane] : 0;
        for (int offset = 1; offset < 8; offset <<= 1) {
            const int below = __shfl_up_sync(0xffffffffu, total, offset);
            if (lane >= offset) total += below;
        }
        if (lane < 8) totals[lane] = total;
    }
    __syncthreads();
    if (warp > 0) value += totals[warp - 1];
    if (i < count) out[i] = value;
}
