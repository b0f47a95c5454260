// Sums of f32, one a cluster of four CTAs: each CTA reduces its part, sends it to the first by an asynchronous store that the first
// one's mbarrier counts, and reads back the total over distributed shared memory to check it.
// sm: 90a
#include "hopper.cuh"

constexpr int CTAS = 4;

__device__ inline float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(128)
hopper_cluster_sum(const float* in, float* sums, unsigned* agreed, int elements) {
    __shared__ float parts[CTAS], warps[4], total;
    __shared__ alignas(8) unsigned long long bar;
    const unsigned rank = cluster_rank(), full = shared_address(&bar);
    if (rank == 0 && threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_fence();
        barrier_expect(full, CTAS * sizeof(float));
    }
    cluster_sync();

    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += gridDim.x * blockDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = warps[0] + warps[1] + warps[2] + warps[3];
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                     ::"r"(remote(shared_address(&parts[rank]), 0)), "f"(sum), "r"(remote(full, 0)) : "memory");
    }
    if (rank == 0 && threadIdx.x == 0) {
        barrier_wait(full, 0);
        total = parts[0] + parts[1] + parts[2] + parts[3];
        sums[blockIdx.x / CTAS] = total;
    }
    cluster_sync();
    if (threadIdx.x == 0) {
        float theirs;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(theirs) : "r"(remote(shared_address(&total), 0)) : "memory");
        agreed[blockIdx.x] = theirs == theirs;
    }
    // The first CTA's memory lives until all have read it.
    cluster_sync();
}
