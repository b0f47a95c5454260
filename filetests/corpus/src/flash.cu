// Fused attention forward, f16, head dim 64: 64 queries a CTA, 16 a warp; K and V blocks of 64 through cp.async; S, P and O stay in
// registers. Layout [batch·head][sequence][64]. Causal when `causal` is set, with the last query at the last key.
#include "mma.cuh"

constexpr int D = 64, BLOCK = 64, PITCH = D + 8;

__device__ __forceinline__ void load_block(half_bits (*tile)[PITCH], const half_bits* from, int row0, int rows) {
    for (int chunk = threadIdx.x; chunk < BLOCK * D / 8; chunk += 128) {
        const int row = chunk / (D / 8), col = chunk % (D / 8) * 8;
        const bool valid = row0 + row < rows;
        copy16(&tile[row][col], from + (size_t)(valid ? row0 + row : 0) * D + col, valid);
    }
}

__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

extern "C" __global__ void __launch_bounds__(128)
flash(const half_bits* q, const half_bits* k, const half_bits* v, half_bits* out, int seq_q, int seq_kv, float scale, int causal) {
    extern __shared__ __align__(16) half_bits shared[];
    half_bits(*tile_q)[PITCH] = (half_bits(*)[PITCH])shared;
    half_bits(*tile_k)[PITCH] = tile_q + BLOCK;
    half_bits(*tile_v)[PITCH] = tile_k + BLOCK;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int q0 = blockIdx.x * BLOCK;
    q += (size_t)blockIdx.y * seq_q * D;
    k += (size_t)blockIdx.y * seq_kv * D;
    v += (size_t)blockIdx.y * seq_kv * D;
    out += (size_t)blockIdx.y * seq_q * D;
    const float log2_scale = scale * 1.4426950408889634f;
    const float minus_infinity = __int_as_float(0xff800000);

    load_block(tile_q, q, q0, seq_q);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    u32 fq[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) load_matrix_x4(fq[step], &tile_q[warp * 16 + lane % 16][step * 16 + lane / 16 * 8]);

    float o[8][4] = {};
    float top[2] = {minus_infinity, minus_infinity}, sum[2] = {};
    const int shift = seq_kv - seq_q;
    const int end = causal ? min(seq_kv, q0 + BLOCK + shift) : seq_kv;
    for (int k0 = 0; k0 < end; k0 += BLOCK) {
        load_block(tile_k, k, k0, seq_kv);
        load_block(tile_v, v, k0, seq_kv);
        copy_commit();
        copy_wait<0>();
        __syncthreads();

        float s[8][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                u32 fk[4];
                load_matrix_x4(fk, &tile_k[pair * 16 + lane % 8 + lane / 16 * 8][step * 16 + lane / 8 % 2 * 8]);
                mma_f16(s[2 * pair], fq[step], fk[0], fk[1]);
                mma_f16(s[2 * pair + 1], fq[step], fk[2], fk[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = q0 + warp * 16 + lane / 4 + 8 * half;
            float new_top = top[half];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int col = k0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
                float& x = s[i / 2][2 * half + i % 2];
                x = col < seq_kv && (!causal || col <= row + shift) ? x * log2_scale : minus_infinity;
                new_top = fmaxf(new_top, x);
            }
            new_top = quad_max(new_top);
            const float base = new_top == minus_infinity ? 0.0f : new_top;
            const float rescale = exp2f(top[half] - base);
            float partial = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& x = s[i / 2][2 * half + i % 2];
                x = exp2f(x - base);
                partial += x;
                o[i / 2][2 * half + i % 2] *= rescale;
            }
            sum[half] = sum[half] * rescale + partial;
            top[half] = new_top;
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const u32 fp[4] = {pack_half2(s[2 * step][0], s[2 * step][1]), pack_half2(s[2 * step][2], s[2 * step][3]),
                               pack_half2(s[2 * step + 1][0], s[2 * step + 1][1]), pack_half2(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                u32 fv[4];
                load_matrix_x4_trans(fv, &tile_v[step * 16 + lane % 16][pair * 16 + lane / 16 * 8]);
                mma_f16(o[2 * pair], fp, fv[0], fv[1]);
                mma_f16(o[2 * pair + 1], fp, fv[2], fv[3]);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = q0 + warp * 16 + lane / 4 + 8 * half;
        const float total = quad_sum(sum[half]);
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        if (row >= seq_q) continue;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
            *(u32*)&out[(size_t)row * D + tile * 8 + lane % 4 * 2] = pack_half2(o[tile][2 * half] * inverse, o[tile][2 * half + 1] * inverse);
    }
}
