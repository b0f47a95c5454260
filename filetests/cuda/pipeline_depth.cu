// Three stages of cp.async. Waiting until two groups are left is one group too few when the oldest of three
// is needed.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 256, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 32, init = "uninitialised" },
//! ]
//! [launch]
//! grid = [1]
//! block = [32]

__device__ void fetch(float* to, const float* from) {
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place), "l"(from));  // hazard: async_not_waited
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> __device__ void sum(const float* x, float* y) {
    __shared__ float stages[3][32];
    int t = threadIdx.x;
    float total = 0;
    fetch(&stages[0][t], x + t);
    fetch(&stages[1][t], x + 32 + t);
    for (int tile = 0; tile < 6; ++tile) {
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
        total += stages[tile % 3][t];  // hazard: async_not_waited
        fetch(&stages[(tile + 2) % 3][t], x + (tile + 2) * 32 + t);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    y[t] = total;
}

extern "C" __global__ void wrong(const float* x, float* y) { sum<2>(x, y); }

extern "C" __global__ void right(const float* x, float* y) { sum<1>(x, y); }
