//! The range of KV blocks that a CTA visits, and which of them need a mask.

use ptx::{Builder, CmpOp, Pred, R32, Src};
use tile::{Divisor, divide};

use super::{KeyBand, RowRange};

/// Whether all rows see all keys of a KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coverage {
    /// Every row of the rows that the bounds were made for sees every key: no mask needed.
    Full,
    /// Some rows do not see some keys: the mask is applied.
    Partial,
}

/// The KV blocks that a CTA visits, from the last to the first: partial blocks down to `full_to`, full blocks
/// down to `full_from`, partial blocks down to `from`. Each of the three ranges may be empty. If the band is
/// narrower than a block, no block is full, and `full_from` may exceed `full_to`.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// The lower end of the blocks and of the full blocks; `None` if both are 0.
    pub lower: Option<Lower>,
    /// Every row sees the last key of each block below this one; `None` if that holds for all blocks.
    pub full_to: Option<R32>,
    /// One past the last block of which any row sees a key.
    pub end: R32,
}

/// The lower end of the KV blocks, for a band with a lower bound or for split keys.
#[derive(Clone, Copy, Debug)]
pub struct Lower {
    /// The first block to visit: the first one in which any row sees a key.
    pub from: R32,
    /// The first block whose first key every row sees; `None` if that holds for all blocks from `from` on.
    pub full_from: Option<R32>,
}

impl Bound {
    /// The KV blocks of a band. `divides` states that `block_n` divides `seq_kv`.
    pub fn new(k: &mut Builder, band: &KeyBand, rows: &RowRange, block_n: u32, divides: bool) -> Bound {
        let [by_all, by_any] = rows.keys_seen(k, band);
        let every_block = band.after.is_none() && divides;
        let full_to = (!every_block).then(|| divide(k, by_all, block_n));
        let end = blocks_up(k, by_any, block_n);
        let lower = rows.keys_skipped(k, band).map(|[by_any, by_all]| Lower {
            from: divide(k, by_any, block_n),
            full_from: Some(blocks_up(k, by_all, block_n)),
        });
        Bound { lower, full_to, end }
    }

    /// The bound for a loop that visits at least one block. If no row sees any key, that block is fully
    /// masked.
    #[must_use]
    pub fn at_least_one(self, k: &mut Builder) -> Bound {
        let end = k.max_s(self.end, 1);
        let last = self.lower.map(|_| k.sub(end, 1));
        let lower =
            self.lower.zip(last).map(|(lower, last)| Lower { from: k.min_s(lower.from, last), ..lower });
        Bound { lower, end, ..self }
    }

    /// The blocks of one of `splits` CTAs that divide the keys. The parts are in the order of the keys and
    /// have equal length, except that the last ones may be shorter or empty.
    #[must_use]
    pub fn split(self, k: &mut Builder, index: R32, splits: u32) -> Bound {
        let count = k.sub(self.end, self.from());
        let count = k.max_s(count, 0);
        let up = k.add(count, splits - 1);
        let share = divide(k, up, splits);
        self.part(k, index, share)
    }

    /// Like [`Bound::split`], with the number of CTAs as a launch parameter.
    #[must_use]
    pub fn divided(self, k: &mut Builder, index: R32, splits: Divisor) -> Bound {
        let count = k.sub(self.end, self.from());
        let count = k.max_s(count, 0);
        let up = k.add(count, splits.number);
        let up = k.sub(up, 1);
        let share = splits.divide(k, up);
        self.part(k, index, share)
    }

    /// Part `index` of parts of `share` blocks.
    fn part(self, k: &mut Builder, index: R32, share: R32) -> Bound {
        let from = match self.lower {
            Some(lower) => k.mad(index, share, lower.from),
            None => k.mul(index, share),
        };
        let end = k.add(from, share);
        let end = k.min_s(end, self.end);
        let full_from = self.lower.and_then(|lower| lower.full_from);
        Bound { lower: Some(Lower { from, full_from }), end, ..self }
    }

    /// Whether a block is partial; `None` if every block is full.
    pub fn is_partial(&self, k: &mut Builder, block: R32) -> Option<Pred> {
        let above = self.full_to.map(|full| k.setp_s(CmpOp::Ge, block, full));
        let below = self.lower.and_then(|lower| lower.full_from);
        let below = below.map(|full| k.setp_s(CmpOp::Lt, block, full));
        match (above, below) {
            (Some(above), Some(below)) => Some(k.or_pred(above, below)),
            (one, other) => one.or(other),
        }
    }

    /// The first block to visit.
    pub fn from(&self) -> Src<R32> {
        self.lower.map_or(0.into(), |lower| lower.from.into())
    }
}

fn blocks_up(k: &mut Builder, keys: R32, block_n: u32) -> R32 {
    let up = k.add(keys, block_n - 1);
    divide(k, up, block_n)
}
