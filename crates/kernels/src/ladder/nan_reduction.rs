//! `nan_reduction`: Phase 1's first attempt, which the seeds only record as "warp reductions caused NaN outputs".
//!
//! What the seeds believed: warp reductions are at fault, so one thread must reduce. What was really wrong: a tile has
//! 64 scores and the block 128 threads. The two warps that hold no score reduce nothing but −∞, take it for the maximum,
//! and compute exp(−∞ − (−∞)) = NaN; one block-wide sum carries it into every row. What the emulator shows: no hazard at
//! all, and NaN in every element of the output, which the oracle refuses.
//!
//! The seeds keep no code of it. Chosen: the slip that fits their words, a maximum that stays within its warp beside a
//! sum that crosses warps through shared memory; tiles and scores are Phase 1's.

use problem::Problem;
use ptx::{Builder, CmpOp, F32, Kernel, Pointer, Pred, R32, Shared};

use super::RungPlan;
use super::common::{
    self, Cta, DIM, KEYS, ROW_BYTES, exp_difference, store_half, warp_max, warp_sum, weigh_values,
};
use super::phase1::{ROWS, THREADS, Tiles};
use crate::Arch;

const WARPS: u32 = THREADS / 32;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    common::kernel(problem, arch, RungPlan::NanReduction, ROWS, THREADS, |k, cta| {
        let rows = WarpRows::new(k, cta);
        let tiles = Tiles::new(k, cta, ROWS);
        cta.for_each_tile(k, |k, first| {
            tiles.load(k, cta, first);
            tiles.score(k, cta, rows.scores);
            k.bar_sync();
            rows.update(k, cta, tiles.values);
        });
        rows.store(k, cta);
    })
}

/// Every thread holds maximum and sum of every row, and column `tid` of its output.
struct WarpRows {
    scores: Shared,
    /// A partial sum a warp.
    partial: Shared,
    /// The warp's place in `partial`, and whether this lane writes it.
    mine: (Shared, Pred),
    /// `tid < 64`: the thread has a score and an output column.
    has_column: Pred,
    state: Vec<[F32; 3]>,
}

impl WarpRows {
    fn new(k: &mut Builder, cta: &Cta) -> WarpRows {
        let scores = k.shared_array("scores", 4, ROWS * KEYS * 4);
        let partial = k.shared_array("partial", 16, WARPS * 4);
        let (warp, lane): (R32, R32) = cta.warp_and_lane(k);
        let mine = (k.shared_index(partial, warp, 4), k.setp_u(CmpOp::Eq, lane, 0));
        let has_column = k.setp_u(CmpOp::Lt, cta.thread, DIM);
        let state = (0..ROWS).map(|_| [f32::NEG_INFINITY, 0.0, 0.0].map(|x| k.mov(x))).collect();
        WarpRows { scores, partial, mine, has_column, state }
    }

    fn update(&self, k: &mut Builder, cta: &Cta, values: Shared) {
        let column = k.shared_index(values, cta.thread, 2);
        for (row, &[max, sum, output]) in self.state.iter().enumerate() {
            let scores = self.scores.at(row as i64 * i64::from(KEYS) * 4);
            let mine = k.shared_index(scores, cta.thread, 4);
            let score: F32 = k.mov(f32::NEG_INFINITY);
            k.if_(self.has_column, |k| k.ld_to(score, mine));
            // The slip: of the warp, not of the row.
            let of_warp = warp_max(k, score);
            let largest: F32 = k.max(max, of_warp);
            let rescale = exp_difference(k, max, largest);
            let p = exp_difference(k, score, largest);
            k.if_(self.has_column, |k| k.st(mine, p));
            let total = self.block_sum(k, p);
            k.mad_to(sum, sum, rescale, total);
            k.mov_to(max, largest);
            k.if_(self.has_column, |k| {
                k.mul_to(output, output, rescale);
                weigh_values(k, output, scores, column, |_, p| p);
            });
            k.bar_sync();
        }
    }

    fn block_sum(&self, k: &mut Builder, p: F32) -> F32 {
        let of_warp = warp_sum(k, p);
        let (mine, writes) = self.mine;
        k.if_(writes, |k| k.st(mine, of_warp));
        k.bar_sync();
        let partial: [F32; 4] = k.ld_vec(self.partial);
        let [a, b, c, d] = partial;
        [b, c, d].into_iter().fold(a, |sum, part| k.add(sum, part))
    }

    fn store(&self, k: &mut Builder, cta: &Cta) {
        k.if_(self.has_column, |k| {
            let to = k.index(cta.out, cta.thread, 2);
            for (row, &[_, sum, output]) in self.state.iter().enumerate() {
                let result: F32 = k.div(output, sum);
                store_half(k, to.at(i64::from(ROW_BYTES) * row as i64), result);
            }
        });
    }
}
