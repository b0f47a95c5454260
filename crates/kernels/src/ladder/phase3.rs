//! `phase3`: 32 query rows a CTA and four warps, 1634 µs on the seeds' L4.
//!
//! What the seeds believed: "better warp utilisation, 4 warps a block". What was really wrong: rows are given out by
//! `for (row = tid; row < 32; row += 128)`, so warp 0 computes all scores and the whole softmax while three warps wait
//! at the barrier; its 32 lanes walk down 32 unpadded rows, so each read of Q and each write of S is a 32-way bank
//! conflict. It won only because a row's reduction now has 32 threads instead of one. What the emulator shows: one warp
//! of four in the score and softmax lines, and conflict degree 32 on them; what looks like compute is shared memory.
//!
//! The seeds give tile, warps and, by what came later, the row loop. Chosen: maximum, exponentials and sum by the row's
//! own thread (parallel reductions were still on their list); for the output all 128 threads, 16 elements each in
//! registers, `for (i = tid; i < 32 * 64; i += 128)`.

use problem::Problem;
use ptx::{Builder, CmpOp, F32, Kernel, Pointer, Pred, R32, Shared};

use super::RungPlan;
use super::common::{
    self, Cta, DIM, KEYS, ROW_BYTES, dot, exp_difference, for_each_score, store_half, weigh_values,
};
use super::phase1::Tiles;
use crate::Arch;

/// Query rows of a CTA (`BLOCK_M`).
pub(super) const ROWS: u32 = 32;
pub(super) const THREADS: u32 = 128;
/// Rows between two output elements of a thread.
const ROW_STEP: u32 = THREADS / DIM;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    common::kernel(problem, arch, RungPlan::Phase3, ROWS, THREADS, |k, cta| {
        let softmax = RowThreads::new(k, cta);
        let tiles = Tiles::new(k, cta, ROWS);
        let output = Output::new(k, cta);
        cta.for_each_tile(k, |k, first| {
            tiles.load(k, cta, first);
            score_rows(k, cta, &tiles, softmax.scores);
            softmax.update(k);
            k.bar_sync();
            output.update(k, &softmax, tiles.values);
            k.bar_sync();
        });
        softmax.publish_sums(k);
        k.bar_sync();
        output.store(k, cta, &softmax);
    })
}

/// `for (row = tid; row < 32; row += blockDim.x) for (n = 0; n < 64; n++) S[row][n] = scale * dot(Q[row], K[n])`.
pub(super) fn score_rows(k: &mut Builder, cta: &Cta, tiles: &Tiles, scores: Shared) {
    k.for_range(cta.thread, ROWS, cta.threads, |k, row| {
        let q = k.shared_index(tiles.q, row, ROW_BYTES);
        let scores = k.shared_index(scores, row, KEYS * 4);
        k.for_range(0, KEYS, 1, |k, key| {
            let to = k.shared_index(scores, key, 4);
            let key = k.shared_index(tiles.keys, key, ROW_BYTES);
            let sum = dot(k, q, key);
            let score: F32 = k.mul(sum, cta.scale);
            k.st(to, score);
        });
    });
}

/// Softmax by the thread that owns the row; running maximum and sum in its registers.
struct RowThreads {
    scores: Shared,
    /// What the other threads must know of a row: the rescale factor, and at the end the sum.
    factors: Shared,
    has_row: Pred,
    row: Shared,
    factor: Shared,
    max: F32,
    sum: F32,
}

impl RowThreads {
    fn new(k: &mut Builder, cta: &Cta) -> RowThreads {
        let scores = k.shared_array("scores", 4, ROWS * KEYS * 4);
        let factors = k.shared_array("factors", 4, ROWS * 4);
        RowThreads {
            scores,
            factors,
            has_row: k.setp_u(CmpOp::Lt, cta.thread, ROWS),
            row: k.shared_index(scores, cta.thread, KEYS * 4),
            factor: k.shared_index(factors, cta.thread, 4),
            max: k.mov(f32::NEG_INFINITY),
            sum: k.mov(0.0f32),
        }
    }

    fn update(&self, k: &mut Builder) {
        k.if_(self.has_row, |k| {
            let largest: F32 = k.mov(self.max);
            for_each_score(k, self.row, |k, at| {
                let score: F32 = k.ld(at);
                k.max_to(largest, largest, score);
            });
            let rescale = exp_difference(k, self.max, largest);
            k.mul_to(self.sum, self.sum, rescale);
            for_each_score(k, self.row, |k, at| {
                let score: F32 = k.ld(at);
                let p = exp_difference(k, score, largest);
                k.st(at, p);
                k.add_to(self.sum, self.sum, p);
            });
            k.mov_to(self.max, largest);
            k.st(self.factor, rescale);
        });
    }

    fn publish_sums(&self, k: &mut Builder) {
        k.if_(self.has_row, |k| k.st(self.factor, self.sum));
    }
}

/// Column `tid % 64` of rows `tid / 64`, `tid / 64 + 2`, ….
struct Output {
    first_row: R32,
    column: R32,
    elements: Vec<F32>,
}

impl Output {
    fn new(k: &mut Builder, cta: &Cta) -> Output {
        let elements = (0..ROWS / ROW_STEP).map(|_| k.mov(0.0f32)).collect();
        Output { first_row: k.shr_u(cta.thread, 6), column: k.and(cta.thread, 63), elements }
    }

    fn update(&self, k: &mut Builder, softmax: &RowThreads, values: Shared) {
        let scores = k.shared_index(softmax.scores, self.first_row, KEYS * 4);
        let factors = k.shared_index(softmax.factors, self.first_row, 4);
        let column = k.shared_index(values, self.column, 2);
        for (i, &element) in self.elements.iter().enumerate() {
            let row = i as i64 * i64::from(ROW_STEP);
            let rescale: F32 = k.ld(factors.at(4 * row));
            k.mul_to(element, element, rescale);
            weigh_values(k, element, scores.at(i64::from(KEYS) * 4 * row), column, |_, p| p);
        }
    }

    fn store(&self, k: &mut Builder, cta: &Cta, softmax: &RowThreads) {
        let sums = k.shared_index(softmax.factors, self.first_row, 4);
        let to = k.index(cta.out, cta.thread, 2);
        for (i, &element) in self.elements.iter().enumerate() {
            let row = i as i64 * i64::from(ROW_STEP);
            let sum: F32 = k.ld(sums.at(4 * row));
            let result: F32 = k.div(element, sum);
            store_half(k, to.at(i64::from(ROW_BYTES) * row), result);
        }
    }
}
