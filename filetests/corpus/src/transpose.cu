// Transpose through a padded tile of shared memory; ragged edges.
extern "C" __global__ void transpose(const float* __restrict__ in, float* __restrict__ out, int rows, int cols) {
    __shared__ float tile[32][33];
    for (int y = threadIdx.y; y < 32; y += 8) {
        const int row = blockIdx.y * 32 + y, col = blockIdx.x * 32 + threadIdx.x;
        if (row < rows && col < cols) tile[y][threadIdx.x] = in[row * cols + col];
    }
    __syncthreads();
    for (int y = threadIdx.y; y < 32; y += 8) {
        const int row = blockIdx.x * 32 + y, col = blockIdx.y * 32 + threadIdx.x;
        if (row < cols && col < rows) out[row * rows + col] = tile[threadIdx.x][y];
    }
}
