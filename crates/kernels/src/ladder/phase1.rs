//! `phase1`: 16 query rows a CTA, 3652 µs on the seeds' L4, slower than the 2870 µs it set out from.
//!
//! What the seeds believed: fewer CTAs over shared tiles of keys and values must win, and warp reductions had "caused
//! NaN" for reasons unknown, so one thread reduces. What was really wrong: for each row, 127 threads wait while thread 0
//! walks 64 scores twice, once for the maximum and once for the sum; the loads that tiling saved were not the cost. What
//! the emulator shows: a serial share that grows with the tile, three barriers a row, and 32-way bank conflicts in the
//! score loop, because 32 lanes read 32 unpadded rows of keys.
//!
//! The seeds give the tile, the `tid == 0` loop and the fallback. Chosen: 128 threads as "the other 127" says; a score
//! a thread, `for (i = tid; i < 16 * 64; i += 128)`; output columns by `for (d = tid; d < 64; d += 128)`; a barrier
//! after each of maximum, exponentials and sum.

use problem::Problem;
use ptx::{Builder, F32, Kernel, R32, Shared};

use super::RungPlan;
use super::common::{self, Cta, DIM, KEYS, ROW_BYTES, TILE_BYTES, dot};
use super::serial::{Exponentials, SerialRows};
use crate::Arch;

/// Query rows of a CTA (`BLOCK_M`).
pub(super) const ROWS: u32 = 16;
pub(super) const THREADS: u32 = 128;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    common::kernel(problem, arch, RungPlan::Phase1, ROWS, THREADS, |k, cta| {
        let rows = SerialRows::new(k, cta, ROWS, Exponentials::Stored);
        let tiles = Tiles::new(k, cta, ROWS);
        cta.for_each_tile(k, |k, first| {
            tiles.load(k, cta, first);
            tiles.score(k, cta, rows.scores());
            k.bar_sync();
            rows.update(k, cta, tiles.values);
            k.bar_sync();
        });
        rows.store(k, cta);
    })
}

/// Q, K and V in shared memory as halves, rows unpadded.
pub(super) struct Tiles {
    rows: u32,
    pub q: Shared,
    pub keys: Shared,
    pub values: Shared,
}

impl Tiles {
    /// Room for all three, with the queries loaded; the first [`Tiles::load`] ends with the barrier for both.
    pub(super) fn new(k: &mut Builder, cta: &Cta, rows: u32) -> Tiles {
        let q = k.shared_array("q_tile", 2, rows * ROW_BYTES);
        let [keys, values] = ["k_tile", "v_tile"].map(|name| k.shared_array(name, 2, TILE_BYTES));
        cta.copy_halves(k, cta.q, q, rows * DIM);
        Tiles { rows, q, keys, values }
    }

    /// Keys and values from row `first` on, and a barrier.
    pub(super) fn load(&self, k: &mut Builder, cta: &Cta, first: R32) {
        for (from, to) in [(cta.keys, self.keys), (cta.values, self.values)] {
            let from = k.index(from, first, ROW_BYTES);
            cta.copy_halves(k, from, to, KEYS * DIM);
        }
        k.bar_sync();
    }

    /// `for (i = tid; i < rows * 64; i += blockDim.x) S[i / 64][i % 64] = scale * dot(Q[i / 64], K[i % 64])`.
    pub(super) fn score(&self, k: &mut Builder, cta: &Cta, scores: Shared) {
        k.for_range(cta.thread, self.rows * KEYS, cta.threads, |k, i| {
            let (row, key): (R32, R32) = (k.shr_u(i, 6), k.and(i, 63));
            let (q, key) =
                (k.shared_index(self.q, row, ROW_BYTES), k.shared_index(self.keys, key, ROW_BYTES));
            let sum = dot(k, q, key);
            let score: F32 = k.mul(sum, cta.scale);
            let to = k.shared_index(scores, i, 4);
            k.st(to, score);
        });
    }
}
