//! `p1_wmma`: tensor cores for Q Kᵀ, 1169 µs on the seeds' L4, where 200–300 had been forecast.
//!
//! What the seeds believed: the scores on tensor cores would carry the kernel; afterwards they put WMMA at 4 % of the
//! time by estimate. What was really wrong: Amdahl. The scores' fragments go to shared memory; then the 32 rows are taken
//! one after another, with one thread for maximum and sum, two barriers a row, and each of the 64 threads that weigh
//! values computes every exponential anew. What the emulator shows: tensor work in a few hundredths of the slots, serial
//! loops at one lane of 128, and 65 exponentials for each score.
//!
//! The seeds give the row loop, the fragments (16 × 16, four warps) and the resources (48 registers, 21 KB, no spills).
//! Chosen to fit them: 32 × 64 tiles; keys and values share one buffer (4 + 8 + 8 KB and the row states); output columns in
//! registers, 32 of them; tiles loaded half by half, since vector loads came later in that line of kernels.
//! `load_matrix_sync` is `ldmatrix` on unpadded rows, `mma_sync` two `mma.m16n8k16`, `store_matrix_sync` pairs of f32.

use problem::Problem;
use ptx::{Builder, F32, Half, Kernel, Pointer, R32, Shared};

use super::RungPlan;
use super::common::{self, Cta, DIM, KEYS, ROW_BYTES, TILE_BYTES};
use super::serial::{Exponentials, SerialRows};
use crate::Arch;

const ROWS: u32 = 32;
const THREADS: u32 = 128;
/// Extent of a WMMA fragment.
const FRAGMENT: u32 = 16;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    common::kernel(problem, arch, RungPlan::P1Wmma, ROWS, THREADS, |k, cta| {
        let rows = SerialRows::new(k, cta, ROWS, Exponentials::Recomputed);
        let q = k.shared_array("q_tile", 16, ROWS * ROW_BYTES);
        let kv = k.shared_array("kv_tile", 16, TILE_BYTES);
        cta.copy_halves(k, cta.q, q, ROWS * DIM);
        let fragments = Fragments::new(k, cta, q, kv, rows.scores());
        cta.for_each_tile(k, |k, first| {
            let from = k.index(cta.keys, first, ROW_BYTES);
            cta.copy_halves(k, from, kv, KEYS * DIM);
            k.bar_sync();
            fragments.score(k, cta);
            k.bar_sync();
            let from = k.index(cta.values, first, ROW_BYTES);
            cta.copy_halves(k, from, kv, KEYS * DIM);
            k.bar_sync();
            rows.update(k, cta, kv);
            k.bar_sync();
        });
        rows.store(k, cta);
    })
}

/// Where a lane reads and writes its parts of the warp's fragments: 16 keys, all 32 rows.
struct Fragments {
    q: Shared,
    keys: Shared,
    scores: Shared,
}

impl Fragments {
    fn new(k: &mut Builder, cta: &Cta, q: Shared, kv: Shared, scores: Shared) -> Fragments {
        let (warp, lane) = cta.warp_and_lane(k);
        let chunk = |k: &mut Builder, from: Shared, row: R32, chunk: R32| {
            let row = k.shared_index(from, row, ROW_BYTES);
            k.shared_index(row, chunk, 16)
        };
        // A: lane i gives row i mod 16, columns 8 · (i / 16) (PTX ISA, "mma.m16n8k16" and "ldmatrix").
        let (row, half): (R32, R32) = (k.and(lane, 15), k.shr_u(lane, 4));
        let q = chunk(k, q, row, half);
        // B: matrices 0 and 1 are the two halves of k for keys 0–7, 2 and 3 for keys 8–15.
        let first_key: R32 = k.mul(warp, FRAGMENT);
        let (key, upper): (R32, R32) = (k.and(lane, 7), k.shr_u(lane, 4));
        let key: R32 = k.mad(upper, 8, key);
        let key: R32 = k.add(key, first_key);
        let eighth: R32 = k.shr_u(lane, 3);
        let half: R32 = k.and(eighth, 1);
        let keys = chunk(k, kv, key, half);
        // C: rows lane / 4 and lane / 4 + 8, columns 2 · (lane mod 4) and the next.
        let (row, pair): (R32, R32) = (k.shr_u(lane, 2), k.and(lane, 3));
        let column: R32 = k.mad(pair, 2, first_key);
        let scores = k.shared_index(scores, row, KEYS * 4);
        let scores = k.shared_index(scores, column, 4);
        Fragments { q, keys, scores }
    }

    /// S = scale · Q Kᵀ into shared memory.
    fn score(&self, k: &mut Builder, cta: &Cta) {
        for tile in 0..i64::from(ROWS / FRAGMENT) {
            let c: [[F32; 4]; 2] = [(); 2].map(|()| [(); 4].map(|()| k.mov(0.0f32)));
            let q = self.q.at(tile * i64::from(FRAGMENT * ROW_BYTES));
            for step in 0..i64::from(DIM / FRAGMENT) {
                let a = k.ldmatrix::<4>(q.at(32 * step));
                let [b0, b1, b2, b3] = k.ldmatrix::<4>(self.keys.at(32 * step));
                k.mma_m16n8k16(Half::F16, c[0], a, [b0, b1]);
                k.mma_m16n8k16(Half::F16, c[1], a, [b2, b3]);
            }
            let to = self.scores.at(tile * i64::from(FRAGMENT * KEYS * 4));
            for (right, c) in c.into_iter().enumerate() {
                let s = c.map(|c| k.mul(c, cta.scale));
                let to = to.at(32 * right as i64);
                k.st_vec(to, [s[0], s[1]]);
                k.st_vec(to.at(i64::from(8 * KEYS * 4)), [s[2], s[3]]);
            }
        }
    }
}
