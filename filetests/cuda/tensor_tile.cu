// TMA brings a tile of 16×16 numbers. Its mbarrier's phases have the parities 0 and 1 in turn.
// sm: 90a
//! arg = [
//!     { role = "tensor_map", of = "x", dims = [16, 32], box = [16, 16] },
//!     { role = "buffer", dtype = "f32", elements = 512 },
//!     { name = "x", role = "buffer", dtype = "f32", shape = [32, 16], init = "random", parameter = false },
//! ]
//! [launch]
//! grid = [1]
//! block = [32]

struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ unsigned address_of(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address_of(barrier)), "r"(parity) : "memory");
}

__device__ void load(float* to, const TensorMap* map, int row, unsigned long long* barrier) {
    unsigned mbarrier = address_of(barrier), shared = address_of(to);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(mbarrier) : "memory");
    asm volatile(  // hazard: async_not_waited
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared), "l"(map), "r"(0), "r"(row), "r"(mbarrier) : "memory");
}

template <unsigned FLIP>
__device__ void twice(const TensorMap* map, float* out) {
    __shared__ alignas(128) float tile[2][256];
    __shared__ unsigned long long barrier;
    int i = threadIdx.x;
    if (i == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(&barrier)) : "memory");
    if (i == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    for (unsigned k = 0; k < 2; ++k) {
        if (i == 0) load(tile[k], map, 16 * k, &barrier);
        __syncwarp();
        wait(&barrier, k & FLIP);
        for (int j = i; j < 256; j += 32) out[256 * k + j] = 2 * tile[k][j];  // hazard: async_not_waited
    }
}

extern "C" __global__ void wrong(const __grid_constant__ TensorMap map, float* out) { twice<0>(&map, out); }

extern "C" __global__ void right(const __grid_constant__ TensorMap map, float* out) { twice<1>(&map, out); }
