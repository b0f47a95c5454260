// A kernel traps for an element that its inputs have.
//! arg = [{ role = "buffer", dtype = "u32", elements = 32, init = "iota" }]
//! [launch]
//! grid = [1]
//! block = [32]

extern "C" __global__ void wrong(unsigned* x) {
    if (x[threadIdx.x] == 7) __trap();  // hazard: trap
    x[threadIdx.x] = 0;
}

extern "C" __global__ void right(unsigned* x) {
    if (x[threadIdx.x] == 32) __trap();
    x[threadIdx.x] = 0;
}
