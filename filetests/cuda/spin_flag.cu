// The second warp waits for a flag that the first warp sets. The first warp waits for the second one at a
// barrier before it sets the flag.
//! arg = [{ role = "buffer", dtype = "i32", elements = 1, init = "zeros" }]
//! [launch]
//! grid = [1]
//! block = [64]

__device__ void set(int* flag) { atomicExch(flag, 1); }

__device__ void await(int* flag) {
    while (*reinterpret_cast<volatile int*>(flag) == 0) {}  // hazard: deadlock
}

extern "C" __global__ void wrong(int* flag) {
    if (threadIdx.x >= 32) await(flag);
    __syncthreads();  // hazard: deadlock
    if (threadIdx.x == 0) set(flag);
}

extern "C" __global__ void right(int* flag) {
    if (threadIdx.x == 0) set(flag);
    if (threadIdx.x >= 32) await(flag);
    __syncthreads();
}
