//! Variant of the end of a tile: the first scores of the next tile are issued together with the last P V of
//! this one ([`Tiles::Overlapped`]).

use ptx::{Builder, Pred};

use super::main_loop::MainLoop;
use super::{Skips, Tiles};

impl MainLoop {
    /// Issues the scores of the first block of the CTA's first tile, if tiles overlap: each tile then begins
    /// with complete scores.
    pub fn open(&self, k: &mut Builder) {
        if self.tiles == Tiles::Overlapped {
            self.wait_for_first(k);
            self.first_scores(k, &self.s);
        }
    }

    /// The P V of a tile's last block, with the first scores of the next tile if there is one (`more`). Each
    /// path waits for its own products: where the paths join, none is in flight.
    pub(super) fn last_output_overlapped(&self, k: &mut Builder, more: Pred) {
        let overlaps = match &self.skips {
            None => more,
            Some(skips) => skips.fewer_than_stages(k, more),
        };
        k.if_else(
            overlaps,
            |k| {
                self.queries.wait(k);
                if let Some(skips) = &self.skips {
                    skips.keys_ahead(k);
                }
                self.issue_both(k);
                k.wgmma_wait(1);
                self.keys.release(k);
                k.wgmma_wait(0);
                self.values.release(k);
                self.add_output(k);
            },
            |k| {
                self.last_output(k);
                // After the CTA's last tile, no load waits for the stage of these values.
                if let Some(skips) = &self.skips {
                    k.if_(more, |k| self.first_scores_after_skips(k, skips));
                }
            },
        );
    }

    /// The first scores of the next tile after the P V of this one, with many blocks to skip in between.
    fn first_scores_after_skips(&self, k: &mut Builder, skips: &Skips) {
        self.values.release(k);
        skips.turn(k);
        // At least as many blocks were skipped as there are stages. So the current keys were requested after
        // another warpgroup of the CTA had released the first keys, and that warpgroup had then waited for
        // the queries. In a cluster, that may have been another CTA's warpgroup.
        if self.keys.is_multicast() {
            self.queries.wait(k);
        }
        skips.before_first_keys(k);
        self.keys.wait(k);
        // No register of a product has been written since the fence before the P V.
        self.scores(k, &self.s);
        k.wgmma_commit();
        k.wgmma_wait(0);
        self.keys.release(k);
    }
}
