// Two buffers in turns. With one barrier for each tile, a warp may fill a buffer that another one still reads,
// unless the barrier stands between reading a buffer and filling it again.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 512, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 64, init = "uninitialised" },
//! ]
//! [launch]
//! grid = [1]
//! block = [64]

extern "C" __global__ void wrong(const float* x, float* y) {
    __shared__ float tiles[2][64];
    int t = threadIdx.x;
    float sum = 0;
    tiles[0][t] = x[t];
    for (int tile = 0; tile < 8; ++tile) {
        if (tile + 1 < 8) tiles[(tile + 1) % 2][t] = x[(tile + 1) * 64 + t];  // hazard: race
        __syncthreads();
        sum += tiles[tile % 2][63 - t];  // hazard: race
    }
    y[t] = sum;
}

extern "C" __global__ void right(const float* x, float* y) {
    __shared__ float tiles[2][64];
    int t = threadIdx.x;
    float sum = 0;
    tiles[0][t] = x[t];
    for (int tile = 0; tile < 8; ++tile) {
        __syncthreads();
        if (tile + 1 < 8) tiles[(tile + 1) % 2][t] = x[(tile + 1) * 64 + t];
        sum += tiles[tile % 2][63 - t];
    }
    y[t] = sum;
}
