// CTAs and their threads count into the same words.
//! arg = [
//!     { role = "buffer", dtype = "u32", elements = 128, init = "iota" },
//!     { role = "buffer", dtype = "u32", elements = 4, init = "zeros" },
//! ]
//! [launch]
//! grid = [2]
//! block = [64]

extern "C" __global__ void wrong(const unsigned* x, unsigned* counts) {
    unsigned bin = x[blockIdx.x * 64 + threadIdx.x] % 4;
    counts[bin] += 1;  // hazard: race
}

extern "C" __global__ void right(const unsigned* x, unsigned* counts) {
    unsigned bin = x[blockIdx.x * 64 + threadIdx.x] % 4;
    atomicAdd(&counts[bin], 1);
}
