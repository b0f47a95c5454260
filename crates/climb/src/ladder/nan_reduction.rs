//! `nan_reduction`: Phase 1's first attempt, of which the authors say that "warp reductions caused NaN
//! outputs".
//!
//! What the authors believed: warp reductions are at fault, so one thread must reduce. What was really wrong:
//! each warp reduces alone, and then all four warps write their result to one shared cell, in no particular
//! order. A tile has 64 scores and the block 128 threads, so two of the warps have no score and write their
//! initial values, −3.4 · 10³⁸ as maximum and 0 as sum. If such a warp writes last, exp(S − m) overflows, the
//! sum is 0, and ∞ · 0 or ∞ − ∞ is NaN. Otherwise the result is that of a single warp, and wrong. What the
//! emulator shows: races between the warps on the two cells and, under schedules in which such a warp writes
//! last, whole rows of NaN, which the comparison with the oracle rejects.
//!
//! The structure follows the first version in the published history of the kernel. Everything except the
//! reductions is the same as in Phase 1.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Pred, Shared, Violations};

use super::RungKernel;
use super::common::{self, Array, Cta, shuffle_down};
use super::phase1::{self, MATH, ROWS, Reduced, THREADS, Turn};

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    common::kernel(problem, arch, RungKernel::NanReduction, ROWS, THREADS, |k, cta| {
        let warps = Warps::new(k, cta);
        phase1::body(k, cta, |k, row| warps.update(k, row));
    })
}

/// One cell for the maximum and one for the sum. Lane 0 of every warp writes both.
struct Warps {
    leads: Pred,
    largest: Shared,
    sum: Shared,
}

impl Warps {
    fn new(k: &mut Builder, cta: &Cta) -> Warps {
        let (_, lane) = cta.warp_and_lane(k);
        let [largest, sum] = ["largest", "sum"].map(|name| k.shared_array(name, 4, 4));
        Warps { leads: k.setp_u(CmpOp::Eq, lane, 0), largest, sum }
    }

    fn update(&self, k: &mut Builder, row: &Turn) -> Reduced {
        let mine: F32 = k.ld(row.state[0]);
        self.fold(k, row, |k, score| k.max_to(mine, mine, score));
        let largest = self.of_any_warp(k, self.largest, mine, |k, a, b| k.max(a, b));
        let rescale = row.rescale(k, largest);
        let before: F32 = k.ld(row.state[1]);
        let before: F32 = k.mul(before, rescale);
        let mine: F32 = k.mov(0.0f32);
        self.fold(k, row, |k, score| {
            let p = MATH.exp_difference(k, score, largest);
            k.add_to(mine, mine, p);
        });
        let sum = self.of_any_warp(k, self.sum, mine, |k, a, b| k.add(a, b));
        Reduced { largest, sum: k.add(before, sum) }
    }

    /// `for (c = tid; c < keys; c += 128)`: half of the threads have one score, the others none.
    fn fold(&self, k: &mut Builder, row: &Turn, body: impl FnOnce(&mut Builder, F32)) {
        row.cta.strided(k, row.tile.keys, |k, column| {
            let at = row.scores.element(k, column, 4);
            let score = k.ld(at);
            body(k, score);
        });
    }

    /// The bug: four warps write to one cell.
    fn of_any_warp(
        &self,
        k: &mut Builder,
        cell: Shared,
        mine: F32,
        combine: impl Fn(&mut Builder, F32, F32) -> F32,
    ) -> F32 {
        let of_warp = shuffle_down(k, mine, combine);
        k.if_(self.leads, |k| k.st(cell, of_warp));
        k.bar_sync();
        k.ld(cell)
    }
}
