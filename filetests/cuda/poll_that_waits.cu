// One thread polls a flag for its CTA and passes the answer on in shared memory. Without the barrier in front
// of the poll it overwrites an answer that other warps still read. That needs a second round of the loop,
// so a CTA that comes too late to wait does not show it.
//! arg = [
//!     { role = "buffer", dtype = "i32", elements = 1, init = "zeros" },
//!     { role = "buffer", dtype = "i32", elements = 64, init = "zeros" },
//!     { role = "buffer", dtype = "i32", elements = 64 },
//! ]
//! [launch]
//! grid = [2]
//! block = [64]
//! cooperative = true

__device__ int poll(int* flag) {
    int value;
    asm volatile("atom.global.acq_rel.gpu.cas.b32 %0, [%1], 1, 1;" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

__device__ void produce(int* flag, int* data) {
    data[threadIdx.x] = threadIdx.x + 1;  // hazard: race
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(flag, 1);
}

extern "C" __global__ void wrong(int* flag, int* data, int* out) {
    __shared__ int answer;
    if (blockIdx.x == 0) return produce(flag, data);
    int seen;
    do {
        if (threadIdx.x == 0) answer = poll(flag);  // hazard: race
        __syncthreads();
        seen = answer;  // hazard: race
    } while (seen != 1);
    __threadfence();
    out[threadIdx.x] = data[threadIdx.x];  // hazard: race
}

extern "C" __global__ void right(int* flag, int* data, int* out) {
    __shared__ int answer;
    if (blockIdx.x == 0) return produce(flag, data);
    int seen;
    do {
        __syncthreads();
        if (threadIdx.x == 0) answer = poll(flag);
        __syncthreads();
        seen = answer;
    } while (seen != 1);
    __threadfence();
    out[threadIdx.x] = data[threadIdx.x];
}
