//! `phase4_race` and `phase4`: warp reductions, 32 × 64 tiles, 128 threads; 1028 µs on the seeds' L4 and called "100 %".
//!
//! What the seeds believed: "light barriers, 2–4 a tile" and warp reductions made it fast, and it was their proven
//! baseline, compute-bound. What was really wrong: warp 0 writes the scores of all 32 rows (`row = tid; row < 32`), then
//! all four warps reduce them; the barrier between was among those saved, so three warps read what is being written:
//! later inputs were wrong 81 times in 100. And the score loop still runs on one warp with 32-way conflicts. What the
//! emulator shows: a race between the store of a score and the load of the softmax, warp 0 against warps 1 to 3, on the
//! first tile also scores never written; repaired, no hazard and the same bound.
//!
//! The seeds give tile, threads, barriers and reductions. Chosen: a warp owns every fourth row, a lane two columns of
//! the scores and two of the output, in registers; tiles and score loop are Phase 3's.

use problem::Problem;
use ptx::{Builder, F32, Kernel, Pointer, R32, Shared};

use super::RungPlan;
use super::common::{
    self, Cta, KEYS, ROW_BYTES, exp_difference, store_half, warp_max, warp_sum, weigh_values,
};
use super::phase1::Tiles;
use super::phase3::{ROWS, THREADS, score_rows};
use crate::Arch;

const WARPS: u32 = THREADS / 32;

/// Whether a barrier stands between the scores' writer and their readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scores {
    /// As it was.
    Unordered,
    /// As it should have been.
    BehindBarrier,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, order: Scores) -> Kernel {
    let rung = match order {
        Scores::Unordered => RungPlan::Phase4Race,
        Scores::BehindBarrier => RungPlan::Phase4,
    };
    common::kernel(problem, arch, rung, ROWS, THREADS, |k, cta| {
        let rows = WarpRows::new(k, cta);
        let tiles = Tiles::new(k, cta, ROWS);
        cta.for_each_tile(k, |k, first| {
            tiles.load(k, cta, first);
            score_rows(k, cta, &tiles, rows.scores);
            if order == Scores::BehindBarrier {
                k.bar_sync();
            }
            rows.update(k, tiles.values);
            k.bar_sync();
        });
        rows.store(k, cta);
    })
}

/// The rows `warp`, `warp + 4`, …, one after another; every lane knows maximum and sum, and holds columns `lane` and
/// `lane + 32` of the output.
struct WarpRows {
    scores: Shared,
    warp: R32,
    lane: R32,
    state: Vec<(F32, F32, [F32; 2])>,
}

impl WarpRows {
    fn new(k: &mut Builder, cta: &Cta) -> WarpRows {
        let scores = k.shared_array("scores", 4, ROWS * KEYS * 4);
        let (warp, lane) = cta.warp_and_lane(k);
        let state = (0..ROWS / WARPS)
            .map(|_| (k.mov(f32::NEG_INFINITY), k.mov(0.0f32), [k.mov(0.0f32), k.mov(0.0f32)]))
            .collect();
        WarpRows { scores, warp, lane, state }
    }

    fn update(&self, k: &mut Builder, values: Shared) {
        let first = k.shared_index(self.scores, self.warp, KEYS * 4);
        let mine = k.shared_index(first, self.lane, 4);
        let column = k.shared_index(values, self.lane, 2);
        for (i, &(max, sum, output)) in self.state.iter().enumerate() {
            let row = i as i64 * i64::from(WARPS * KEYS * 4);
            let rescale = softmax(k, mine.at(row), max, sum);
            // P of the row, written by these lanes, is read by all of them.
            k.warp_sync();
            for (half, output) in output.into_iter().enumerate() {
                k.mul_to(output, output, rescale);
                weigh_values(k, output, first.at(row), column.at(64 * half as i64), |_, p| p);
            }
        }
    }

    fn store(&self, k: &mut Builder, cta: &Cta) {
        let to = k.index(cta.out, self.warp, ROW_BYTES);
        let to = k.index(to, self.lane, 2);
        for (i, &(_, sum, output)) in self.state.iter().enumerate() {
            let row = i as i64 * i64::from(WARPS * ROW_BYTES);
            for (half, output) in output.into_iter().enumerate() {
                let result: F32 = k.div(output, sum);
                store_half(k, to.at(row + 64 * half as i64), result);
            }
        }
    }
}

/// Scores `lane` and `lane + 32` become P in place; the factor for what was summed before.
fn softmax(k: &mut Builder, mine: Shared, max: F32, sum: F32) -> F32 {
    let places = [mine, mine.at(128)];
    let scores: [F32; 2] = places.map(|at| k.ld(at));
    let larger: F32 = k.max(scores[0], scores[1]);
    let of_row = warp_max(k, larger);
    let largest: F32 = k.max(max, of_row);
    let rescale = exp_difference(k, max, largest);
    let p = scores.map(|s| exp_difference(k, s, largest));
    places.into_iter().zip(p).for_each(|(at, p)| k.st(at, p));
    let both: F32 = k.add(p[0], p[1]);
    let total = warp_sum(k, both);
    k.mad_to(sum, sum, rescale, total);
    k.mov_to(max, largest);
    rescale
}
