// CTAs count in global memory. An atomic of block scope is atomic among the threads of one CTA alone.
//! arg = [{ role = "buffer", dtype = "i32", elements = 1, init = "zeros" }]
//! [launch]
//! grid = [4]
//! block = [64]

extern "C" __global__ void wrong(int* count) {
    atomicAdd_block(count, 1);  // hazard: race
}

extern "C" __global__ void right(int* count) {
    atomicAdd(count, 1);
}
