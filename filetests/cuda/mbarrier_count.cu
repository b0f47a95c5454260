// An mbarrier is initialised for more arrivals than there are threads.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

__device__ unsigned address_of(void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned long long* barrier, unsigned phase) {
    asm volatile(  // hazard: deadlock
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address_of(barrier)), "r"(phase) : "memory");
}

__device__ void init(unsigned long long* barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}

__device__ void arrive(unsigned long long* barrier) {
    asm volatile(
        "{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(address_of(barrier)) : "memory");
}

template <int COUNT>
__device__ void exchange(float* x) {
    __shared__ unsigned long long barrier;
    __shared__ float tile[64];
    int i = threadIdx.x;
    if (i == 0) init(&barrier, COUNT);
    __syncthreads();
    tile[i] = x[i];
    arrive(&barrier);
    wait(&barrier, 0);
    x[i] = tile[63 - i];
}

extern "C" __global__ void wrong(float* x) {
    exchange<65>(x);
}

extern "C" __global__ void right(float* x) {
    exchange<64>(x);
}
