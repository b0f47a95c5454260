//! The tiles of query rows, and the order of their numbers.

use ptx::{Builder, R32};

use crate::Part;

/// The order of the tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TileOrder {
    /// Head by head, rows in order.
    InOrder,
    /// By sections of heads whose keys and values fit L2 together; in a section, all heads' last rows first,
    /// which see most of a causal mask.
    LongestFirst,
    /// Each a stride behind the one before, in the order of [`TileOrder::InOrder`] and around its end, with a
    /// stride that is coprime to the number of tiles: neighbours in time are of all lengths and of different
    /// heads.
    Strided,
}

/// The grid of tiles, in registers.
#[derive(Clone, Copy, Debug)]
pub struct TileGrid {
    /// Their order.
    pub order: TileOrder,
    /// Tiles in all.
    pub tiles: R32,
    /// Tiles of a head.
    pub row_blocks: R32,
    /// Heads of a batch entry.
    pub heads: R32,
    /// Of [`TileOrder::LongestFirst`] the heads of a section, a divisor of all heads; of
    /// [`TileOrder::Strided`] the stride, of which as many as there are tiles fit 32 bits.
    pub section: R32,
}

/// A tile of query rows.
#[derive(Clone, Copy, Debug)]
pub struct WorkTile {
    /// Which of the head's tiles.
    pub row_block: R32,
    /// The query head, or the group of packed heads.
    pub head: R32,
    /// The batch entry.
    pub batch: R32,
    /// The blocks of keys to compute; `None` for all, unless tiles of the last round are shared.
    pub part: Option<Part>,
}

impl TileGrid {
    pub(crate) fn tile(&self, k: &mut Builder, index: R32) -> WorkTile {
        let (row_block, batch_head) = match self.order {
            TileOrder::InOrder => self.in_order(k, index),
            TileOrder::Strided => {
                let line = k.mul(index, self.section);
                let index = k.rem_u(line, self.tiles);
                self.in_order(k, index)
            }
            TileOrder::LongestFirst => {
                let of_section = k.mul(self.section, self.row_blocks);
                let section = k.div_u(index, of_section);
                let index = remainder(k, index, section, of_section);
                let from_last = k.div_u(index, self.section);
                let head = remainder(k, index, from_last, self.section);
                let last = k.sub(self.row_blocks, 1);
                (k.sub(last, from_last), k.mad(section, self.section, head))
            }
        };
        let batch = k.div_u(batch_head, self.heads);
        WorkTile { row_block, head: remainder(k, batch_head, batch, self.heads), batch, part: None }
    }

    /// Row block and batch entry's head of a tile's number, head by head.
    fn in_order(&self, k: &mut Builder, index: R32) -> (R32, R32) {
        let batch_head = k.div_u(index, self.row_blocks);
        (remainder(k, index, batch_head, self.row_blocks), batch_head)
    }
}

/// `a − quotient · by`.
pub(crate) fn remainder(k: &mut Builder, a: R32, quotient: R32, by: R32) -> R32 {
    let whole = k.mul(quotient, by);
    k.sub(a, whole)
}
