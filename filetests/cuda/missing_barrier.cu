// A CTA exchanges words through shared memory.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(float* x) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = x[i];  // hazard: race
    x[i] = tile[63 - i];  // hazard: race uninitialised_read
}

extern "C" __global__ void right(float* x) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = x[i];
    __syncthreads();
    x[i] = tile[63 - i];
}
