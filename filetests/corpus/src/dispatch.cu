// Odds and ends that attention kernels meet: calls, a switch that becomes a jump table, a local array indexed at run
// time, a constant table, bit operations, conversions, votes, matches and reductions of a warp.
__constant__ int table[8] = {1, 1, 2, 3, 5, 8, 13, 21};
__device__ float bias[4] = {0.5f, -0.25f, 1.0f / 3.0f, 2.0f};

__device__ __noinline__ int gather(const int* values, int i) { return values[i & 7] + table[(i + 3) & 7]; }

__device__ __noinline__ int choose(int op, int a, int b) {
    switch (op) {
    case 0: return a + b;
    case 1: return a * b - 7;
    case 2: return __clz(a ^ b);
    case 3: return __popc(a | b);
    case 4: return __brev(a) >> (b & 31);
    case 5: return __byte_perm(a, b, 0x3715);
    case 6: return __funnelshift_l(a, b, 5);
    case 7: return a / (b | 1);
    case 8: return __dp4a(a, b, 17);
    case 9: return __ffs(a) + (a % (b | 1));
    default: return -1;
    }
}

extern "C" __global__ void dispatch(const int* in, int* out, double* wide, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const bool active = i < count;
    const int x = active ? in[i] : 0;
    int values[8];
    for (int j = 0; j < 8; ++j) values[j] = x * table[j] + j;
    int result = choose(i % 11, x, gather(values, x));

    const unsigned int ballot = __ballot_sync(0xffffffffu, x > 3);
    result += __any_sync(0xffffffffu, x == 9) + __all_sync(0xffffffffu, x < 1000) + __popc(ballot);
    result ^= __match_any_sync(0xffffffffu, x & 3);
    result += __reduce_add_sync(0xffffffffu, x) + __reduce_max_sync(0xffffffffu, x);
    result = __shfl_sync(0xffffffffu, result, (threadIdx.x + 1) & 31);

    const float f = bias[x & 3] * (float)x;
    const long long big = (long long)x * 0x123456789LL;
    result += __float2int_rn(f) + __float2int_rd(f) + (int)(unsigned char)x + (short)x + (int)(big >> 33);
    result += __float2uint_rz(fabsf(f)) + __double2int_rz(sqrt((double)x * x)) + min(max(x, -5), 5);
    if (active) {
        out[i] = result;
        wide[i] = (double)f + fmaf(f, 2.0f, 1.0f) + sinf(f) + tanhf(f) + __powf(fabsf(f), 0.5f) + (double)big;
    }
}
