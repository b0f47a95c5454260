//! The sequence of KV blocks that a consumer warpgroup visits for a tile.

use ptx::{Builder, CmpOp, R32, Src};

use crate::Coverage;

/// The blocks at the upper end that need a mask.
#[derive(Clone, Copy, Debug)]
pub enum Masked {
    /// None.
    Never,
    /// The first visited block, which is ragged.
    First,
    /// The first visited block, and all blocks from this one on.
    From(R32),
}

/// The KV blocks of a tile, visited downward. There is at least one. Partial blocks come first, then full
/// blocks, then the partial blocks at a lower bound of the band.
#[derive(Clone, Debug)]
pub struct Walk {
    /// The lowest block, which is visited last.
    pub from: Src<R32>,
    /// Blocks below this one need a mask; `None` if all rows of the tile see the keys at the lower end.
    pub full_from: Option<R32>,
    /// One past the last block.
    pub end: R32,
    /// Blocks at the upper end that need a mask.
    pub masked: Masked,
}

impl Walk {
    /// The block that is visited first: the last one.
    pub(super) fn first(&self, k: &mut Builder) -> R32 {
        k.sub(self.end, 1)
    }

    /// Coverage of the first block.
    pub(super) const fn first_coverage(&self) -> Coverage {
        match (self.masked, self.full_from) {
            (Masked::Never, None) => Coverage::Full,
            _ => Coverage::Partial,
        }
    }

    /// Moves `block` down from the first block to each of the other blocks, and runs `visit` there with the
    /// coverage of the block.
    pub(super) fn rest(&self, k: &mut Builder, block: R32, visit: impl Fn(&mut Builder, Coverage)) {
        let step = |k: &mut Builder, coverage: Coverage| {
            k.sub_to(block, block, 1);
            visit(k, coverage);
        };
        let down_to = |k: &mut Builder, last: Src<R32>, coverage: Coverage| {
            k.while_(|k| k.setp_s(CmpOp::Gt, block, last), |k| step(k, coverage));
        };
        let from = || self.from.clone();
        match self.full_from {
            None => {
                if let Masked::From(full) = self.masked {
                    down_to(k, full.into(), Coverage::Partial);
                }
                let more = k.setp_s(CmpOp::Ne, block, from());
                k.if_(more, |k| {
                    k.do_while(|k| {
                        step(k, Coverage::Full);
                        k.setp_s(CmpOp::Ne, block, from())
                    });
                });
            }
            Some(full_from) => {
                if let Masked::From(full) = self.masked {
                    let last = k.max_s(full, from());
                    down_to(k, last.into(), Coverage::Partial);
                }
                let last = k.max_s(full_from, from());
                down_to(k, last.into(), Coverage::Full);
                down_to(k, from(), Coverage::Partial);
            }
        }
    }
}
