//! Rows one after another, each reduced by one thread: what Phase 1 and P1 do with a tile of scores.

use ptx::{Builder, CmpOp, F32, Pointer, Pred, Shared};

use super::common::{Cta, DIM, KEYS, ROW_BYTES, exp_difference, for_each_score, store_half, weigh_values};

/// Who computes exp(S − m).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exponentials {
    /// The block, once, in place of the scores.
    Stored,
    /// Each reader anew: the thread that sums, and each of the 64 that weigh values.
    Recomputed,
}

/// Running maxima and sums of the rows in shared memory; of the output, column `tid` of each row in registers.
pub(super) struct SerialRows {
    exponentials: Exponentials,
    /// `S_tile[rows][64]` in f32.
    scores: Shared,
    /// `m[rows]`, `l[rows]`.
    state: [Shared; 2],
    /// The row's new maximum, from thread 0 to the others.
    largest: Shared,
    /// `tid == 0`.
    first: Pred,
    /// `tid < 64`.
    has_column: Pred,
    /// `O_acc[rows]`, the loop over rows unrolled so that it stays in registers.
    output: Vec<F32>,
}

impl SerialRows {
    /// Nothing seen yet. The first barrier of the caller orders this for all threads.
    pub(super) fn new(k: &mut Builder, cta: &Cta, rows: u32, exponentials: Exponentials) -> SerialRows {
        let scores = k.shared_array("scores", 4, rows * KEYS * 4);
        let state = ["maxima", "sums"].map(|name| k.shared_array(name, 4, rows * 4));
        let largest = k.shared_array("largest", 4, 4);
        let (first, has_column) = (k.setp_u(CmpOp::Eq, cta.thread, 0), k.setp_u(CmpOp::Lt, cta.thread, DIM));
        let has_row = k.setp_u(CmpOp::Lt, cta.thread, rows);
        k.if_(has_row, |k| {
            for (array, value) in state.into_iter().zip([f32::NEG_INFINITY, 0.0]) {
                let (at, value) = (k.shared_index(array, cta.thread, 4), k.mov(value));
                k.st::<F32, _>(at, value);
            }
        });
        let output = (0..rows).map(|_| k.mov(0.0f32)).collect();
        SerialRows { exponentials, scores, state, largest, first, has_column, output }
    }

    /// The tile of scores that the block fills.
    pub(super) fn scores(&self) -> Shared {
        self.scores
    }

    /// Online softmax of a tile, row after row. Scores and values are ready, behind a barrier.
    pub(super) fn update(&self, k: &mut Builder, cta: &Cta, values: Shared) {
        let column = k.shared_index(values, cta.thread, 2);
        for (row, &output) in self.output.iter().enumerate() {
            let scores = self.scores.at(row as i64 * i64::from(KEYS) * 4);
            let [max, sum] = self.state.map(|array| array.at(4 * row as i64));
            k.if_(self.first, |k| self.reduce_max(k, scores, max));
            k.bar_sync();
            let (before, largest): (F32, F32) = (k.ld(max), k.ld(self.largest));
            let rescale = exp_difference(k, before, largest);
            if self.exponentials == Exponentials::Stored {
                self.exponentiate(k, cta, scores, largest);
                k.bar_sync();
            }
            k.if_(self.first, |k| self.reduce_sum(k, scores, sum, rescale, largest));
            k.bar_sync();
            k.if_(self.first, |k| k.st(max, largest));
            k.if_(self.has_column, |k| {
                k.mul_to(output, output, rescale);
                weigh_values(k, output, scores, column, |k, s| self.weight(k, s, largest));
            });
        }
    }

    fn weight(&self, k: &mut Builder, score: F32, largest: F32) -> F32 {
        match self.exponentials {
            Exponentials::Stored => score,
            Exponentials::Recomputed => exp_difference(k, score, largest),
        }
    }

    /// `if (tid == 0) for (c …) m_new = fmaxf(m_new, S[row][c])`, word for word the seeds' loop.
    fn reduce_max(&self, k: &mut Builder, scores: Shared, max: Shared) {
        let largest: F32 = k.ld(max);
        for_each_score(k, scores, |k, at| {
            let score: F32 = k.ld(at);
            k.max_to(largest, largest, score);
        });
        k.st(self.largest, largest);
    }

    fn exponentiate(&self, k: &mut Builder, cta: &Cta, scores: Shared, largest: F32) {
        k.for_range(cta.thread, KEYS, cta.threads, |k, c| {
            let at = k.shared_index(scores, c, 4);
            let score: F32 = k.ld(at);
            let p = exp_difference(k, score, largest);
            k.st(at, p);
        });
    }

    fn reduce_sum(&self, k: &mut Builder, scores: Shared, sum: Shared, rescale: F32, largest: F32) {
        let before: F32 = k.ld(sum);
        let total: F32 = k.mul(before, rescale);
        for_each_score(k, scores, |k, at| {
            let score: F32 = k.ld(at);
            let p = self.weight(k, score, largest);
            k.add_to(total, total, p);
        });
        k.st(sum, total);
    }

    /// `O / l`, a half a store. Sums are ready, behind a barrier.
    pub(super) fn store(&self, k: &mut Builder, cta: &Cta) {
        k.if_(self.has_column, |k| {
            let to = k.index(cta.out, cta.thread, 2);
            for (row, &output) in self.output.iter().enumerate() {
                let sum: F32 = k.ld(self.state[1].at(4 * row as i64));
                let result: F32 = k.div(output, sum);
                store_half(k, to.at(i64::from(ROW_BYTES) * row as i64), result);
            }
        });
    }
}
