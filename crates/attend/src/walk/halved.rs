//! Variant of the first block: a warpgroup whose rows see at most the first half of the block computes only
//! that half. Under a causal mask, the first block is the block on the diagonal.

use ptx::{Builder, CmpOp, R32};
use tile::AccTile;

use super::Tiles;
use super::main_loop::{Loaded, MainLoop, TileRows, Visit};

impl MainLoop {
    /// Computes the first half of the first block if `halved` is non-zero, else all of it. P of the other
    /// half is zero.
    pub(super) fn first_block_halved(
        &self,
        k: &mut Builder,
        halved: R32,
        visit: &Visit,
        rows: (&TileRows, &Loaded),
    ) {
        if self.schedule.tiles == Tiles::InTurn {
            self.wait_for_first(k);
        }
        // If tiles overlap, the scores were issued together with the last P V of the previous tile and are
        // complete.
        let scores = |k: &mut Builder, s: &AccTile| match self.schedule.tiles {
            Tiles::InTurn => self.first_scores(k, s),
            Tiles::Overlapped => {}
        };
        let halved = k.setp_u(CmpOp::Ne, halved, 0);
        k.if_else(
            halved,
            |k| {
                let (columns, k_tiles) = (self.tiles.s.n_tiles() / 2, self.tiles.p.k_tiles() / 2);
                let (s, p) = (self.tiles.s.columns(0, columns), self.tiles.p.first_tiles(k_tiles));
                scores(k, &s);
                self.first_softmax(k, (&s, &p), visit, rows);
                self.tiles.p.clear_from(k, k_tiles);
            },
            |k| {
                scores(k, &self.tiles.s);
                self.first_softmax(k, (&self.tiles.s, &self.tiles.p), visit, rows);
            },
        );
        self.skip_owed_values(k);
    }
}
