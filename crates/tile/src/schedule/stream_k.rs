//! The last, partial wave of a persistent kernel, where fewer tiles than CTAs remain. With stream-K (Osama et
//! al. 2023) the blocks of these tiles along the reduction (KV blocks) form one line, tile after tile, and
//! each CTA takes one piece of the line. Piece lengths differ by at most one block. A piece is at most as
//! long as a tile, so it is a part of one tile, or the end of one tile and the beginning of the next.

use ptx::{Builder, CmpOp, R32};

/// How the last, partial wave is assigned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// One tile per CTA; the other CTAs are idle.
    #[default]
    Whole,
    /// One piece per CTA (stream-K). The parts of a tile are merged through global memory.
    Shared,
}

/// The number of tiles, and of the CTAs or clusters that take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastWave {
    /// Tiles in all.
    pub tiles: u64,
    /// Blocks of a tile.
    pub blocks: u64,
    /// CTAs or clusters that take tiles: at least one, at most the number of all blocks.
    pub takers: u64,
}

impl LastWave {
    /// Number of tiles that are computed whole: the first ones.
    pub const fn whole(&self) -> u64 {
        self.tiles / self.takers * self.takers
    }

    /// Number of tiles that are shared.
    pub const fn shared(&self) -> u64 {
        self.tiles % self.takers
    }

    /// Number of blocks in the line.
    pub const fn line(&self) -> u64 {
        self.shared() * self.blocks
    }

    /// Number of blocks of the shorter pieces.
    pub const fn piece(&self) -> u64 {
        self.line() / self.takers
    }

    /// Number of pieces that have one more block: the first ones.
    pub const fn longer(&self) -> u64 {
        self.line() % self.takers
    }
}

/// The values of a [`LastWave`] in registers.
#[derive(Clone, Copy, Debug)]
pub struct StreamK {
    /// Blocks of a tile.
    pub blocks: R32,
    /// Number of tiles that are computed whole.
    pub whole: R32,
    /// The pieces of the line.
    pub pieces: Pieces,
}

/// A line of blocks in pieces, one for each CTA. The first pieces may have one more block than the others.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// Blocks of the shorter pieces.
    pub piece: R32,
    /// Number of pieces that have one more block.
    pub longer: R32,
}

impl Pieces {
    /// First block of a CTA's piece in the line.
    pub fn start(&self, k: &mut Builder, taker: R32) -> R32 {
        let more = k.min_u(taker, self.longer);
        k.mad(taker, self.piece, more)
    }

    /// The CTA whose piece contains a block of the line.
    pub fn owner(&self, k: &mut Builder, block: R32) -> R32 {
        let long = k.add(self.piece, 1);
        let in_long = k.mul(self.longer, long);
        let beyond = k.setp_u(CmpOp::Ge, block, in_long);
        let past = k.sub(block, in_long);
        let past = k.selp(past, block, beyond);
        let before = k.selp(self.longer, 0, beyond);
        let length = k.selp(self.piece, long, beyond);
        let count = k.div_u(past, length);
        k.add(before, count)
    }
}

/// The part of a tile that a CTA computes.
#[derive(Clone, Copy, Debug)]
pub struct TilePart {
    /// Its lowest block, which is visited last.
    pub from: R32,
    /// One past its last block.
    pub end: R32,
    /// Index among the shared tiles; [`TilePart::WHOLE`] for a whole tile.
    pub tile: R32,
}

impl TilePart {
    /// Marks a tile that is not shared.
    pub const WHOLE: i32 = -1;

    /// Blocks `from` to `end` of shared tile `index`, or all blocks of it.
    pub(crate) fn new(k: &mut Builder, stream_k: &StreamK, index: R32, [from, end]: [R32; 2]) -> TilePart {
        let count = k.sub(end, from);
        let whole = k.setp_u(CmpOp::Eq, count, stream_k.blocks);
        let tile = k.sub(index, stream_k.whole);
        TilePart { from: k.mov(from), end: k.mov(end), tile: k.selp(TilePart::WHOLE, tile, whole) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_up_the_line() {
        for (tiles, blocks, takers) in
            [(2048, 128, 132), (7, 3, 4), (8, 3, 4), (5, 1, 4), (3, 5, 15), (1, 1, 1)]
        {
            let wave = LastWave { tiles, blocks, takers };
            assert_eq!(wave.whole() + wave.shared(), tiles);
            assert_eq!(wave.takers * wave.piece() + wave.longer(), wave.line());
            let longest = wave.piece() + u64::from(wave.longer() > 0);
            assert!(longest <= blocks, "{wave:?}: a piece longer than a tile");
        }
    }
}
