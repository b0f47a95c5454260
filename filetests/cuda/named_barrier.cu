// Two warps hand a tile over at a barrier for 64 threads. A barrier that counts 96 threads never completes.
//! arg = [{ role = "buffer", dtype = "f32", elements = 32, init = "uninitialised" }]
//! [launch]
//! grid = [1]
//! block = [128]

template <int COUNT> __device__ void handover(float* y) {
    __shared__ float tile[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        tile[lane] = lane;
        asm volatile("bar.arrive 1, %0;" ::"n"(COUNT) : "memory");
    } else if (warp == 1) {
        asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");  // hazard: deadlock
        y[lane] = tile[31 - lane];
    }
}

extern "C" __global__ void wrong(float* y) { handover<96>(y); }

extern "C" __global__ void right(float* y) { handover<64>(y); }
