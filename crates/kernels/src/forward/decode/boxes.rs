//! Keys and values in pages, copied by TMA: a tensor map sees a page as a batch entry, and a warp's keys of a
//! block are boxes of rows of one page.

use problem::{Problem, Tensor};
use ptx::{Builder, Pointer, R32, Shared, TensorMapPtr};
use tile::SwizzledTile;

use super::emit::Decode;
use super::line::LineCursor;
use super::plan::{DecodePlan, NAME};
use super::slices::Slice;
use crate::contract::Contract;
use crate::error::accept;
use crate::forward::contract::{check_tensor_map, declare_map};
use crate::forward::lengths::{batch_rows, check_ragged};
use crate::{Arch, Dims, PlanError};

/// Rows of the swizzle atom, which a box must not cut.
const ATOM_ROWS: usize = 8;

/// The tensor map of K or V, and the rows from one page to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageBoxes {
    map: TensorMapPtr,
    page_rows: R32,
}

impl PageBoxes {
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, plan: &DecodePlan) -> [Self; 2] {
        let names = ["k_page_rows", "v_page_rows"];
        let slices = plan.slices(problem);
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

impl DecodePlan {
    /// A warp's tile of a slice, in boxes of rows of one page. Rows of a page beyond the last key may hold
    /// anything, and are loaded as zeros.
    fn boxes(&self, slice: Slice, page_rows: u32) -> SwizzledTile {
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
            let ([pages, heads, ..], strides) = (problem.extents(tensor), problem.strides(tensor));
            let repeats = pages > 1 && strides.batch == 0 || heads > 1 && strides.head == 0;
            accept("stride", 0, !repeats, "other than 0 between pages and heads with TMA")?;
        }
        Ok(())
    }
}

impl Decode<'_> {
    /// Copies the warp's keys and values of a block into a stage, whose mbarrier counts the bytes. Rows
    /// beyond the keys are filled with zeros. `was_read` says whether the lanes have read the stage before.
    pub(super) fn load_boxes(
        &self,
        k: &mut Builder,
        at: &LineCursor,
        boxes: [PageBoxes; 2],
        (stage, barrier, was_read): (R32, Shared, bool),
    ) {
        let [_, limit] = self.rows_of_warp(k, at);
        let page_rows = self.baked.pages.unwrap_or(1);
        let parts: Vec<_> = (boxes.iter())
            .zip(self.slices)
            .map(|(boxes, slice)| {
                let tile = self.plan.boxes(slice, page_rows);
                let places = (0..tile.boxes).map(|i| self.place_of_box(k, boxes, &tile, (i, limit)));
                let places: Vec<_> = places.collect();
                let column = match self.plan.dim_warps {
                    1 => k.mov(0),
                    _ => k.mad(self.part, slice.columns, slice.first),
                };
                (tile, boxes.map, column, places)
            })
            .collect();
        let tiles = self.ring.tiles(k, stage);
        let elected = k.elect(u32::MAX);
        k.if_(elected, |k| {
            if was_read {
                k.fence_proxy_async_shared();
            }
            k.mbarrier_arrive_expect_tx(barrier, self.ring.stage_bytes);
            for ((tile, map, first, places), to) in parts.iter().zip(tiles) {
                for (index, &[row, end]) in (0..).zip(places) {
                    let to = to.at((index * tile.box_rows() * tile.row_bytes()).into());
                    for panel in 0..tile.panels() {
                        let to = to.at((panel * tile.panel_bytes()).into());
                        let column = k.add(*first, panel * tile.panel());
                        let place = [column.into(), row.into(), at.head.into(), end.into()];
                        tile.load_ragged(k, to, *map, place, barrier);
                    }
                }
            }
        });
    }

    /// The coordinates of a box: those of the page and the row that a lane has found for the first row of the
    /// box.
    fn place_of_box(
        &self,
        k: &mut Builder,
        boxes: &PageBoxes,
        tile: &SwizzledTile,
        (index, limit): (u32, R32),
    ) -> [R32; 2] {
        let before = index * tile.box_rows();
        let [page, row] = self.ring.next.map(|next| k.shfl_idx(next, before));
        let left = k.sub(limit, before);
        let left = k.max_s(left, 0);
        let left = k.min_s(left, tile.box_rows());
        let start = k.mad(page, boxes.page_rows, row);
        let zero = k.mov(0);
        SwizzledTile::ragged_at(k, zero, [start, left])
    }
}
