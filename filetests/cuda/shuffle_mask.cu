// A shuffle names lanes that take the other branch and run on.
//! arg = [{ role = "buffer", dtype = "f32", elements = 32, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [32]

extern "C" __global__ void wrong(float* x) {
    int i = threadIdx.x;
    float mine = x[i];
    if (i < 16) mine += __shfl_xor_sync(0xffffffff, mine, 1);  // hazard: barrier_divergence
    x[i] = mine;  // hazard: barrier_divergence
}

extern "C" __global__ void right(float* x) {
    int i = threadIdx.x;
    float mine = x[i];
    if (i < 16) mine += __shfl_xor_sync(0x0000ffff, mine, 1);
    x[i] = mine;
}
