// A product whose rows have 12 elements: without a bound of the column, the last tile of a row writes elements of
// the next row, which another CTA computes.
//! arg = [
//!     { role = "buffer", dtype = "f32", elements = 256, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 256, init = "random" },
//!     { role = "buffer", dtype = "f32", elements = 256, init = "zeros" },
//!     { role = "i32", value = 12 },
//! ]
//! [launch]
//! grid = [2, 2]
//! block = [8, 8]

extern "C" __global__ void wrong(const float* a, const float* b, float* c, int n) {
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += a[row * n + k] * b[k * n + column];
    if (row < n) c[row * n + column] = sum;  // hazard: race
}

extern "C" __global__ void right(const float* a, const float* b, float* c, int n) {
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += a[row * n + k] * b[k * n + column];
    if (row < n && column < n) c[row * n + column] = sum;
}
