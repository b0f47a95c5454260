//! The producer warp, which requests the blocks of keys, and the loads of the queries.

use problem::Tensor;
use ptx::{Builder, CmpOp, Pointer, R32, SpecialReg};
use tile::{PipelineState, SwizzledTile, WARPGROUP_THREADS};

use super::Warpgroups;
use crate::forward::decode::DecodePlan;
use crate::forward::decode::boxes::PageBoxes;
use crate::forward::decode::form::{PANEL, PART, PARTS, STAGES};
use crate::forward::decode::line::LineCursor;

impl Warpgroups<'_> {
    /// Requests `left` blocks from the one under the cursor on, each into the next stage when both warpgroups
    /// have released it.
    pub(super) fn produce(&self, k: &mut Builder, boxes: PageBoxes, at: &LineCursor, left: R32) {
        let (at, left) = (at.owned(k), k.mov(left));
        let tile = DecodePlan::part_of_block(self.tiles.baked.pages);
        let stage = PipelineState::producer(k, STAGES);
        let next = [k.mov(0), k.mov(0)];
        self.find_next(k, &at, &tile, next);
        k.do_while(|k| {
            let origin = self.origin(k, &at);
            let limit = k.sub(at.entry.kv.len, origin);
            let head = at.head;
            let released = self.released(k, stage.stage);
            k.mbarrier_wait_parity(released, stage.parity);
            let number = k.add(stage.stage, 1);
            let to = self.tile_at(k, number);
            let filled = self.filled(k, stage.stage);
            for part in 0..PARTS {
                let barrier = filled.at(part);
                let elected = k.elect(u32::MAX);
                k.if_(elected, |k| k.mbarrier_arrive_expect_tx(barrier, PART.bytes()));
                let index: R32 = k.mov(0);
                k.do_while(|k| {
                    k.nounroll();
                    let [row, end] = self.place_of_box(k, (&tile, boxes), next, (index, limit));
                    let to = k.shared_index(to, index, tile.box_rows() * tile.row_bytes());
                    let elected = k.elect(u32::MAX);
                    k.if_(elected, |k| {
                        for panel in 0..tile.panels() {
                            let to = to.at((part * PART.bytes() + panel * tile.panel_bytes()).into());
                            let column = part * PART.columns + panel * SwizzledTile::PANEL;
                            let place = [column.into(), row.into(), head.into(), end.into()];
                            tile.load_ragged(k, to, boxes.map, place, barrier);
                        }
                    });
                    k.add_to(index, index, 1);
                    k.setp_u(CmpOp::Lt, index, tile.boxes)
                });
            }
            stage.advance(k);
            k.sub_to(left, left, 1);
            self.tiles.line.advance(k, &at);
            self.find_next(k, &at, &tile, next);
            k.setp_u(CmpOp::Ne, left, 0)
        });
    }

    /// Finds the page, or the batch entry, and the row there of the box of each lane's number. The entry of
    /// the page table arrives while the warp waits for a stage. Boxes beyond the keys stand for the last row,
    /// which is in the page table; they have no rows.
    fn find_next(&self, k: &mut Builder, at: &LineCursor, tile: &SwizzledTile, next: [R32; 2]) {
        let origin = self.origin(k, at);
        let row = k.mad(self.tiles.threads.lane, tile.box_rows(), origin);
        let place = self.place_of_row(k, at, row);
        for (to, from) in next.into_iter().zip(place) {
            k.mov_to(to, from);
        }
    }

    /// The coordinates of a box: those of the page and the row that a lane has found. `limit` is the number
    /// of keys from the first one of the block on.
    fn place_of_box(
        &self,
        k: &mut Builder,
        (tile, boxes): (&SwizzledTile, PageBoxes),
        next: [R32; 2],
        (index, limit): (R32, R32),
    ) -> [R32; 2] {
        let place = next.map(|next| k.shfl_idx(next, index));
        let before = k.mul(index, tile.box_rows());
        let left = k.sub(limit, before);
        boxes.coordinates(k, tile, place, left)
    }

    /// Requests the queries of the tile under the cursor, four threads of the consumers for each row. Rows
    /// that do not exist are copies of the last one.
    pub(super) fn request_queries(&self, k: &mut Builder, at: &LineCursor) {
        let thread = k.special(SpecialReg::TidX);
        let thread = k.sub(thread, WARPGROUP_THREADS);
        let rows = self.tiles.rows(k, at);
        let in_tile = k.shr_u(thread, 2);
        let row = k.add(rows.first, in_tile);
        let all = k.mul(rows.seq_q, rows.heads);
        let last = k.sub(all, 1);
        let row = k.min_u(row, last);
        let [head, position] = rows.head_and_position(k, at.head, row);
        let entry = self.tiles.entry_of_queries(k, at);
        let position = at.entry.q.row(k, position);
        let from = self.tiles.row_of(k, Tensor::Q, [entry, head, position]);
        let chunk = k.and(thread, 3);
        let from = k.index(from, chunk, 16);
        let to = k.shared_index(self.shared, in_tile, SwizzledTile::ROW_BYTES);
        let in_eight = k.and(in_tile, 7);
        // The thread's chunks of a panel are `chunk` and `chunk + 4`, permuted by the row.
        let places = [0, 4].map(|more| {
            let chunk = k.add(chunk, more);
            let chunk = k.xor(chunk, in_eight);
            k.shared_index(to, chunk, 16)
        });
        for panel in 0..PARTS * PART.panels() {
            for (half, place) in (0..).zip(places) {
                let to = place.at((panel * PANEL.bytes()).into());
                k.cp_async(to, from.at((panel * SwizzledTile::ROW_BYTES + half * 64).into()), 16, None);
            }
        }
        k.cp_async_commit();
    }
}
