//! The last round of a persistent kernel: tiles that are fewer than the CTAs, which share them all the same.
//! Their blocks of keys stand in a line, tile after tile, and each CTA takes a piece of it, all pieces as
//! long as one another or longer by one (Stream-K, Osama et al. 2023). A piece is shorter than a tile, so it
//! is a part of one tile or the end of one and the beginning of the next.

use ptx::{Builder, CmpOp, R32};

/// Who computes the tiles that are left when all CTAs have had as many as one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// Some of the CTAs, a tile each, while the others have nothing to do.
    #[default]
    Whole,
    /// All of them, a piece each. Parts of a tile meet in global memory.
    Shared,
}

/// How many tiles there are, and who takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRound {
    /// Tiles in all.
    pub tiles: u64,
    /// Blocks of keys of a tile.
    pub blocks: u64,
    /// CTAs or clusters that take tiles, at least one and no more than there are blocks in all.
    pub takers: u64,
}

impl LastRound {
    /// Tiles that are taken whole: the first.
    pub const fn whole(&self) -> u64 {
        self.tiles / self.takers * self.takers
    }

    /// Tiles that are shared.
    pub const fn shared(&self) -> u64 {
        self.tiles % self.takers
    }

    /// Blocks in the line.
    pub const fn line(&self) -> u64 {
        self.shared() * self.blocks
    }

    /// Blocks of the shorter pieces.
    pub const fn piece(&self) -> u64 {
        self.line() / self.takers
    }

    /// Pieces that have one block more: the first.
    pub const fn longer(&self) -> u64 {
        self.line() % self.takers
    }
}

/// The numbers of a [`LastRound`] in registers.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// Blocks of keys of a tile.
    pub blocks: R32,
    /// Tiles that are taken whole.
    pub whole: R32,
    /// Blocks of the shorter pieces.
    pub piece: R32,
    /// Pieces that have one block more.
    pub longer: R32,
}

impl Shares {
    /// Where the piece of a CTA begins in the line.
    pub(crate) fn start(&self, k: &mut Builder, taker: R32) -> R32 {
        let more = k.min_u(taker, self.longer);
        k.mad(taker, self.piece, more)
    }

    /// Whose piece has a block of the line.
    pub(crate) fn owner(&self, k: &mut Builder, block: R32) -> R32 {
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

/// What a CTA computes of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its lowest block of keys: blocks are visited downward, so the last.
    pub from: R32,
    /// One past its last block.
    pub end: R32,
    /// Which of the shared tiles it belongs to; [`Part::WHOLE`] where it is all of a tile.
    pub(crate) tile: R32,
}

impl Part {
    /// No shared tile's number.
    pub(crate) const WHOLE: i32 = -1;

    /// Blocks of the tile of that number, which may be all of them.
    pub(crate) fn new(k: &mut Builder, shares: &Shares, index: R32, [from, end]: [R32; 2]) -> Part {
        let count = k.sub(end, from);
        let whole = k.setp_u(CmpOp::Eq, count, shares.blocks);
        let tile = k.sub(index, shares.whole);
        Part { from: k.mov(from), end: k.mov(end), tile: k.selp(Part::WHOLE, tile, whole) }
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
            let round = LastRound { tiles, blocks, takers };
            assert_eq!(round.whole() + round.shared(), tiles);
            assert_eq!(round.takers * round.piece() + round.longer(), round.line());
            let longest = round.piece() + u64::from(round.longer() > 0);
            assert!(longest <= blocks, "{round:?}: a piece of three tiles");
        }
    }
}
