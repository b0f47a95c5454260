// One CTA writes a word and sets a flag, the other one waits for the flag and reads the word. Both words are
// volatile, so that nothing races, but only fences order the word before the flag.
//! arg = [
//!     { role = "buffer", dtype = "i32", elements = 64, init = "zeros" },
//!     { role = "buffer", dtype = "i32", elements = 1, init = "uninitialised" },
//! ]
//! [launch]
//! grid = [2]
//! block = [32]
//! cooperative = true

extern "C" __global__ void wrong(volatile int* words, int* out) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        words[0] = 42;
        words[32] = 1;
    } else {
        while (words[32] == 0) {}  // hazard: weak_order
        *out = words[0];  // hazard: weak_order
    }
}

extern "C" __global__ void right(volatile int* words, int* out) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        words[0] = 42;
        __threadfence();
        words[32] = 1;
    } else {
        while (words[32] == 0) {}
        __threadfence();
        *out = words[0];
    }
}
