// Threads arrive at an mbarrier that another thread may not have initialised yet.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

__device__ unsigned address_of(void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned long long* barrier, unsigned phase) {
    asm volatile(  // hazard: race
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address_of(barrier)), "r"(phase) : "memory");
}

__device__ void init(unsigned long long* barrier, unsigned count) {
    asm volatile(  // hazard: race
        "mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}

__device__ void arrive(unsigned long long* barrier) {
    asm volatile(  // hazard: race
        "{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(address_of(barrier)) : "memory");
}

extern "C" __global__ void wrong(float* x) {
    __shared__ unsigned long long barrier;
    __shared__ float tile[64];
    int i = threadIdx.x;
    if (i == 0) init(&barrier, 64);
    tile[i] = x[i];
    arrive(&barrier);
    wait(&barrier, 0);
    x[i] = tile[63 - i];
}

extern "C" __global__ void right(float* x) {
    __shared__ unsigned long long barrier;
    __shared__ float tile[64];
    int i = threadIdx.x;
    if (i == 0) init(&barrier, 64);
    __syncthreads();
    tile[i] = x[i];
    arrive(&barrier);
    wait(&barrier, 0);
    x[i] = tile[63 - i];
}
