// Like `unused_read`, but the odd thread's value is stored elsewhere, so that the result depends on the order.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 32, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 32, init = "uninitialised" },
//! ]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(float* x, float* y) {
    int at = threadIdx.x / 2;
    float turned = 1.0f - x[at];  // hazard: race
    if (threadIdx.x % 2 == 0) x[at] = turned;  // hazard: race
    else y[at] = turned;
}

extern "C" __global__ void right(float* x, float* y) {
    int at = threadIdx.x / 2;
    float turned = 1.0f - x[at];
    __syncwarp();
    if (threadIdx.x % 2 == 0) x[at] = turned;
    else y[at] = turned;
}
