// A copy to shared memory is waited for too late.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 128, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 32, init = "zeros" },
//! ]
//! [launch]
//! grid = [1]
//! block = [32]

__device__ void copy16(float* to, const float* from) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile(  // hazard: async_not_waited
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
    asm volatile("cp.async.commit_group;");
}

extern "C" __global__ void wrong(const float* x, float* out) {
    __shared__ __align__(16) float tile[128];
    int i = threadIdx.x;
    copy16(tile + 4 * i, x + 4 * i);
    out[i] = tile[4 * i];  // hazard: async_not_waited
    asm volatile("cp.async.wait_group 0;");
}

extern "C" __global__ void right(const float* x, float* out) {
    __shared__ __align__(16) float tile[128];
    int i = threadIdx.x;
    copy16(tile + 4 * i, x + 4 * i);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    out[i] = tile[4 * i];
}
