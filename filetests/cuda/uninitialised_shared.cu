// A tail is not loaded, and is summed all the same.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 64, init = "random" },
//!     { role = "i32", value = 50 },
//! ]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(float* x, int n) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    if (i < n) tile[i] = x[i];
    __syncthreads();
    x[i] = tile[63 - i];  // hazard: uninitialised_read
}

extern "C" __global__ void right(float* x, int n) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = i < n ? x[i] : 0.0f;
    __syncthreads();
    x[i] = tile[63 - i];
}
