//! Variant of the end of a tile: the first scores of the next tile are issued together with the last P V of
//! this one ([`Tiles::Overlapped`]).

use ptx::{Builder, Pred};

use super::main_loop::MainLoop;
use super::{Skips, Tiles};

impl MainLoop {
    /// If tiles overlap, issues the scores of the first block of the CTA's first tile: each tile then begins
    /// with complete scores.
    pub fn open(&self, k: &mut Builder) {
        if self.schedule.tiles == Tiles::Overlapped {
            self.wait_for_first(k);
            self.first_scores(k, &self.tiles.s);
        }
    }

    /// The P V of a tile's last block, together with the first scores of the next tile if there is one
    /// (`more`). Each branch waits for its own products, so that none is in flight after the branches join.
    pub(super) fn last_output_overlapped(&self, k: &mut Builder, more: Pred) {
        let overlaps = match &self.schedule.skips {
            None => more,
            Some(skips) => skips.fewer_than_stages(k, more),
        };
        k.if_else(
            overlaps,
            |k| {
                self.rings.queries.wait(k);
                if let Some(skips) = &self.schedule.skips {
                    skips.keys_ahead(k);
                }
                self.issue_both(k, |_| {});
                k.wgmma_wait(1);
                self.rings.keys.release(k);
                k.wgmma_wait(0);
                self.rings.values.release(k);
                self.add_output(k);
            },
            |k| {
                self.last_output(k);
                // After the CTA's last tile, no load waits for the stage of these values, so they need not be
                // released.
                if let Some(skips) = &self.schedule.skips {
                    k.if_(more, |k| self.first_scores_after_skips(k, skips));
                }
            },
        );
    }

    /// Computes the first scores of the next tile after the P V of this one. Used when many blocks are
    /// skipped in between.
    fn first_scores_after_skips(&self, k: &mut Builder, skips: &Skips) {
        self.rings.values.release(k);
        skips.turn(k);
        // At least as many blocks were skipped as there are stages. The current keys were therefore requested
        // after another warpgroup of the CTA had released the first keys, and that warpgroup had then waited
        // for the queries. In a cluster, the other warpgroup may belong to another CTA.
        if self.rings.keys.is_multicast() {
            self.rings.queries.wait(k);
        }
        skips.before_first_keys(k);
        self.rings.keys.wait(k);
        // No register of a product has been written since the fence before the P V.
        self.scores(k, &self.tiles.s);
        k.wgmma_commit();
        k.wgmma_wait(0);
        self.rings.keys.release(k);
    }
}
