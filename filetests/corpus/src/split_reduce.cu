// Decode over a split KV range: each CTA computes one split's partial softmax of one query, and the CTA that comes last
// (a counter in global memory, between fences of one thread, between barriers) merges the partials. f32, head dim 64, one warp for the scores.
__device__ unsigned int last_value(unsigned int* counter, unsigned int limit) { return atomicInc(counter, limit); }

extern "C" __global__ void __launch_bounds__(64)
split_reduce(const float* q, const float* k, const float* v, float* partial, unsigned int* counters, float* out, int seq_kv, float scale) {
    __shared__ float scores[64];
    __shared__ float query[64];
    __shared__ bool last;
    const int head = blockIdx.y, split = blockIdx.x, splits = gridDim.x, tid = threadIdx.x;
    const int length = (seq_kv + splits - 1) / splits, begin = split * length, end = min(begin + length, seq_kv);
    k += (size_t)head * seq_kv * 64;
    v += (size_t)head * seq_kv * 64;
    query[tid] = q[head * 64 + tid] * scale;

    float top = __int_as_float(0xff800000), sum = 0.0f, acc = 0.0f;
    for (int base = begin; base < end; base += 64) {
        __syncthreads();
        float s = __int_as_float(0xff800000);
        if (base + tid < end) {
            s = 0.0f;
            for (int d = 0; d < 64; ++d) s += query[d] * k[(size_t)(base + tid) * 64 + d];
        }
        scores[tid] = s;
        __syncthreads();
        float new_top = top;
        for (int j = 0; j < 64; ++j) new_top = fmaxf(new_top, scores[j]);
        const float rescale = __expf(top - new_top);
        sum *= rescale;
        acc *= rescale;
        for (int j = 0; j < min(64, end - base); ++j) {
            const float p = __expf(scores[j] - new_top);
            sum += p;
            acc += p * v[(size_t)(base + j) * 64 + tid];
        }
        top = new_top;
    }
    float* mine = partial + (size_t)(head * splits + split) * 66;
    mine[tid] = acc;
    if (tid == 0) {
        mine[64] = top;
        mine[65] = sum;
    }
    __syncthreads();
    if (tid == 0) {
        __threadfence();
        last = last_value(&counters[head], splits - 1) == splits - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;

    const float* all = partial + (size_t)head * splits * 66;
    float best = __int_as_float(0xff800000);
    for (int s = 0; s < splits; ++s) best = fmaxf(best, all[s * 66 + 64]);
    float total = 0.0f, merged = 0.0f;
    for (int s = 0; s < splits; ++s) {
        const float weight = __expf(all[s * 66 + 64] - best);
        total += weight * all[s * 66 + 65];
        merged += weight * all[s * 66 + tid];
    }
    out[head * 64 + tid] = total > 0.0f ? merged / total : 0.0f;
}
