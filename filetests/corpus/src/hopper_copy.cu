// out = 2 · in + 1 for a matrix of f32, box by box: a bulk tensor copy in, an mbarrier that counts its bytes, arithmetic on shared
// memory, a proxy fence, a bulk tensor copy out. Two boxes are in flight.
// sm: 90a
#include "hopper.cuh"

constexpr int ROWS = 32, COLUMNS = 32, BYTES = ROWS * COLUMNS * 4;

__device__ inline void load(unsigned to, const TensorMap* map, int x, int y, unsigned bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}

__device__ inline void store(const TensorMap* map, int x, int y, unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128)
hopper_copy(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out, int boxes) {
    __shared__ alignas(128) float tile[2][ROWS * COLUMNS];
    __shared__ alignas(8) unsigned long long bar[2];
    const int x = blockIdx.x * COLUMNS;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&in) : "memory");
        barrier_init(shared_address(&bar[0]), 1);
        barrier_init(shared_address(&bar[1]), 1);
        barrier_init_fence();
        for (int i = 0; i < 2 && i < boxes; ++i) {
            barrier_expect(shared_address(&bar[i]), BYTES);
            load(shared_address(tile[i]), &in, x, i * ROWS, shared_address(&bar[i]));
        }
    }
    __syncthreads();
    for (int i = 0; i < boxes; ++i) {
        const int slot = i & 1;
        barrier_wait(shared_address(&bar[slot]), (i >> 1) & 1);
        for (int e = threadIdx.x; e < ROWS * COLUMNS; e += blockDim.x) tile[slot][e] = 2.0f * tile[slot][e] + 1.0f;
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            store(&out, x, i * ROWS, shared_address(tile[slot]));
            if (i + 2 < boxes) {
                // The slot is free when the copy out has read it.
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                barrier_expect(shared_address(&bar[slot]), BYTES);
                load(shared_address(tile[slot]), &in, x, (i + 2) * ROWS, shared_address(&bar[slot]));
            }
        }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
