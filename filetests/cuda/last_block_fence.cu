// The last CTA sums what all CTAs published (CUDA C++ Programming Guide, "Memory Fence Functions").
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 128, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 4, init = "zeros" },
//!     { role = "buffer", dtype = "u32", elements = 1, init = "zeros" },
//!     { role = "buffer", dtype = "f32", elements = 1, init = "zeros" },
//! ]
//! [launch]
//! grid = [4]
//! block = [32]

__device__ float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}

extern "C" __global__ void wrong(const float* x, float* parts, unsigned* ticket, float* out) {
    float sum = warp_sum(x[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x != 0) return;
    parts[blockIdx.x] = sum;  // hazard: race
    if (atomicAdd(ticket, 1) != gridDim.x - 1) return;
    sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += parts[i];  // hazard: race
    *out = sum;
}

extern "C" __global__ void right(const float* x, float* parts, unsigned* ticket, float* out) {
    float sum = warp_sum(x[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x != 0) return;
    parts[blockIdx.x] = sum;
    __threadfence();
    if (atomicAdd(ticket, 1) != gridDim.x - 1) return;
    __threadfence();
    sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += parts[i];
    *out = sum;
}
