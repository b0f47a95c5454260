//! Two-level sums of O: the P V of each block goes to a separate accumulator, which is then added to O in
//! f32.
//!
//! For products of 8-bit inputs, the tensor cores of sm_90 align the products and the accumulator to the
//! largest exponent and keep few bits below it. An accumulator that carries O through all blocks loses the
//! contributions of keys with small weights, and the loss grows with the number of keys. With two levels, the
//! accumulator of the tensor cores holds one block only.

use ptx::{Builder, F32};
use serde::{Deserialize, Serialize};
use tile::AccTile;

use super::main_loop::{Loaded, MainLoop, TileRows};
use crate::DeferredRescale;

/// Where the products P V of successive blocks are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputSums {
    /// In the accumulator of the tensor cores, over all blocks.
    #[default]
    Running,
    /// In the accumulator of the tensor cores over one block, then over all blocks in f32.
    ByBlock,
}

/// The sums of one block, and how they are added to O.
#[derive(Clone, Debug)]
pub struct BlockOutput {
    /// P V of one block.
    pub(super) sums: AccTile,
    addition: Addition,
}

/// How the sums of a block are added to O, with a factor for each of the lane's rows.
#[derive(Clone, Debug)]
enum Addition {
    /// `o = o · α + P V`: the factors are pending rescales of O, α of the block's softmax.
    Rescaling(Vec<F32>),
    /// `o = o + f · P V`: the factors are those of the block's values. O is rescaled at once.
    Descaling(Vec<F32>),
}

impl BlockOutput {
    /// Uninitialised registers for 16 rows of `columns` columns.
    pub fn new(k: &mut Builder, columns: u32) -> BlockOutput {
        let sums = AccTile::unset(k, 16, columns);
        let due = (0..sums.lane_rows()).map(|_| k.reg()).collect();
        BlockOutput { sums, addition: Addition::Rescaling(due) }
    }

    /// Multiplies the sums of each block by the factors of its values ([`crate::ValueFactors`]).
    #[must_use]
    pub fn descaling(self) -> BlockOutput {
        let (Addition::Rescaling(factors) | Addition::Descaling(factors)) = self.addition;
        BlockOutput { addition: Addition::Descaling(factors), ..self }
    }

    /// Sets the pending rescales to 1.
    fn settle(&self, k: &mut Builder) {
        if let Addition::Rescaling(due) = &self.addition {
            for &due in due {
                k.mov_to(due, 1.0f32);
            }
        }
    }

    /// Adds the sums of a block to O.
    fn add_to(&self, k: &mut Builder, o: &AccTile) {
        let (Addition::Rescaling(factors) | Addition::Descaling(factors)) = &self.addition;
        for (row, &factor) in (0..).zip(factors) {
            for (total, sum) in o.row(row).zip(self.sums.row(row)) {
                match self.addition {
                    Addition::Rescaling(_) => k.mad_to(total, total, factor, sum),
                    Addition::Descaling(_) => k.mad_to(total, sum, factor, total),
                }
            }
        }
        self.settle(k);
    }
}

impl MainLoop {
    /// Sets O to zero.
    pub(super) fn clear_output(&self, k: &mut Builder) {
        self.tiles.o.clear(k);
        if let Some(block) = &self.tiles.block_output {
            block.settle(k);
        }
    }

    /// Adds the complete P V of a block to O, unless the product adds to O directly.
    pub(super) fn add_output(&self, k: &mut Builder) {
        if let Some(block) = &self.tiles.block_output {
            block.add_to(k, &self.tiles.o);
        }
    }

    /// Rescales O, at once or when the next block is added.
    pub(super) fn rescale_output(&self, k: &mut Builder, rescale: &DeferredRescale) {
        match self.tiles.block_output.as_ref().map(|block| &block.addition) {
            Some(Addition::Rescaling(due)) => rescale.defer(k, due),
            Some(Addition::Descaling(_)) | None => rescale.apply(k, &self.tiles.o),
        }
    }

    /// Sets the factors of the values whose P V is added next.
    pub(super) fn set_value_factors(&self, k: &mut Builder, factors: &Loaded, rows: &TileRows) {
        let addition = self.tiles.block_output.as_ref().map(|block| &block.addition);
        let loaded = rows.values.zip(factors.of_values.as_ref());
        if let (Some(Addition::Descaling(to)), Some((values, (factor, keys)))) = (addition, loaded) {
            values.set(k, to, *factor, keys, rows.chain.mask);
        }
    }
}
