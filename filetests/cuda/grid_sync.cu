// A cooperative launch: each CTA writes its part, the grid meets, and each CTA reads its neighbour's part.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 192, init = "uninitialised" },
//!     { role = "buffer", dtype = "f32", elements = 192, init = "uninitialised" },
//! ]
//! [launch]
//! grid = [3]
//! block = [64]
//! cooperative = true

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

extern "C" __global__ void wrong(float* parts, float* out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    parts[i] = i;  // hazard: race
    __syncthreads();
    __threadfence();
    out[i] = parts[(i + 64) % 192];  // hazard: race uninitialised_read
}

extern "C" __global__ void right(float* parts, float* out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    parts[i] = i;
    cg::this_grid().sync();
    out[i] = parts[(i + 64) % 192];
}
