// A load through the read-only path reads what another CTA writes in the same launch.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [2]
//! block = [32]

extern "C" __global__ void wrong(float* x) {
    int i = blockIdx.x * 32 + threadIdx.x;
    float old = __ldg(&x[i]);  // hazard: non_coherent_read
    x[i] = 2 * old;
}

extern "C" __global__ void right(float* x) {
    int i = blockIdx.x * 32 + threadIdx.x;
    float old = x[i];
    x[i] = 2 * old;
}
