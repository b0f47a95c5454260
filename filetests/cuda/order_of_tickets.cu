// The order of the atomics decides where a value goes, and how a sum of floats is rounded.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 256, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 256, init = "zeros" },
//!     { role = "buffer", dtype = "u32", elements = 1, init = "zeros" },
//! ]
//! [launch]
//! grid = [4]
//! block = [64]

extern "C" __global__ void wrong(const float* x, float* y, unsigned* count) {
    float value = x[blockIdx.x * 64 + threadIdx.x];
    if (value > 0) y[atomicAdd(count, 1)] = value;  // note: nondeterministic
}

// A counter of integers has the same value in any order.
extern "C" __global__ void right(const float* x, float* y, unsigned* count) {
    float value = x[blockIdx.x * 64 + threadIdx.x];
    y[blockIdx.x * 64 + threadIdx.x] = value;
    if (value > 0) atomicAdd(count, 1);
}
