// The last CTA has more threads than there are elements.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 100, init = "random" },
//!     { role = "i32", value = 100 },
//! ]
//! [launch]
//! grid = [2]
//! block = [64]

extern "C" __global__ void wrong(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float old = x[i];  // hazard: out_of_bounds
    x[i] = 2 * old;  // hazard: out_of_bounds
}

extern "C" __global__ void right(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 2 * x[i];
}
