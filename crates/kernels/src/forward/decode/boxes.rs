//! Keys and values in pages, copied by TMA: a tensor map sees a page as a batch entry, and a warp's keys of a
//! block are boxes of rows of one page.

use problem::{Problem, Tensor};
use ptx::{Builder, R32, TensorMapPtr};
use tile::SwizzledTile;

use super::plan::{DecodePlan, NAME, ProductUnit};
use super::slices::Slice;
use crate::contract::Contract;
use crate::error::accept;
use crate::forward::contract::{check_tensor_map, declare_map};
use crate::forward::lengths::{batch_rows, check_ragged};
use crate::{Arch, Dims, PlanError};

/// Rows of the swizzle atom, which a box must not cut.
pub(super) const ATOM_ROWS: usize = 8;

/// The tensor map of K or V, and the rows from one page to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageBoxes {
    pub map: TensorMapPtr,
    pub page_rows: R32,
}

impl PageBoxes {
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, plan: &DecodePlan) -> [Self; 2] {
        let names = ["k_page_rows", "v_page_rows"];
        let slices = plan.slices(problem);
        if plan.products == ProductUnit::Warpgroup {
            let tile = DecodePlan::part_of_block(problem.storage.pages().map(|pages| pages.rows as u32));
            let map = declare_map(k, c, problem, (Tensor::K, tile));
            return [PageBoxes { map, page_rows: c.u32(k, names[0], batch_rows(problem, Tensor::K) as u32) };
                2];
        }
        std::array::from_fn(|i| {
            let tensor = slices[i].tensor;
            let pages = problem.storage.pages().map_or(1, |pages| pages.rows as u32);
            PageBoxes {
                map: declare_map(k, c, problem, (tensor, plan.boxes(slices[i], pages))),
                page_rows: c.u32(k, names[i], batch_rows(problem, tensor) as u32),
            }
        })
    }
}

impl PageBoxes {
    /// The coordinates of a box whose first row is `row` of `page`, with `left` keys from there on.
    pub fn coordinates(
        &self,
        k: &mut Builder,
        tile: &SwizzledTile,
        [page, row]: [R32; 2],
        left: R32,
    ) -> [R32; 2] {
        let left = k.max_s(left, 0);
        let left = k.min_s(left, tile.box_rows());
        let start = k.mad(page, self.page_rows, row);
        let zero = k.mov(0);
        SwizzledTile::ragged_at(k, zero, [start, left])
    }
}

impl DecodePlan {
    /// A warp's tile of a slice, in boxes of rows of one page. Rows of a page beyond the last key may hold
    /// anything, and are loaded as zeros.
    pub(super) fn boxes(&self, slice: Slice, page_rows: u32) -> SwizzledTile {
        let rows = 1 << page_rows.trailing_zeros().min(self.warp_keys.trailing_zeros());
        let tile = SwizzledTile::new(self.warp_keys, slice.columns).of_bytes(slice.bytes);
        tile.in_boxes(self.warp_keys / rows).ragged(true)
    }

    /// Whether TMA can copy the keys and values, if the plan lets it.
    pub(super) fn check_tma(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        if !self.tma {
            return Ok(());
        }
        accept("sm", arch.sm.into(), arch.sm >= 90, "90 and later with TMA")?;
        let rows = problem.storage.pages().map_or(0, |pages| pages.rows);
        let whole = rows > 0 && rows.is_multiple_of(ATOM_ROWS);
        accept("page_size", rows as u64, whole, "multiples of 8 with family decode and TMA")?;
        // Boxes would begin within pages.
        let padded = problem.lengths.left_padded;
        accept("left padding", padded.into(), !padded, "none with family decode and TMA")?;
        for slice in self.slices(Dims::from(problem)) {
            let bytes = slice.columns * slice.bytes;
            let panels = bytes.is_multiple_of(SwizzledTile::ROW_BYTES);
            accept("bytes of a warp's columns", bytes.into(), panels, "multiples of 128 with TMA")?;
        }
        for tensor in [Tensor::K, Tensor::V] {
            check_tensor_map(problem, tensor, NAME)?;
            check_ragged(problem, tensor, NAME)?;
            check_repeats(problem, tensor)?;
        }
        Ok(())
    }
}

/// Refuses batch entries, pages or heads that repeat: a tensor map has a dimension for each.
pub(super) fn check_repeats(problem: &Problem, tensor: Tensor) -> Result<(), PlanError> {
    let ([pages, heads, ..], strides) = (problem.extents(tensor), problem.strides(tensor));
    let repeats = pages > 1 && strides.batch == 0 || heads > 1 && strides.head == 0;
    if repeats {
        let (stride, accepted) = (format!("{} stride", tensor.name()), "other strides with TMA");
        return Err(PlanError::unsupported(NAME, stride, 0, accepted));
    }
    Ok(())
}
