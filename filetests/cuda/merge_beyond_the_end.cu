// One step of a serial merge: each thread takes the smaller one of two keys. The last thread reads a key beyond
// the end, and must not compare it.
//! arg = [
//!     { role = "buffer", dtype = "i32", elements = 64, init = "random" },
//!     { role = "buffer", dtype = "i32", elements = 64 },
//!     { role = "i32", value = 64 },
//! ]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(const int* x, int* y, int n) {
    __shared__ int keys[65];
    int i = threadIdx.x;
    keys[i] = x[i];
    __syncthreads();
    int a = keys[i];
    int b = keys[i + 1];  // hazard: uninitialised_read
    bool second = b < a;
    y[i] = second ? b : a;
}

extern "C" __global__ void right(const int* x, int* y, int n) {
    __shared__ int keys[65];
    int i = threadIdx.x;
    keys[i] = x[i];
    __syncthreads();
    int a = keys[i];
    int b = keys[i + 1];  // note of right: unused_read
    bool second = i + 1 < n && b < a;
    y[i] = second ? b : a;
}
