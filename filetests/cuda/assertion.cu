// A kernel that checks its own argument.
//! arg = [{ role = "buffer", dtype = "i32", elements = 32, init = "iota" }]
//! [launch]
//! grid = [1]
//! block = [32]

#include <cassert>

extern "C" __global__ void wrong(int* x) {
    assert(x[threadIdx.x] < 16);  // hazard: assertion_failed
    x[threadIdx.x] += 1;
}

extern "C" __global__ void right(int* x) {
    assert(x[threadIdx.x] < 32);
    x[threadIdx.x] += 1;
}
