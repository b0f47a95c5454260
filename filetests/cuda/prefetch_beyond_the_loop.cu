// A pipelined loop loads the matrix of the next round once too often, from a stage that is used again. Only the
// wrong kernel uses that matrix.
//! [launch]
//! grid = [1]
//! block = [64]
//! [[arg]]
//! role = "buffer"
//! dtype = "u32"
//! elements = 256
//! init = "random"
//! [[arg]]
//! role = "buffer"
//! dtype = "u32"
//! elements = 64

__device__ unsigned matrix(const int4* row) {
    unsigned a, at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(at));  // hazard: race
    return a;
}

extern "C" __global__ void wrong(const int4* x, unsigned* y) {
    __shared__ int4 stages[2][32];
    int i = threadIdx.x;
    stages[i / 32][i % 32] = x[i];
    __syncthreads();
    unsigned next = matrix(&stages[0][i % 8]), sum = 0;
    for (int k = 0; k < 2; k++) {
        sum += next;
        next = matrix(&stages[(k + 1) % 2][i % 8]);
    }
    if (i >= 32) stages[0][i - 32] = make_int4(sum, 0, 0, 0);  // hazard: race
    y[i] = sum + next;
}

extern "C" __global__ void right(const int4* x, unsigned* y) {
    __shared__ int4 stages[2][32];
    int i = threadIdx.x;
    stages[i / 32][i % 32] = x[i];
    __syncthreads();
    unsigned next = matrix(&stages[0][i % 8]), sum = 0;
    for (int k = 0; k < 2; k++) {
        sum += next;
        next = matrix(&stages[(k + 1) % 2][i % 8]);
    }
    if (i >= 32) stages[0][i - 32] = make_int4(sum, 0, 0, 0);
    y[i] = sum;
}
