// The last CTA reads what all CTAs wrote: strong reads race with nothing, but a fence before the ticket does
// not make the reads behind it acquire anything. All threads fence, so no run sees it by the order of events.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 256, init = "zeros" },
//!     { role = "buffer", dtype = "u32", elements = 1, init = "zeros" },
//!     { role = "buffer", dtype = "f32", elements = 64 },
//! ]
//! [launch]
//! grid = [4]
//! block = [64]

__device__ bool is_last(unsigned* ticket) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == gridDim.x - 1;
    __syncthreads();
    return last;
}

extern "C" __global__ void wrong(volatile float* parts, unsigned* ticket, float* out) {
    parts[blockIdx.x * 64 + threadIdx.x] = threadIdx.x + 1.0f;
    if (!is_last(ticket)) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += parts[i * 64 + threadIdx.x];  // hazard: weak_order
    out[threadIdx.x] = sum;
}

extern "C" __global__ void right(volatile float* parts, unsigned* ticket, float* out) {
    parts[blockIdx.x * 64 + threadIdx.x] = threadIdx.x + 1.0f;
    if (!is_last(ticket)) return;
    __threadfence();
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += parts[i * 64 + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *ticket = 0;
}
