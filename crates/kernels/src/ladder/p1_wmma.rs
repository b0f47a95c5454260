//! `p1_wmma`: tensor cores for Q Kᵀ, 1169 µs on the seeds' L4, where 200–300 had been forecast.
//!
//! What the seeds believed: the scores on tensor cores would carry the kernel; afterwards they put WMMA at 4 % of the
//! time by estimate. What was really wrong: Amdahl. The scores' fragments go to shared memory; then the 32 rows are taken
//! one after another, with one thread for maximum and sum, two barriers a row, and each of the 64 threads that weigh
//! values computes every exponential anew and reads its column of V from global memory, a half at a time, for every row.
//! What the emulator shows: tensor work in a few hundredths of the slots, serial loops at one lane of 128, and 65
//! exponentials for each score.
//!
//! This kernel was not published with the others. The seeds give the row loop with its recomputed exponentials and scalar
//! loads of V (named as Phase 1 names it, which reads it from global memory, while their shared arrays end in `_smem`),
//! the fragments (16 × 16, four warps) and the resources (21 KB, no spills, and 48 registers, which the unrolled rows here
//! exceed). Chosen to fit the memory: 32 × 64 tiles of scores; Q and a tile of keys in shared memory (4 + 8 + 8 KB and the
//! row states); output columns in registers, 32 of them; tiles loaded half by half, since vector loads came later in that
//! line of kernels.
//! `load_matrix_sync` is `ldmatrix` on unpadded rows, `mma_sync` two `mma.m16n8k16`, `store_matrix_sync` pairs of f32.

use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, Half, Kernel, Pointer, Pred, R16, R32, Shared};

use super::RungPlan;
use super::common::{
    self, Array, Cta, DIM, KEYS, Math, ROW_BYTES, TILE_BYTES, serial_max, serial_sum, store_half, weigh,
};
use crate::Arch;

const ROWS: u32 = 32;
const THREADS: u32 = 128;
const MATH: Math = Math::Fast;
/// Extent of a WMMA fragment.
const FRAGMENT: u32 = 16;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    common::kernel(problem, arch, RungPlan::P1Wmma, ROWS, THREADS, |k, cta| {
        k.max_threads(THREADS);
        let rows = SerialRows::new(k, cta);
        let q = k.shared_array("q_tile", 16, ROWS * ROW_BYTES);
        let keys = k.shared_array("k_tile", 16, TILE_BYTES);
        copy_halves(k, cta, cta.q, q, ROWS * DIM);
        let fragments = Fragments::new(k, cta, q, keys, rows.scores);
        cta.for_each_tile(k, |k, tile| {
            let from = cta.keys.element(k, tile.first, ROW_BYTES);
            copy_halves(k, cta, from, keys, KEYS * DIM);
            k.bar_sync();
            fragments.score(k, cta);
            k.bar_sync();
            let values = cta.values.element(k, tile.first, ROW_BYTES);
            rows.update(k, cta, tile.keys, values);
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
    fn new(k: &mut Builder, cta: &Cta, q: Shared, tile: Shared, scores: Shared) -> Fragments {
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
        let keys = chunk(k, tile, key, half);
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

/// Rows one after another, each reduced by one thread. Maxima and sums are in shared memory; of the output, column `tid`
/// of each row in registers.
struct SerialRows {
    scores: Shared,
    /// `m[32]`, `l[32]`.
    state: [Shared; 2],
    /// The row's new maximum, from thread 0 to the others.
    largest: Shared,
    /// `tid == 0`.
    first: Pred,
    /// `tid < 64`.
    has_column: Pred,
    /// `O_acc[32]`, the loop over rows unrolled so that it stays in registers.
    output: Vec<F32>,
}

impl SerialRows {
    /// Nothing seen yet. The first barrier of the caller orders this for all threads.
    fn new(k: &mut Builder, cta: &Cta) -> SerialRows {
        let scores = k.shared_array("scores", 4, ROWS * KEYS * 4);
        let state = ["maxima", "sums"].map(|name| k.shared_array(name, 4, ROWS * 4));
        let largest = k.shared_array("largest", 4, 4);
        let (first, has_column) = (k.setp_u(CmpOp::Eq, cta.thread, 0), k.setp_u(CmpOp::Lt, cta.thread, DIM));
        let has_row = k.setp_u(CmpOp::Lt, cta.thread, ROWS);
        k.if_(has_row, |k| {
            for (array, value) in state.into_iter().zip([f32::NEG_INFINITY, 0.0]) {
                let (at, value) = (array.element(k, cta.thread, 4), k.mov(value));
                k.st::<F32, _>(at, value);
            }
        });
        let output = (0..ROWS).map(|_| k.mov(0.0f32)).collect();
        SerialRows { scores, state, largest, first, has_column, output }
    }

    /// Online softmax of a tile, row after row. Scores are ready, behind a barrier.
    fn update(&self, k: &mut Builder, cta: &Cta, keys: R32, values: Global) {
        let column = values.element(k, cta.thread, 2);
        for (row, &output) in self.output.iter().enumerate() {
            let scores = self.scores.at(row as i64 * i64::from(KEYS) * 4);
            let [max, sum] = self.state.map(|array| array.at(4 * row as i64));
            k.if_(self.first, |k| {
                let before = k.ld(max);
                let largest = serial_max(k, scores, keys, before);
                k.st(self.largest, largest);
            });
            k.bar_sync();
            let (before, largest): (F32, F32) = (k.ld(max), k.ld(self.largest));
            let rescale = MATH.exp_difference(k, before, largest);
            k.if_(self.first, |k| {
                let before: F32 = k.ld(sum);
                let before = k.mul(before, rescale);
                let total = serial_sum(k, MATH, scores, keys, [largest, before]);
                k.st(sum, total);
            });
            k.bar_sync();
            k.if_(self.first, |k| k.st(max, largest));
            k.if_(self.has_column, |k| {
                let total = weigh(k, MATH, scores, keys, (largest, column));
                k.mad_to(output, output, rescale, total);
            });
        }
    }

    /// `O / l`, a half a store. Sums are ready, behind a barrier.
    fn store(&self, k: &mut Builder, cta: &Cta) {
        k.if_(self.has_column, |k| {
            let to = cta.out.element(k, cta.thread, 2);
            for (row, &output) in self.output.iter().enumerate() {
                let sum: F32 = k.ld(self.state[1].at(4 * row as i64));
                let result: F32 = k.div(output, sum);
                store_half(k, to.at(i64::from(ROW_BYTES) * row as i64), result);
            }
        });
    }
}

/// `for (i = tid; i < n; i += 128) to[i] = from[i]`, one half at a time, unrolled by four.
fn copy_halves(k: &mut Builder, cta: &Cta, from: Global, to: Shared, elements: u32) {
    const UNROLL: u32 = 4;
    k.for_range(cta.thread, elements, UNROLL * THREADS, |k, i| {
        let (from, to) = (from.element(k, i, 2), to.element(k, i, 2));
        let steps = (0..i64::from(UNROLL)).map(|u| u * i64::from(2 * THREADS));
        let values: Vec<R16> = steps.clone().map(|step| k.ld(from.at(step))).collect();
        steps.zip(values).for_each(|(step, value)| k.st(to.at(step), value));
    });
}
