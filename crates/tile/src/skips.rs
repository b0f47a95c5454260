//! Blocks that a warpgroup lets pass while its neighbours compute: it keeps step with the rings, and with the
//! turns.

use ptx::{Builder, CmpOp, Pred, R32};

use crate::Visits;

/// Blocks of a tile that none of a warpgroup's own rows sees, the first to come by: it lets them pass, and
/// the tensor cores are the other warpgroups' meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Skips {
    /// Of the tile to come.
    blocks: R32,
    /// Values that are still to pass.
    values: R32,
}

impl Skips {
    /// None.
    pub fn none(k: &mut Builder) -> Skips {
        Skips { blocks: k.mov(0), values: k.mov(0) }
    }

    /// Of the tile to come.
    pub fn set(&self, k: &mut Builder, blocks: R32) {
        k.mov_to(self.blocks, blocks);
    }

    /// Runs `pass` while there are blocks to skip.
    fn each(&self, k: &mut Builder, left: R32, pass: impl FnOnce(&mut Builder)) {
        k.while_(
            |k| k.setp_u(CmpOp::Ne, left, 0),
            |k| {
                pass(k);
                k.sub_to(left, left, 1);
            },
        );
    }
}

impl Visits {
    /// Skips what values are still to pass.
    pub(crate) fn skip_values_owed(&self, k: &mut Builder) {
        if let Some(skips) = &self.skips {
            skips.each(k, skips.values, |k| self.skip_values(k));
        }
    }

    /// Skips blocks in the order in which they would have been visited, which is that of the requests: all
    /// but the values of the last, whose turn comes with the first visit.
    pub(crate) fn skip_in_step(&self, k: &mut Builder) {
        let Some(skips) = &self.skips else { return };
        let some = k.setp_u(CmpOp::Ne, skips.blocks, 0);
        k.if_(some, |k| {
            self.skip_keys(k);
            k.sub_to(skips.blocks, skips.blocks, 1);
            skips.each(k, skips.blocks, |k| {
                self.skip_keys(k);
                self.skip_values(k);
            });
            k.mov_to(skips.values, 1);
        });
    }

    /// Skips the keys of all blocks before any of their values.
    pub(crate) fn skip_ahead(&self, k: &mut Builder) {
        let Some(skips) = &self.skips else { return };
        // Tiles overlap only where fewer blocks are skipped than there are stages ([`Visits::overlaps`]): of
        // one stage, none.
        if self.keys.stages() > 1 {
            k.mov_to(skips.values, skips.blocks);
            skips.each(k, skips.blocks, |k| self.skip_keys(k));
        }
    }

    /// Waits for the keys all the same: a warp that was a round ahead would speak for the wrong one.
    pub(crate) fn skip_keys(&self, k: &mut Builder) {
        self.keys.wait(k);
        self.keys.release(k);
    }

    /// Waits as for keys, but where turns keep warpgroups together: with its turn a warpgroup knows that all
    /// others have left the values before the last.
    pub(crate) fn skip_values(&self, k: &mut Builder) {
        let together = self.circle.is_some() && !self.values.has_peers();
        if !together || self.values.stages() == 1 {
            self.values.wait(k);
        }
        self.skip_turn(k);
        self.values.release(k);
    }

    /// Lets the next warpgroup have the turn.
    pub(crate) fn skip_turn(&self, k: &mut Builder) {
        if let Some(circle) = &self.circle {
            circle.take(k);
            circle.pass(k);
        }
    }

    /// Whether the first scores of the next tile can be issued before the values of this one are left: keys
    /// that are skipped until then must all have places, or they wait for a warpgroup whose turn comes later.
    pub(crate) fn overlaps(&self, k: &mut Builder, more: Pred) -> Pred {
        match &self.skips {
            None => more,
            Some(skips) => k.setp_u_and(CmpOp::Lt, skips.blocks, self.values.stages(), more),
        }
    }
}
