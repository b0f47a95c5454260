// A producer warp brings tiles by bulk copies into two stages, and four consumer warps sum them. The producer
// must wait until a stage has been read before it overwrites it.
// sm: 90
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 1024, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 128, init = "zeros" },
//! ]
//! [launch]
//! grid = [1]
//! block = [160]

constexpr int TILES = 8, WORDS = 128, STAGES = 2;

__device__ unsigned address_of(void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void init(unsigned long long* barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}

__device__ void wait(unsigned long long* barrier, unsigned phase) {
    asm volatile(  // hazard: deadlock
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address_of(barrier)), "r"(phase) : "memory");
}

__device__ void arrive(unsigned long long* barrier) {
    asm volatile(
        "{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(address_of(barrier)) : "memory");
}

__device__ void load(float* to, const float* from, unsigned long long* barrier) {
    asm volatile(  // hazard: barrier_divergence
        "{\n.reg .b64 s;\nmbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;\n}" ::"r"(address_of(barrier)),
        "n"(4 * WORDS) : "memory");
    asm volatile(  // hazard: async_not_waited race
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];"
        ::"r"(address_of(to)), "l"(from), "r"(address_of(barrier)), "n"(4 * WORDS) : "memory");
}

template <bool WAITS>
__device__ void sum(const float* x, float* out) {
    __shared__ __align__(128) float stage[STAGES][WORDS];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init(&full[s], 1);
            init(&empty[s], WORDS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= WORDS) {
        if (threadIdx.x > WORDS) return;
        for (int tile = 0; tile < TILES; ++tile) {
            int s = tile % STAGES;
            if (WAITS) wait(&empty[s], 1 ^ (tile / STAGES & 1));
            load(stage[s], x + tile * WORDS, &full[s]);
        }
        return;
    }
    float acc = 0;
    for (int tile = 0; tile < TILES; ++tile) {
        int s = tile % STAGES;
        wait(&full[s], tile / STAGES & 1);
        acc += stage[s][threadIdx.x];  // hazard: async_not_waited
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the next copy into the stage
        arrive(&empty[s]);
    }
    out[threadIdx.x] = acc;
}

extern "C" __global__ void wrong(const float* x, float* out) {
    sum<false>(x, out);
}

extern "C" __global__ void right(const float* x, float* out) {
    sum<true>(x, out);
}
