//! Synchronisation and vote of the threads of a warpgroup.

use ptx::{BarKind, Builder, Op, Operand, Pred, R32, Src, Value};

use crate::WARPGROUP_THREADS;
use crate::named_barriers::FIRST_VOTE;

/// Warpgroup-wide synchronisation and vote on a named barrier.
#[derive(Clone, Copy, Debug)]
pub struct WarpgroupVote(R32);

impl WarpgroupVote {
    /// The vote of warpgroup `warpgroup` of the CTA, an index below 8.
    pub fn new(k: &mut Builder, warpgroup: R32) -> WarpgroupVote {
        WarpgroupVote(k.add(warpgroup, FIRST_VOTE))
    }

    /// Waits until all threads of the warpgroup have arrived.
    pub fn sync(&self, k: &mut Builder) {
        k.named_barrier_sync(self.0, WARPGROUP_THREADS);
    }

    /// Whether the predicate holds in all threads of the warpgroup (`bar.red.and`). The following `vote` does
    /// not change the value, but tells ptxas that it is uniform. Without the vote, ptxas treats a branch on
    /// the barrier's result as divergent and moves the matrix descriptors out of uniform registers.
    pub fn all(&self, k: &mut Builder, holds: Pred) -> Pred {
        let all: Pred = k.reg();
        let barrier =
            [Operand::Reg(all.reg()), Operand::Reg(self.0.reg()), Src::<R32>::from(WARPGROUP_THREADS).into()];
        k.op(
            Op::Bar { kind: BarKind::RedAnd, aligned: true },
            barrier.into_iter().chain([Operand::Reg(holds.reg())]),
        );
        k.vote_all(all)
    }
}
