//! `phase4_race` and `phase4`: warp reductions, 32 × 64 tiles, 128 threads; 1028 µs on the authors' L4,
//! which their log calls "100 %".
//!
//! What the authors believed: "light barriers, 2–4 a tile" and warp reductions made it fast, and it was their
//! checked baseline, compute-bound. What was really wrong: warp 0 writes the scores of all 32 rows (`row =
//! tid; row < 32`), then all four warps reduce them, and the barrier in between is missing. Three warps read
//! scores while they are being written, and later inputs gave wrong results 81 times in 100. The remaining
//! barriers are two per row, not two per tile, and protect cells that belong to one warp each. The score loop
//! still runs on one warp with 32-way conflicts, the 16-byte copies use 8 of 32 lanes, and all 32 lanes of a
//! row compute the same exponentials. What the emulator shows: a race between the store of a score and its
//! load in the softmax, warp 0 against warps 1 to 3. With the barrier: no hazard, and the same bottleneck.
//!
//! The structure follows the kernel that the authors published and timed, with the options of their build,
//! including fast math. Everything except copies, reductions and barriers is the same as in Phase 3.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, Pred, R32, Shared, Violations};

use super::RungKernel;
use super::common::{self, Array, DIM, Math, Tile, shuffle_down};
use super::phase3::{ROWS, Reduced, THREADS, WarpRow, WarpRows};

/// Whether a barrier separates the writer of the scores from their readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScoreOrder {
    /// The original, without a barrier.
    Unordered,
    /// The repair, with a barrier.
    BehindBarrier,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, order: ScoreOrder) -> Result<Bound, Violations> {
    let rung = match order {
        ScoreOrder::Unordered => RungKernel::Phase4Race,
        ScoreOrder::BehindBarrier => RungKernel::Phase4,
    };
    common::kernel(problem, arch, rung, ROWS, THREADS, |k, cta| {
        let rows = WarpRows::new(k, cta, Math::Fast);
        let lane_0 = k.setp_u(CmpOp::Eq, rows.lane, 0);
        cta.for_each_tile(k, |k, tile| {
            rows.load(k, cta, tile, copy_vectors);
            k.bar_sync();
            rows.score(k, cta, tile);
            if order == ScoreOrder::BehindBarrier {
                k.bar_sync();
            }
            rows.for_each(k, cta, |k, row| {
                let reduced = reduce_by_shuffles(k, &row, tile, lane_0);
                row.weigh(k, tile, reduced);
                row.keep(k, reduced);
            });
            k.bar_sync();
        });
        rows.store(k, cta);
    })
}

/// `for (d = 8 * lane; d < 64; d += 256)`: copies keys and values eight halves at a time.
fn copy_vectors(k: &mut Builder, lane: R32, from: [Global; 2], to: [Shared; 2]) {
    let first: R32 = k.mul(lane, 8);
    k.for_range(first, DIM, 32 * 8, |k, d| {
        let words: [[R32; 4]; 2] = from.map(|from| {
            let from = from.element(k, d, 2);
            k.ld_vec(from)
        });
        for (to, words) in to.into_iter().zip(words) {
            let to = to.element(k, d, 2);
            k.st_vec(to, words);
        }
    });
}

fn reduce_by_shuffles(k: &mut Builder, row: &WarpRow, tile: Tile, lane_0: Pred) -> Reduced {
    let mine: F32 = k.ld(row.state[0]);
    for_each_score_of_lane(k, row, tile, |k, score| k.max_to(mine, mine, score));
    let largest = through_cell(k, row.cells[0], lane_0, |k| shuffle_down(k, mine, |k, a, b| k.max(a, b)));
    let rescale = row.rescale(k, largest);
    let before: F32 = k.ld(row.state[1]);
    let before: F32 = k.mul(before, rescale);
    let mine: F32 = k.selp(before, 0.0f32, lane_0);
    for_each_score_of_lane(k, row, tile, |k, score| {
        let p = row.math.exp_difference(k, score, largest);
        k.add_to(mine, mine, p);
    });
    let sum = through_cell(k, row.cells[1], lane_0, |k| shuffle_down(k, mine, |k, a, b| k.add(a, b)));
    Reduced { largest, sum }
}

fn for_each_score_of_lane(k: &mut Builder, row: &WarpRow, tile: Tile, body: impl FnOnce(&mut Builder, F32)) {
    k.for_range(row.lane, tile.keys, 32, |k, column| {
        let at = row.scores.element(k, column, 4);
        let score = k.ld(at);
        body(k, score);
    });
}

/// Broadcast from lane 0 to all lanes through shared memory and a barrier of the whole CTA.
fn through_cell(
    k: &mut Builder,
    cell: Shared,
    lane_0: Pred,
    of_warp: impl FnOnce(&mut Builder) -> F32,
) -> F32 {
    let value = of_warp(k);
    k.if_(lane_0, |k| k.st(cell, value));
    k.bar_sync();
    k.ld(cell)
}
