// C = A Bᵀ of f16 with f32 sums, one 64×64 tile a CTA: rows come by bulk copies, both operands lie K-major in 8×8 core matrices
// without swizzle. Every other k-step takes A from registers.
// sm: 90a
#include "hopper.cuh"

constexpr int M = 64, N = 64, DEPTH = 64;

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout": core matrices of 8 rows by 16 bytes lie one after the other
// along K (leading offset 128 bytes); 8 rows further on is DEPTH / 8 of them (stride offset).
__device__ inline unsigned long long descriptor(unsigned address) {
    return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) | (128ull >> 4) << 16 | (DEPTH * 16ull >> 4) << 32;
}

// Element (row, k) of a tile, in halves.
__device__ inline int place(int row, int k) {
    return (row / 8) * DEPTH * 8 + (k / 8) * 64 + (row % 8) * 8 + k % 8;
}

#define D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

__device__ inline void multiply(float (&d)[32], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " SUMS ", %32, %33, 1, 1, 1, 0, 0;"
                 : D(0), D(8), D(16), D(24) : "l"(a), "l"(b));
}

__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " SUMS ", {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : D(0), D(8), D(16), D(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

extern "C" __global__ void __launch_bounds__(128)
hopper_gemm(const unsigned short* a, const unsigned short* b, float* c, int columns) {
    __shared__ alignas(128) unsigned short rows[2][64 * DEPTH];
    __shared__ alignas(128) unsigned short left[M * DEPTH], right[N * DEPTH];
    __shared__ alignas(8) unsigned long long bar;
    const unsigned full = shared_address(&bar);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        fence_async();
        barrier_expect(full, 2 * sizeof rows[0]);
        const unsigned short* from[2] = {a + blockIdx.y * M * DEPTH, b + blockIdx.x * N * DEPTH};
        for (int i = 0; i < 2; ++i) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                ::"r"(shared_address(rows[i])), "l"(__cvta_generic_to_global(from[i])), "r"(unsigned(sizeof rows[0])), "r"(full)
                : "memory");
        }
    }
    __syncthreads();
    barrier_wait(full, 0);
    for (int i = threadIdx.x; i < M * DEPTH; i += blockDim.x) {
        left[place(i / DEPTH, i % DEPTH)] = rows[0][i];
        right[place(i / DEPTH, i % DEPTH)] = rows[1][i];
    }
    fence_async();
    __syncthreads();

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    float d[32];
    for (float& sum : d) sum = 0.0f;
    unsigned fragments[2][4];
    for (int i = 0; i < 8; ++i) {
        const int k = 16 + i / 4 * 32 + column + (i % 4 / 2) * 8;
        fragments[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(&left[place(row + i % 2 * 8, k)]);
    }
    // What the products work on is complete before their fence; the compiler may not move it behind.
#pragma unroll
    for (float& sum : d) asm volatile("" : "+f"(sum)::"memory");
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(fragments[i / 4][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < DEPTH / 16; ++step) {
        const unsigned long long k = step * 256 >> 4;
        const unsigned long long to = descriptor(shared_address(right)) + k;
        if (step % 2) {
            multiply(d, fragments[step / 2], to);
        } else {
            multiply(d, descriptor(shared_address(left)) + k, to);
        }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float* to = c + (blockIdx.y * M + row) * columns + blockIdx.x * N + column;
    for (int i = 0; i < 8; ++i) {
        for (int half = 0; half < 2; ++half) {
            to[half * 8 * columns + i * 8] = d[i * 4 + half * 2];
            to[half * 8 * columns + i * 8 + 1] = d[i * 4 + half * 2 + 1];
        }
    }
}
