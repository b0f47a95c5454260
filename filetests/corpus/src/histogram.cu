// Histogram of bytes: atomics on shared counters, then one atomic a counter on global memory.
extern "C" __global__ void histogram(const unsigned int* words, unsigned int* bins, int count) {
    __shared__ unsigned int local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const unsigned int word = words[i];
        for (int byte = 0; byte < 4; ++byte) atomicAdd(&local[word >> 8 * byte & 255], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i] != 0) atomicAdd(&bins[i], local[i]);
}
