//! `p1_wmma`: tensor cores for Q Kᵀ; 1169 µs on the authors' L4, where they had forecast 200–300.
//!
//! What the authors believed: the scores dominate the time, so tensor cores would make the kernel fast;
//! afterwards they estimated that WMMA takes 4 % of the time. What was really wrong: Amdahl's law. The
//! fragments of the scores are written to shared memory. Then the 32 rows are processed one after another:
//! one thread computes maximum and sum, with two barriers per row, and each of the 64 threads that weight
//! values computes every exponential again and reads its column of V from global memory, one half at a time,
//! for every row. What the emulator shows: tensor work in a few per cent of the issue slots, serial loops
//! with one active lane of 128, and 65 exponentials for each score.
//!
//! This kernel was not published with the others. The authors give the row loop with its recomputed
//! exponentials and scalar loads of V (with the names of Phase 1, which reads V from global memory; their
//! shared arrays end in `_smem`), the fragments (16 × 16, four warps) and the resources (21 KB, no spills, 48
//! registers). The following was chosen here to fit the memory: 32 × 64 tiles of scores, Q and the f32 output
//! in shared memory (8 + 4 + 8 KB and the row states), and fragments of K read directly from global memory.
//! The loop over rows is not unrolled, to fit the registers. Q is loaded one half at a time, since vector
//! loads appeared only in later kernels.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, MatrixOrder, Pointer, Pred, R16, R32, Shared, Violations};

use super::RungKernel;
use super::common::{
    self, ALIGN, Array, Cta, DIM, KEYS, Math, ROW_BYTES, serial_max, serial_sum, store_half, weigh,
};

const ROWS: u32 = 32;
const THREADS: u32 = 128;
const MATH: Math = Math::Fast;
/// Extent of a WMMA fragment.
const FRAGMENT: u32 = 16;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    common::kernel(problem, arch, RungKernel::P1Wmma, ROWS, THREADS, |k, cta| {
        k.max_threads(THREADS);
        let rows = SerialRows::new(k, cta);
        let q = k.shared_array("q_tile", 32, ROWS * ROW_BYTES);
        copy_halves(k, cta, cta.q, q, ROWS * DIM);
        k.bar_sync();
        let fragments = Fragments::new(k, cta, q, rows.scores);
        cta.for_each_tile(k, |k, tile| {
            let keys = cta.keys.element(k, tile.first, ROW_BYTES);
            fragments.score(k, cta, keys);
            k.bar_sync();
            let values = cta.values.element(k, tile.first, ROW_BYTES);
            rows.update(k, cta, tile.keys, values);
            k.bar_sync();
        });
        rows.store(k, cta);
    })
}

/// The warp's part of the scores: 16 keys and all 32 rows.
struct Fragments {
    q: Shared,
    /// The warp's first key in a tile.
    first_key: R32,
    scores: Shared,
}

impl Fragments {
    fn new(k: &mut Builder, cta: &Cta, q: Shared, scores: Shared) -> Fragments {
        let (warp, _) = cta.warp_and_lane(k);
        let first_key: R32 = k.mul(warp, FRAGMENT);
        let scores = k.shared_index(scores, first_key, 4);
        Fragments { q, first_key, scores }
    }

    /// S = scale · Q Kᵀ into shared memory. Keys are rows of K, so they are columns of its transpose.
    fn score(&self, k: &mut Builder, cta: &Cta, keys: Global) {
        let keys = keys.element(k, self.first_key, ROW_BYTES);
        let (rows, columns) = (MatrixOrder::Row, MatrixOrder::Col);
        for tile in 0..i64::from(ROWS / FRAGMENT) {
            let c: [F32; 8] = [(); 8].map(|()| k.mov(0.0f32));
            let q = self.q.at(tile * i64::from(FRAGMENT * ROW_BYTES));
            for step in 0..i64::from(DIM / FRAGMENT) {
                let a = k.wmma_load_a(rows, q.at(32 * step), DIM);
                let b = k.wmma_load_b(columns, keys.at(32 * step), DIM);
                k.wmma(c, (a, rows), (b, columns));
            }
            let scaled = c.map(|c| k.mul(c, cta.scale));
            let to = self.scores.at(tile * i64::from(FRAGMENT * KEYS * 4));
            k.wmma_store(rows, to, scaled, KEYS);
        }
    }
}

/// Processes rows one after another, each reduced by one thread. Maxima, sums and output are in shared
/// memory; thread `tid` computes column `tid` of the output.
struct SerialRows {
    scores: Shared,
    /// `m[32]`, `l[32]`.
    state: [Shared; 2],
    /// `O_acc[32][64]`.
    output: Shared,
    /// The row's new maximum, passed from thread 0 to the others.
    largest: Shared,
    /// `tid == 0`.
    first: Pred,
    /// `tid < 64`.
    has_column: Pred,
}

impl SerialRows {
    /// Initial state. The caller's first barrier makes it visible to all threads.
    fn new(k: &mut Builder, cta: &Cta) -> SerialRows {
        let scores = k.shared_array("scores", 32, ROWS * KEYS * 4);
        let state = ["maxima", "sums"].map(|name| k.shared_array(name, ALIGN, ROWS * 4));
        let output = k.shared_array("output", ALIGN, ROWS * DIM * 4);
        let largest = k.shared_array("largest", 4, 4);
        let (first, has_column) = (k.setp_u(CmpOp::Eq, cta.thread, 0), k.setp_u(CmpOp::Lt, cta.thread, DIM));
        let has_row = k.setp_u(CmpOp::Lt, cta.thread, ROWS);
        k.if_(has_row, |k| {
            for (array, value) in state.into_iter().zip([f32::NEG_INFINITY, 0.0]) {
                let (at, value) = (array.element(k, cta.thread, 4), k.mov(value));
                k.st::<F32, _>(at, value);
            }
        });
        let zero: F32 = k.mov(0.0f32);
        cta.strided(k, ROWS * DIM, |k, i| {
            let at = output.element(k, i, 4);
            k.st(at, zero);
        });
        SerialRows { scores, state, output, largest, first, has_column }
    }

    /// The thread's column of an output row.
    fn place(&self, k: &mut Builder, cta: &Cta, row: R32) -> Shared {
        let row = self.output.element(k, row, 4 * DIM);
        row.element(k, cta.thread, 4)
    }

    /// Online softmax of a tile, row by row. The scores must be complete, behind a barrier.
    fn update(&self, k: &mut Builder, cta: &Cta, keys: R32, values: Global) {
        let column = values.element(k, cta.thread, 2);
        k.for_range(0, cta.rows, 1, |k, row| {
            k.nounroll();
            let scores = self.scores.element(k, row, 4 * KEYS);
            let [max, sum] = self.state.map(|array| array.element(k, row, 4));
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
                let at = self.place(k, cta, row);
                let before: F32 = k.ld(at);
                let after = k.mad(before, rescale, total);
                k.st(at, after);
            });
        });
    }

    /// `O / l`, one half per store. The sums must be complete, behind a barrier.
    fn store(&self, k: &mut Builder, cta: &Cta) {
        k.if_(self.has_column, |k| {
            k.for_range(0, cta.rows, 1, |k, row| {
                let from = self.place(k, cta, row);
                let sum = self.state[1].element(k, row, 4);
                let (x, sum): (F32, F32) = (k.ld(from), k.ld(sum));
                let result: F32 = k.div(x, sum);
                let to = cta.out.element(k, row, ROW_BYTES);
                let to = to.element(k, cta.thread, 2);
                store_half(k, to, result);
            });
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
