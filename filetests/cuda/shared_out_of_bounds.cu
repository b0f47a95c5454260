// One word a warp is reserved, and each lane writes one.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(float* x) {
    __shared__ float part[2];
    int i = threadIdx.x;
    part[i] = x[i];  // hazard: out_of_bounds
    __syncthreads();
    x[i] = part[i / 32];
}

extern "C" __global__ void right(float* x) {
    __shared__ float part[2];
    int i = threadIdx.x;
    if (i % 32 == 0) part[i / 32] = x[i];
    __syncthreads();
    x[i] = part[i / 32];
}
