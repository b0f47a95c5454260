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

use super::MainLoop;
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

/// The sums of one block, and the rescale of O that is due when they are added.
#[derive(Clone, Debug)]
pub struct BlockOutput {
    /// P V of one block.
    pub(super) sums: AccTile,
    /// Pending factor of O for each of the lane's rows: α of the block's softmax.
    due: Vec<F32>,
}

impl BlockOutput {
    /// Uninitialised registers for 16 rows of `columns` columns.
    pub fn new(k: &mut Builder, columns: u32) -> BlockOutput {
        let sums = AccTile::unset(k, 16, columns);
        let due = (0..sums.lane_rows()).map(|_| k.reg()).collect();
        BlockOutput { sums, due }
    }

    /// Sets the pending factors to 1.
    fn settle(&self, k: &mut Builder) {
        for &due in &self.due {
            k.mov_to(due, 1.0f32);
        }
    }

    /// `o = o · α + P V`.
    fn add_to(&self, k: &mut Builder, o: &AccTile) {
        for (row, &due) in (0..).zip(&self.due) {
            for (total, sum) in o.row(row).zip(self.sums.row(row)) {
                k.mad_to(total, total, due, sum);
            }
        }
        self.settle(k);
    }
}

impl MainLoop {
    /// Sets O to zero.
    pub(super) fn clear_output(&self, k: &mut Builder) {
        self.o.clear(k);
        if let Some(block) = &self.block_output {
            block.settle(k);
        }
    }

    /// Adds the complete P V of a block to O, unless the product adds to O directly.
    pub(super) fn add_output(&self, k: &mut Builder) {
        if let Some(block) = &self.block_output {
            block.add_to(k, &self.o);
        }
    }

    /// Rescales O, at once or when the next block is added.
    pub(super) fn rescale_output(&self, k: &mut Builder, rescale: &DeferredRescale) {
        match &self.block_output {
            None => rescale.apply(k, &self.o),
            Some(block) => rescale.defer(k, &block.due),
        }
    }
}
