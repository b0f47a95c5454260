// A bulk copy reads shared memory that threads wrote.
// sm: 90
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 32, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 32, init = "zeros" },
//! ]
//! [launch]
//! grid = [1]
//! block = [32]

__device__ unsigned address_of(void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void store(float* to, float* from) {
    asm volatile(  // hazard: missing_proxy_fence
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;"
        ::"l"(to), "r"(address_of(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void wrong(const float* x, float* out) {
    __shared__ __align__(128) float tile[32];
    int i = threadIdx.x;
    tile[i] = 2 * x[i];  // hazard: missing_proxy_fence
    __syncwarp();
    if (i == 0) store(out, tile);
}

extern "C" __global__ void right(const float* x, float* out) {
    __shared__ __align__(128) float tile[32];
    int i = threadIdx.x;
    tile[i] = 2 * x[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (i == 0) store(out, tile);
}
