// C = A Bᵀ in f16 with f32 accumulators: tiles of 64×64×32, four warps, two stages of cp.async, ldmatrix, mma.sync.
#include "mma.cuh"

constexpr int TILE = 64, DEPTH = 32, PITCH = DEPTH + 8;

__device__ __forceinline__ void load_tile(half_bits (*tile)[PITCH], const half_bits* from, int row0, int rows, int k0, int depth) {
    for (int chunk = threadIdx.x; chunk < TILE * DEPTH / 8; chunk += 128) {
        const int row = chunk / (DEPTH / 8), col = chunk % (DEPTH / 8) * 8;
        const bool valid = row0 + row < rows;
        copy16(&tile[row][col], from + (size_t)(valid ? row0 + row : 0) * depth + k0 + col, valid);
    }
}

// `depth` is a multiple of 32, `n` of 2; `m` and `n` are ragged otherwise.
extern "C" __global__ void __launch_bounds__(128) matmul(const half_bits* a, const half_bits* b, float* c, int m, int n, int depth) {
    __shared__ __align__(16) half_bits tile_a[2][TILE][PITCH];
    __shared__ __align__(16) half_bits tile_b[2][TILE][PITCH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
    float sum[8][4] = {};

    load_tile(tile_a[0], a, row0, m, 0, depth);
    load_tile(tile_b[0], b, col0, n, 0, depth);
    copy_commit();
    for (int k = 0, stage = 0; k < depth; k += DEPTH, stage ^= 1) {
        if (k + DEPTH < depth) {
            load_tile(tile_a[stage ^ 1], a, row0, m, k + DEPTH, depth);
            load_tile(tile_b[stage ^ 1], b, col0, n, k + DEPTH, depth);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH; step += 16) {
            u32 fa[4];
            load_matrix_x4(fa, &tile_a[stage][warp * 16 + lane % 16][step + lane / 16 * 8]);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                u32 fb[4];
                load_matrix_x4(fb, &tile_b[stage][pair * 16 + lane % 8 + lane / 16 * 8][step + lane / 8 % 2 * 8]);
                mma_f16(sum[2 * pair], fa, fb[0], fb[1]);
                mma_f16(sum[2 * pair + 1], fa, fb[2], fb[3]);
            }
        }
        __syncthreads();
    }

    const int row = row0 + warp * 16 + lane / 4;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        const int col = col0 + tile * 8 + lane % 4 * 2;
        if (col >= n) continue;
        if (row < m) *(float2*)&c[(size_t)row * n + col] = make_float2(sum[tile][0], sum[tile][1]);
        if (row + 8 < m) *(float2*)&c[(size_t)(row + 8) * n + col] = make_float2(sum[tile][2], sum[tile][3]);
    }
}
