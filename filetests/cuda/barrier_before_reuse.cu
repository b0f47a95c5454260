// Two reductions use the same shared memory. The first result must be read before the second one begins.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

__device__ float sum(float* part, float x) {
    int i = threadIdx.x;
    part[i] = x;  // hazard: race
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (i < half) part[i] += part[i + half];
        __syncthreads();
    }
    return part[0];  // hazard: race
}

extern "C" __global__ void wrong(float* x) {
    __shared__ float part[64];
    int i = threadIdx.x;
    float mean = sum(part, x[i]) / 64;
    float d = x[i] - mean;
    float variance = sum(part, d * d) / 64;
    x[i] = d * rsqrtf(variance);
}

extern "C" __global__ void right(float* x) {
    __shared__ float part[64];
    int i = threadIdx.x;
    float mean = sum(part, x[i]) / 64;
    float d = x[i] - mean;
    __syncthreads();
    float variance = sum(part, d * d) / 64;
    x[i] = d * rsqrtf(variance);
}
