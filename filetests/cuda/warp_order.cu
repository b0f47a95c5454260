// Lanes of a warp exchange words. A shuffle orders no memory.
//! arg = [{ role = "buffer", dtype = "f32", elements = 32, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [32]

extern "C" __global__ void wrong(float* x) {
    __shared__ float tile[32];
    int i = threadIdx.x;
    tile[i] = x[i];  // hazard: warp_order
    float sum = __shfl_xor_sync(0xffffffff, x[i], 1);
    x[i] = tile[31 - i] + sum;  // hazard: warp_order
}

extern "C" __global__ void right(float* x) {
    __shared__ float tile[32];
    int i = threadIdx.x;
    tile[i] = x[i];
    float sum = __shfl_xor_sync(0xffffffff, x[i], 1);
    __syncwarp();
    x[i] = tile[31 - i] + sum;
}
