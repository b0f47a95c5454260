// Threads sum items of a tile that was not loaded to its end. Only a sum without the bound depends on the items
// that nobody loaded.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 128, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 128 },
//!     { role = "i32", value = 100 },
//! ]
//! [launch]
//! grid = [1]
//! block = [128]

extern "C" __global__ void wrong(const float* x, float* y, int n) {
    __shared__ float tile[128];
    int i = threadIdx.x;
    if (i < n) tile[i] = x[i];
    __syncthreads();
    float sum = 0.0f;
    for (int step = 0; step < 4; step++) {
        float item = tile[(i + 16 * step) % 128];  // hazard: uninitialised_read
        sum = 0.5f * sum + item;
    }
    y[i] = sum;
}

extern "C" __global__ void right(const float* x, float* y, int n) {
    __shared__ float tile[128];
    int i = threadIdx.x;
    if (i < n) tile[i] = x[i];
    __syncthreads();
    float sum = 0.0f;
    for (int step = 0; step < 4; step++) {
        float item = tile[(i + 16 * step) % 128];  // note of right: unused_read
        if ((i + 16 * step) % 128 < n) sum = 0.5f * sum + item;
    }
    y[i] = sum;
}
