// Only the thread that copies waits for the copy.
// sm: 90
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 32, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 32, init = "zeros" },
//! ]
//! [launch]
//! grid = [1]
//! block = [32]

__device__ unsigned address_of(void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned long long* barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address_of(barrier)), "r"(phase) : "memory");
}

__device__ void load(float* to, const float* from, unsigned long long* barrier) {
    unsigned mbarrier = address_of(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(mbarrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile(
        "{\n.reg .b64 s;\nmbarrier.arrive.expect_tx.shared.b64 s, [%0], 128;\n}" ::"r"(mbarrier)
        : "memory");
    asm volatile(  // hazard: async_not_waited
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
        ::"r"(address_of(to)), "l"(from), "r"(mbarrier) : "memory");
}

extern "C" __global__ void wrong(const float* x, float* out) {
    __shared__ __align__(128) float tile[32];
    __shared__ unsigned long long barrier;
    int i = threadIdx.x;
    if (i == 0) load(tile, x, &barrier);
    __syncwarp();
    if (i == 0) wait(&barrier, 0);
    out[i] = 2 * tile[i];  // hazard: async_not_waited
}

extern "C" __global__ void right(const float* x, float* out) {
    __shared__ __align__(128) float tile[32];
    __shared__ unsigned long long barrier;
    int i = threadIdx.x;
    if (i == 0) load(tile, x, &barrier);
    __syncwarp();
    wait(&barrier, 0);
    out[i] = 2 * tile[i];
}
