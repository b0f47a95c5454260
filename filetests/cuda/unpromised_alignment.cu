// Four words at once from an array of words: right where ptxas places it, and promised by nothing.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [16]

extern "C" __global__ void wrong(float* x) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    for (int k = 0; k < 4; ++k) tile[16 * k + i] = x[16 * k + i];
    __syncthreads();
    float4 four = *reinterpret_cast<float4*>(&tile[4 * i]);  // note: unpromised_alignment
    x[i] = four.x + four.w;
}

extern "C" __global__ void right(float* x) {
    __shared__ __align__(16) float tile[64];
    int i = threadIdx.x;
    for (int k = 0; k < 4; ++k) tile[16 * k + i] = x[16 * k + i];
    __syncthreads();
    float4 four = *reinterpret_cast<float4*>(&tile[4 * i]);
    x[i] = four.x + four.w;
}
