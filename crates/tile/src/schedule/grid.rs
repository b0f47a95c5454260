//! The tiles of output rows and the order of their indices.

use ptx::{Builder, CmpOp, R32};

use crate::TilePart;

/// The order of tile indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TileOrder {
    /// One head after another, row blocks in ascending order.
    InOrder,
    /// By sections of heads whose inputs fit in L2 together. Within a section, the last row blocks of all
    /// heads come first: under a causal mask they take longest (longest-processing-time-first).
    LongestFirst,
    /// By sections of heads, the last of which has a length of its own. Within a section, row blocks are in
    /// ascending order, each of all heads.
    Level,
    /// Successive indices are a constant stride apart in the order of [`TileOrder::InOrder`], modulo the
    /// number of tiles. The stride is coprime to that number. Tiles that run at the same time therefore have
    /// different lengths and different heads.
    Strided,
}

/// The grid of tiles, in registers.
#[derive(Clone, Copy, Debug)]
pub struct TileGrid {
    /// Their order.
    pub order: TileOrder,
    /// Number of tiles.
    pub tiles: R32,
    /// Row blocks of a head.
    pub row_blocks: R32,
    /// Heads of a batch entry.
    pub heads: R32,
    /// For [`TileOrder::LongestFirst`] the heads of a section, a divisor of all heads; for
    /// [`TileOrder::Level`] a divisor of those before the last section. For [`TileOrder::Strided`] the
    /// stride; stride times number of tiles fits 32 bits.
    pub section: R32,
    /// For [`TileOrder::Level`] the heads of the last section.
    pub last_section: Option<R32>,
}

/// A tile of output rows.
#[derive(Clone, Copy, Debug)]
pub struct WorkTile {
    /// Index of the tile's row block in its head.
    pub row_block: R32,
    /// The head, or the group of packed heads.
    pub head: R32,
    /// The batch entry.
    pub batch: R32,
    /// The blocks along the reduction to compute; `None` for all, if no tile of the last wave is shared.
    pub part: Option<TilePart>,
    /// The rows of the batch entry; `None` if all batch entries have the same rows.
    pub spans: Option<Spans>,
}

/// The rows of a batch entry: first row and number, of the output and along the reduction.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    /// Rows of the output; none for a tile without rows.
    pub rows: [R32; 2],
    /// Rows along the reduction.
    pub reduced: [R32; 2],
}

/// Finds the rows of a tile if batch entries have different rows.
pub trait Locate: std::fmt::Debug {
    /// The tile with its [`Spans`]. The row block of `tile` may count the tiles of all batch entries; that of
    /// the result counts within the batch entry. The result does not share registers with other tiles. The
    /// index of `tile` may lie beyond the last tile.
    fn locate(&self, k: &mut Builder, tile: WorkTile) -> WorkTile;
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
                let (level, head) = self.in_sections(k, index, self.section);
                let last = k.sub(self.row_blocks, 1);
                (k.sub(last, level), head)
            }
            TileOrder::Level => {
                let last = self.last_section.unwrap_or(self.section);
                let of_last = k.mul(last, self.row_blocks);
                let before = k.sub(self.tiles, of_last);
                let is_last = k.setp_u(CmpOp::Ge, index, before);
                let section = k.selp(last, self.section, is_last);
                let before = k.selp(before, 0, is_last);
                let index = k.sub(index, before);
                let (level, head) = self.in_sections(k, index, section);
                let first = k.div_u(before, self.row_blocks);
                (level, k.add(first, head))
            }
        };
        let batch = k.div_u(batch_head, self.heads);
        let head = remainder(k, batch_head, batch, self.heads);
        WorkTile { row_block, head, batch, part: None, spans: None }
    }

    /// The place of a tile in its head, and the head counted over all batch entries, of a tile index in
    /// sections of heads.
    fn in_sections(&self, k: &mut Builder, index: R32, heads: R32) -> (R32, R32) {
        let of_section = k.mul(heads, self.row_blocks);
        let section = k.div_u(index, of_section);
        let index = remainder(k, index, section, of_section);
        let level = k.div_u(index, heads);
        let head = remainder(k, index, level, heads);
        (level, k.mad(section, heads, head))
    }

    /// The row block, and the head counted over all batch entries, of a tile index in head-by-head order.
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
