// A producer warpgroup gives registers away so that two consumer warpgroups have more of them.
// sm: 90a
//! arg = [{ role = "buffer", dtype = "i32", elements = 384 }]
//! [launch]
//! grid = [1]
//! block = [384]

template <int REGISTERS>
__device__ void give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));  // hazard: register_pool
}

__device__ void take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }  // hazard: deadlock

template <int REGISTERS>
__device__ void roles(int* out) {
    if (threadIdx.x < 128) {
        give<REGISTERS>();
    } else {
        take();
    }
    out[threadIdx.x] = threadIdx.x;
}

// 384 threads have 168 registers each: 176 are more than the producer has.
extern "C" __global__ void __launch_bounds__(384, 1) wrong(int* out) { roles<176>(out); }

extern "C" __global__ void __launch_bounds__(384, 1) right(int* out) { roles<24>(out); }
