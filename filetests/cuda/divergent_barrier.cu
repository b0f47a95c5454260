// A barrier of the whole CTA stands in a branch that a part of a warp takes.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(float* x) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = x[i];  // hazard: race
    if (i < 16) {
        __syncthreads();  // hazard: barrier_divergence
        x[i] = tile[i + 8];  // hazard: race
    }
    x[i] += 1.0f;  // hazard: barrier_divergence
}

extern "C" __global__ void right(float* x) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = x[i];
    __syncthreads();
    if (i < 16) x[i] = tile[i + 8];
    x[i] += 1.0f;
}
