// Attention forward with nvcuda::wmma, f16, head dim 64: 32 queries a CTA, blocks of 64 keys. A fragment does not say where its
// elements are, so S, P and O go through shared memory: S = Q Kᵀ by tensor cores, softmax by four threads a row, O += P V by
// tensor cores again. Layout [batch·head][sequence][64]. Causal when `causal` is set, with the last query at the last key.
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

constexpr int D = 64, QUERIES = 32, KEYS = 64, THREADS = 128;
// Rows 16 bytes longer than a power of two, so that eight of them lie in different banks.
constexpr int PITCH = D + 8, PITCH_F32 = D + 4;

using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major>;
using Transposed = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major>;
using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major>;
using Sum = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

// `rows` rows of the tile from row `first` of the matrix; what lies beyond its end is zero.
__device__ void load_tile(half (*tile)[PITCH], int rows, const half* matrix, int first, int end) {
    for (int chunk = threadIdx.x; chunk < rows * D / 8; chunk += THREADS) {
        const int row = chunk / (D / 8), column = chunk % (D / 8) * 8;
        uint4 values = make_uint4(0, 0, 0, 0);
        if (first + row < end) values = *(const uint4*)(matrix + (size_t)(first + row) * D + column);
        *(uint4*)&tile[row][column] = values;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
wmma_attention(const half* q, const half* k, const half* v, half* out, int seq_q, int seq_kv, float scale, int causal) {
    __shared__ __align__(32) half tile_q[QUERIES][PITCH], tile_k[KEYS][PITCH], tile_v[KEYS][PITCH], p[QUERIES][PITCH];
    __shared__ __align__(32) float s[QUERIES][PITCH_F32], o[QUERIES][PITCH_F32];
    const float minus_infinity = __int_as_float(0xff800000), log2_scale = scale * 1.4426950408889634f;
    const int warp = threadIdx.x / 32, row = threadIdx.x / 4, part = threadIdx.x % 4;
    // Each warp has two tiles, side by side, of S and of O.
    const int tile_row = warp / 2 * 16, tile_column = warp % 2 * 32;
    const int q0 = blockIdx.x * QUERIES, query = q0 + row;
    const size_t head = blockIdx.y;
    q += head * seq_q * D, out += head * seq_q * D;
    k += head * seq_kv * D, v += head * seq_kv * D;

    load_tile(tile_q, QUERIES, q, q0, seq_q);
    for (int x = part; x < D; x += 4) o[row][x] = 0;
    float top = minus_infinity, sum = 0;
    const int visible = causal ? min(seq_kv, query + 1 + seq_kv - seq_q) : seq_kv;
    for (int k0 = 0; k0 < seq_kv; k0 += KEYS) {
        load_tile(tile_k, KEYS, k, k0, seq_kv);
        load_tile(tile_v, KEYS, v, k0, seq_kv);
        __syncthreads();
        for (int t = 0; t < 2; ++t) {
            Sum scores;
            wmma::fill_fragment(scores, 0.0f);
            for (int x = 0; x < D; x += 16) {
                Left a;
                Transposed b;
                wmma::load_matrix_sync(a, &tile_q[tile_row][x], PITCH);
                wmma::load_matrix_sync(b, &tile_k[tile_column + 16 * t][x], PITCH);
                wmma::mma_sync(scores, a, b, scores);
            }
            for (int i = 0; i < scores.num_elements; ++i) scores.x[i] *= log2_scale;
            wmma::store_matrix_sync(&s[tile_row][tile_column + 16 * t], scores, PITCH_F32, wmma::mem_row_major);
        }
        __syncthreads();
        float block_top = top;
        for (int j = part; j < KEYS; j += 4)
            if (k0 + j < visible) block_top = fmaxf(block_top, s[row][j]);
        block_top = fmaxf(block_top, __shfl_xor_sync(0xffffffffu, block_top, 1));
        block_top = fmaxf(block_top, __shfl_xor_sync(0xffffffffu, block_top, 2));
        const float base = block_top == minus_infinity ? 0 : block_top;
        const float rescale = exp2f(top - base);
        top = block_top, sum *= rescale;
        for (int j = part; j < KEYS; j += 4) {
            const half weight = __float2half(k0 + j < visible ? exp2f(s[row][j] - base) : 0);
            sum += __half2float(weight);
            p[row][j] = weight;
        }
        for (int x = part; x < D; x += 4) o[row][x] *= rescale;
        __syncthreads();
        for (int t = 0; t < 2; ++t) {
            Sum tile;
            float* at = &o[tile_row][tile_column + 16 * t];
            wmma::load_matrix_sync(tile, at, PITCH_F32, wmma::mem_row_major);
            for (int j = 0; j < KEYS; j += 16) {
                Left a;
                Right b;
                wmma::load_matrix_sync(a, &p[tile_row][j], PITCH);
                wmma::load_matrix_sync(b, &tile_v[j][tile_column + 16 * t], PITCH);
                wmma::mma_sync(tile, a, b, tile);
            }
            wmma::store_matrix_sync(at, tile, PITCH_F32, wmma::mem_row_major);
        }
        __syncthreads();
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (query >= seq_q) return;
    const float inverse = sum > 0 ? 1 / sum : 0;
    for (int x = part; x < D; x += 4) out[(size_t)query * D + x] = __float2half(o[row][x] * inverse);
}
