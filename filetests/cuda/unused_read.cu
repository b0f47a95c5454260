// Each pair of threads turns one element in place. Both threads read it, and the even one writes it. What the
// odd thread read reaches no store.
//! arg = [{ role = "buffer", dtype = "f32", elements = 32, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

// A compiler would move a plain load into the branch.
__device__ float load(const float* x) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(x));  // note: unused_read
    return value;
}

extern "C" __global__ void wrong(float* x) {
    int at = threadIdx.x / 2;
    float turned = 1.0f - load(x + at);
    if (threadIdx.x % 2 == 0) x[at] = turned;  // note: unused_read
}

extern "C" __global__ void right(float* x) {
    int at = threadIdx.x / 2;
    if (threadIdx.x % 2 == 0) x[at] = 1.0f - load(x + at);
}
