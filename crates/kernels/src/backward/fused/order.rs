//! The fixed order in which CTAs add to the sums of dQ, so that dQ has equal bits in every run.
//!
//! The tiles of keys that see a tile of query rows add their parts of dQ one after the other, from the last
//! tile of keys to the first. A number in global memory says whose turn it is. The kernel before the main
//! kernel sets it to the last tile of keys that sees the rows. A CTA waits until the number is that of its
//! own tile of keys, adds, waits until the addition is complete, and stores the number of the tile before.
//! The tiles of keys that see a tile of query rows are neighbours, so each passes the turn on to the next.
//!
//! There is no deadlock. The CTAs of a head are launched from the last tile of keys to the first, and a GPU
//! starts CTAs in the order of their indices. A CTA therefore waits only for CTAs that run or have ended, and
//! the first of those that run waits for none.
//!
//! CTAs seldom wait, because all of them visit query rows in ascending order. Under a causal mask or a window
//! the tile of keys before another one begins earlier in the query rows, so that of two CTAs that start
//! together, the one with the later keys is ahead in each tile of query rows. Without a mask it is so because
//! it starts earlier: between two CTAs of a head, those of the same keys of other heads are launched
//! (`FusedPlan::section`).

use attend::KeyBand;
use problem::Problem;
use ptx::{Access, Builder, CmpOp, Global, R32};
use tile::divide;

use super::params::{OwnTile, RowTiles};
use super::plan::TileSizes;
use crate::Baked;
use crate::contract::Contract;

/// The numbers that say whose turn it is, for each part of each tile of query rows.
#[derive(Clone, Copy)]
pub(super) struct AddOrder {
    numbers: Global,
    parts: u32,
}

impl AddOrder {
    /// Declares the numbers, if additions have an order.
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        access: Access,
    ) -> Option<AddOrder> {
        let sizes = TileSizes::new(problem);
        let ([tiles, batch], parts) = (sizes.row_tiles(problem), sizes.ordered_parts());
        let bytes = (4 * tiles * batch) as usize * problem.heads_q * parts as usize;
        let ordered = problem.pass.deterministic();
        ordered.then(|| AddOrder { numbers: c.temporary(k, "dq_turns", bytes, access), parts })
    }

    /// The number of a part of a tile.
    pub fn number(&self, k: &mut Builder, tiles: &RowTiles, place: [R32; 3], part: R32) -> Global {
        let index = tiles.index(k, place);
        let bytes = i64::from(4 * self.parts);
        let of_tile = Global { base: k.mad(index, bytes, self.numbers.base), ..self.numbers };
        k.index(of_tile, part, 4)
    }

    /// Gives the turn to the last tile of keys that sees a tile of query rows. The rows may end within the
    /// tile: a CTA visits a tile for the sake of any of its rows.
    pub fn begin(
        &self,
        k: &mut Builder,
        (baked, band): (&Baked, &KeyBand),
        (tiles, own, lengths): (&RowTiles, &OwnTile, [R32; 2]),
        thread: R32,
    ) {
        let sizes = TileSizes::new(baked);
        let [.., tile] = own.at;
        let next = k.add(tile, 1);
        let past = k.mul(next, sizes.rows);
        let [_, seq_kv] = lengths;
        let end = match band.end_before(k, past, lengths) {
            None => seq_kv,
            Some(end) => k.min_s(end, seq_kv),
        };
        let last = k.sub(end, 1);
        let last = divide(k, last, sizes.keys());
        let number = self.number(k, tiles, own.place, thread);
        let writes = k.setp_u(CmpOp::Lt, thread, self.parts);
        k.guarded(writes, |k| k.st(number, last));
    }
}
