// Dekker's algorithm: each CTA raises its flag and looks at the other one. Without a fence between the two
// accesses, both may find the other flag down.
//! arg = [
//!     { role = "buffer", dtype = "i32", elements = 64, init = "zeros" },
//!     { role = "buffer", dtype = "i32", elements = 64, init = "zeros" },
//!     { role = "buffer", dtype = "i32", elements = 1, init = "zeros" },
//! ]
//! [launch]
//! grid = [2]
//! block = [32]
//! cooperative = true

__device__ int relaxed(int* word) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");  // hazard: weak_order
    return value;
}

__device__ void raise(int* word) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(word) : "memory");
}

// Each CTA waits until both have finished, then the first one tells whether at least one saw the other.
__device__ void judge(int* seen, int mine, int* out) {
    atomicAdd(seen + 1, mine);
    __threadfence();
    atomicAdd(seen, 1);
    while (atomicAdd(seen, 0) != 2) {}
    __threadfence();
    if (blockIdx.x == 0) *out = atomicAdd(seen + 1, 0) > 0;
}

extern "C" __global__ void wrong(int* flags, int* seen, int* out) {
    if (threadIdx.x != 0) return;
    raise(flags + 32 * blockIdx.x);
    judge(seen, relaxed(flags + 32 * (1 - blockIdx.x)), out);
}

extern "C" __global__ void right(int* flags, int* seen, int* out) {
    if (threadIdx.x != 0) return;
    raise(flags + 32 * blockIdx.x);
    __threadfence();
    judge(seen, relaxed(flags + 32 * (1 - blockIdx.x)), out);
}
