// A warpgroup multiplies two tiles by wgmma. The accumulators are written first, which a fence must order
// before the product.
// sm: 90a
//! arg = [
//!     { role = "buffer", dtype = "f16", elements = 1536, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 512 },
//! ]
//! [launch]
//! grid = [1]
//! block = [128]

struct Tile {
    alignas(128) uint4 pieces[192];  // 64×16 numbers of A, 16×8 of B, in cores of 8×8
};

// The address, and 128 and 256 bytes from one core to the next.
__device__ unsigned long long descriptor(const uint4* pieces) {
    unsigned long long at = __cvta_generic_to_shared(pieces);
    return at >> 4 & 0x3fff | 8ull << 16 | 16ull << 32;
}

__device__ void product(float (&sum)[4], const Tile& tile) {
    unsigned long long a = descriptor(tile.pieces), b = descriptor(tile.pieces + 128);
    asm volatile(  // hazard: missing_wgmma_fence
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;\n"
        "wgmma.wait_group.sync.aligned 0;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(a), "l"(b) : "memory");
}

template <bool FENCE>
__device__ void multiply(const uint4* x, float* out) {
    __shared__ Tile tile;
    int i = threadIdx.x;
    tile.pieces[i] = x[i];
    if (i < 64) tile.pieces[128 + i] = x[128 + i];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    float sum[4] = {1.0f * i, 2.0f * i, 3.0f * i, 4.0f * i};
    if (FENCE) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    product(sum, tile);
    for (int j = 0; j < 4; ++j) out[4 * i + j] = sum[j];
}

extern "C" __global__ void wrong(const uint4* x, float* out) { multiply<false>(x, out); }

extern "C" __global__ void right(const uint4* x, float* out) { multiply<true>(x, out); }
