//! Keys and values in pages of a pool. A tensor map sees a page as a batch entry, and a block of keys is
//! loaded in boxes of rows of one page.
//!
//! The rows of a page and the keys of a block have a largest common divisor, which is the number of rows of a
//! box: a block is loaded in one box if it divides a page, and in boxes of whole pages if pages divide it.
//! Each box needs a number from the page table. The producer reads the numbers of a block before it waits
//! for the block's stage, which hides their latency.

use problem::{Problem, Tensor};
use ptx::{Builder, CmpOp, R32, Src, TensorMapPtr};
use tile::{PipelineState, RowPages, SwizzledTile, TileRing, WorkTile, divide};

use super::memory::Forward;
use super::plan::{WgmmaPlan, boxes, common_divisor};
use crate::PlanError;

/// The largest number of boxes of a block: the producer holds a page number for each.
const MOST_BOXES: u32 = 16;
/// Registers of a producer thread beside two consumers: the page numbers of a block, and the place of the
/// next tile while it searches for it. With three consumers, their blocks need fewer.
const PAGING_REGISTERS: u32 = 56;
/// Rows of the swizzle atom, which a box must not cut.
const ATOM_ROWS: u32 = 8;

impl WgmmaPlan {
    /// Checks that tensor maps can load keys and values in pages, if they lie in pages.
    pub(super) fn check_pages(&self, problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        let Some(pages) = problem.storage.pages() else { return Ok(()) };
        let refuse = |what: &str, value: &str, accepted: &str| {
            let accepted = format!("{accepted} with keys in pages");
            Err(PlanError::unsupported(family, what, value, accepted))
        };
        if !pages.rows.is_multiple_of(ATOM_ROWS as usize) {
            return refuse("page_size", &pages.rows.to_string(), "multiples of 8");
        }
        if problem.dtypes.has_fp8() {
            return refuse("types", &problem.dtypes.to_string(), "16-bit inputs");
        }
        // Boxes would begin within pages.
        if problem.lengths.left_padded {
            return refuse("left padding", "present", "none");
        }
        if self.cluster > 1 {
            return refuse("cluster", &self.cluster.to_string(), "1");
        }
        let boxes = boxes(pages.rows as u32, self.block_n);
        if boxes > MOST_BOXES {
            let accepted = format!("at most {MOST_BOXES} (block_n {})", self.block_n);
            return refuse("boxes of a block", &boxes.to_string(), &accepted);
        }
        Ok(())
    }

    /// The plan with blocks of as many keys as few boxes hold: blocks of a multiple of 32 keys where pages
    /// have 32 rows or a multiple.
    pub(super) fn fitted_to_pages(mut self, problem: &Problem) -> WgmmaPlan {
        let Some(pages) = problem.storage.pages() else { return self };
        self.cluster = 1;
        if self.consumers == 2 && self.resident_ctas == 1 {
            self.producer_registers = Some(PAGING_REGISTERS);
        }
        let rows = pages.rows as u32;
        let step = common_divisor(rows, 32).max(16);
        let fits = |keys: &u32| keys.is_multiple_of(step) && boxes(rows, *keys) <= MOST_BOXES;
        self.block_n = (1..=self.block_n).rev().find(fits).unwrap_or(step);
        self
    }
}

impl Forward<'_> {
    /// The producer, if it loads pages. ptxas makes of each copy a loop over the lanes that may execute it,
    /// unless it knows that the thread is an elected lane. A block in pages has many copies.
    pub(super) fn produce_pages(&self, k: &mut Builder) {
        let alone = k.elect(1);
        k.if_(alone, |k| self.produce(k));
    }

    /// The pages of the tile's keys, if keys lie in pages.
    pub(super) fn pages(&self, k: &mut Builder, tile: &WorkTile) -> Option<RowPages> {
        Some(self.params.pages?.of_sequence(k, tile.batch, None))
    }

    /// Requests the block of keys or values from key `first` on. `head` is the coordinate of the KV head.
    pub(super) fn request_pages(
        &self,
        k: &mut Builder,
        (ring, at, map): (&TileRing, &PipelineState, TensorMapPtr),
        (tile, pages): (&WorkTile, &RowPages),
        first: R32,
        head: Src<R32>,
    ) {
        let [_, len] = self.lengths(tile);
        let rows = ring.tile.box_rows();
        let first_of =
            |k: &mut Builder, index: u32| if index == 0 { first } else { k.add(first, index * rows) };
        let mut read = |index| {
            let first = first_of(k, index);
            // Entries past the length are not read: a box without keys is loaded from page 0. ptxas would
            // move non-coherent loads behind the wait.
            let entry: R32 = k.mov(0);
            let exists = k.setp_s(CmpOp::Lt, first, len);
            let index = divide(k, first, pages.rows);
            let from = k.index(pages.table, index, 4);
            k.guarded(exists, |k| k.ld_to(entry, from));
            entry
        };
        let entries: Vec<R32> = (0..ring.tile.boxes).map(&mut read).collect();
        let place = |k: &mut Builder, index: u32| {
            let first = first_of(k, index);
            let page = pages.page(k, entries[index as usize]);
            // The row in the page.
            let row = (rows != pages.rows).then(|| {
                let index = divide(k, first, pages.rows);
                let before = k.mul(index, pages.rows);
                k.sub(first, before)
            });
            let Some(page_rows) = self.params.value_batch_rows.filter(|_| ring.tile.ragged) else {
                let page = if self.baked.repeated[Tensor::K.into()].batch { 0.into() } else { page.into() };
                return [row.map_or(0.into(), Src::from), head.clone(), page];
            };
            let left = k.sub(len, first);
            let left = k.max_s(left, 0);
            let left = k.min_s(left, rows);
            let start = match row {
                None => k.mul(page, page_rows),
                Some(row) => k.mad(page, page_rows, row),
            };
            let start_of_box = k.mov(0);
            let [row, end] = SwizzledTile::ragged_at(k, start_of_box, [start, left]);
            [row.into(), head.clone(), end.into()]
        };
        ring.request_boxes(k, at, map, place);
    }
}
