// A CTA reads the shared memory of its peer, which must not end before.
// sm: 90
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "uninitialised" }]
//! [launch]
//! grid = [2]
//! cluster = [2]
//! block = [32]

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

__device__ void exchange(float* y, bool stay) {
    __shared__ float tile[32];
    auto cluster = cg::this_cluster();
    tile[threadIdx.x] = blockIdx.x * 32 + threadIdx.x;
    cluster.sync();
    y[blockIdx.x * 32 + threadIdx.x] = cluster.map_shared_rank(tile, 1 - cluster.block_rank())[threadIdx.x];  // hazard: race
    if (stay) cluster.sync();
}

extern "C" __global__ void wrong(float* y) { exchange(y, false); }

extern "C" __global__ void right(float* y) { exchange(y, true); }
