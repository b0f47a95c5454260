//! The producer warpgroup, if its threads copy the keys: rows at any place, such as those of small pages.

use problem::Tensor;
use ptx::{Builder, CmpOp, Pointer, R32};
use tile::{PipelineState, SwizzledTile};

use super::Warpgroups;
use crate::forward::decode::form::{PANEL, PART, PARTS, STAGES, TILE_BYTES};
use crate::forward::decode::line::LineCursor;

/// Threads of a row.
const OF_ROW: u32 = 2;
/// Bytes of a copy.
const CHUNK: u32 = 16;

impl Warpgroups<'_> {
    /// Copies `left` blocks from the one under the cursor on, like [`Warpgroups::produce`]. Rows beyond the
    /// keys are filled with zeros.
    pub(super) fn copy_blocks(&self, k: &mut Builder, at: &LineCursor, left: R32) {
        let (at, left) = (at.owned(k), k.mov(left));
        let threads = &self.tiles.threads;
        let row = k.shr_u(threads.index, OF_ROW.ilog2());
        let chunk = k.and(threads.index, OF_ROW - 1);
        let in_eight = k.and(row, 7);
        let of_row = k.shared_index(self.shared, row, SwizzledTile::ROW_BYTES);
        // The thread's chunks of a panel's row, permuted by the row.
        let in_panel: Vec<_> = (0..SwizzledTile::ROW_BYTES / CHUNK)
            .step_by(OF_ROW as usize)
            .map(|more| {
                let chunk = k.add(chunk, more);
                let chunk = k.xor(chunk, in_eight);
                k.shared_index(of_row, chunk, CHUNK)
            })
            .collect();
        let elected = k.setp_u(CmpOp::Eq, threads.lane, 0);
        let stage = PipelineState::producer(k, STAGES);
        let place = [k.mov(0), k.mov(0)];
        self.find_row(k, &at, row, place);
        k.do_while(|k| {
            let origin = self.origin(k, &at);
            let key = k.add(origin, row);
            let exists = k.setp_s(CmpOp::Lt, key, at.entry.kv.len);
            let bytes = k.selp(CHUNK, 0, exists);
            let from = self.tiles.row_of(k, Tensor::K, [place[0], at.head, place[1]]);
            let from = k.index(from, chunk, CHUNK);
            let released = self.released(k, stage.stage);
            k.mbarrier_wait_parity(released, stage.parity);
            let number = k.add(stage.stage, 1);
            for part in 0..PARTS {
                for panel in part * PART.panels()..(part + 1) * PART.panels() {
                    let columns = i64::from(panel * SwizzledTile::ROW_BYTES);
                    for (i, &to) in (0..).zip(&in_panel) {
                        let to = k.shared_index(to, number, TILE_BYTES);
                        let to = to.at((panel * PANEL.bytes()).into());
                        k.cp_async(to, from.at(columns + i * i64::from(OF_ROW * CHUNK)), CHUNK, Some(bytes));
                    }
                }
                k.cp_async_commit();
            }
            self.tiles.line.advance(k, &at);
            self.find_row(k, &at, row, place);
            let filled = self.filled(k, stage.stage);
            for part in 0..PARTS {
                k.cp_async_wait(PARTS - 1 - part);
                k.fence_proxy_async_shared();
                k.warp_sync();
                k.guarded(elected, |k| k.mbarrier_arrive(filled.at(part)));
            }
            stage.advance(k);
            k.sub_to(left, left, 1);
            k.setp_u(CmpOp::Ne, left, 0)
        });
    }

    /// Finds the page, or the batch entry, and the row there of a row of the block under the cursor. Rows
    /// beyond the keys stand for the last one.
    fn find_row(&self, k: &mut Builder, at: &LineCursor, row: R32, next: [R32; 2]) {
        let origin = self.origin(k, at);
        let row = k.add(origin, row);
        let place = self.place_of_row(k, at, row);
        for (to, from) in next.into_iter().zip(place) {
            k.mov_to(to, from);
        }
    }

    /// The page, or the batch entry, and the row there of a row of the sequence under the cursor. Rows beyond
    /// the keys stand for the last one, which is in the page table.
    pub(super) fn place_of_row(&self, k: &mut Builder, at: &LineCursor, row: R32) -> [R32; 2] {
        let past = k.max_s(at.entry.kv.len, 1);
        let last = k.sub(past, 1);
        let row = k.min_s(row, last);
        let row = at.entry.kv.row(k, row);
        match self.tiles.params.pages {
            None => [at.batch, row],
            Some(table) => table.of_sequence(k, at.batch, None).place(k, row),
        }
    }
}
