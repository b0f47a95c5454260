// A race in an inlined template of a namespace: the calls around it are named.
//! arg = [{ role = "buffer", dtype = "f32", elements = 64, init = "random" }]
//! [launch]
//! grid = [1]
//! block = [64]

namespace tile {
template <typename T, int N>
__device__ T rotated(T* words, T mine, int by) {
    words[threadIdx.x] = mine;  // hazard: race
    return words[(threadIdx.x + by) % N];  // hazard: race uninitialised_read
}
}  // namespace tile

extern "C" __global__ void wrong(float* x) {
    __shared__ float words[64];
    x[threadIdx.x] = tile::rotated<float, 64>(words, x[threadIdx.x], 32);
}

namespace tile {
template <typename T, int N>
__device__ T rotated_in_order(T* words, T mine, int by) {
    words[threadIdx.x] = mine;
    __syncthreads();
    return words[(threadIdx.x + by) % N];
}
}  // namespace tile

extern "C" __global__ void right(float* x) {
    __shared__ float words[64];
    x[threadIdx.x] = tile::rotated_in_order<float, 64>(words, x[threadIdx.x], 32);
}
