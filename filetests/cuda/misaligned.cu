// Four words are read at once from an address that is one word off.
//! arg = [{ role = "buffer", dtype = "f32", elements = 40, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [8]

extern "C" __global__ void wrong(float* x) {
    float4 four = *reinterpret_cast<float4*>(x + 1 + 4 * threadIdx.x);  // hazard: misaligned
    x[threadIdx.x] = four.x + four.w;
}

extern "C" __global__ void right(float* x) {
    float4 four = *reinterpret_cast<float4*>(x + 8 + 4 * threadIdx.x);
    __syncwarp();
    x[threadIdx.x] = four.x + four.w;
}
