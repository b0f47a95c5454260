//! The warps' requests of keys and values, a block ahead.

use ptx::{Builder, CmpOp, Global, Pointer, R32, R64, Shared, Src};
use tile::{SwizzledTile, TileCopy};

use super::boxes::PageBoxes;
use super::emit::Decode;
use super::line::LineCursor;
use super::params::TensorStart;
use super::slices::Slice;

impl Decode<'_> {
    /// Requests the first `stages − 1` blocks, the first of which `find_next` has found.
    pub(super) fn request_first(&self, k: &mut Builder, ahead: &LineCursor, to_load: R32) {
        for stage in 0..self.tiles.plan.stages - 1 {
            let offset = k.mov(stage * self.ring.stage_bytes);
            self.request(k, ahead, to_load, (offset, Some(stage)));
        }
    }

    /// Requests a block into the stage before `stage`, which has been read.
    pub(super) fn request_next(&self, k: &mut Builder, ahead: &LineCursor, to_load: R32, stage: R32) {
        let free = self.ring.before(k, stage);
        self.request(k, ahead, to_load, (free, None));
    }

    /// Requests the warp's keys and values of a block into a stage, if blocks (or pieces) are left to load,
    /// as one group of copies, and advances to the next block. `number` is that of the stage; `None` for the
    /// stage before the one that is read.
    fn request(&self, k: &mut Builder, at: &LineCursor, to_load: R32, (stage, number): (R32, Option<u32>)) {
        let some = k.setp_u(CmpOp::Ne, to_load, 0);
        k.if_(some, |k| {
            match self.tiles.params.boxes.zip(self.ring.barrier(k, number)) {
                None => self.load(k, at, stage),
                Some((boxes, barrier)) => {
                    self.load_boxes(k, at, boxes, (stage, barrier, number.is_none()));
                }
            }
            let ends = self.tiles.plan.piece.map(|_| self.tiles.line.ends_piece(k, at));
            self.tiles.line.advance(k, at);
            match ends {
                None => k.sub_to(to_load, to_load, 1),
                Some(ends) => k.guarded(ends, |k| k.sub_to(to_load, to_load, 1)),
            }
            self.find_next(k, at);
        });
        if self.tiles.params.boxes.is_none() {
            k.cp_async_commit();
        }
    }

    /// Copies the warp's keys and values of a block. Rows beyond the keys are filled with zeros.
    fn load(&self, k: &mut Builder, at: &LineCursor, stage: R32) {
        let [first, limit] = self.rows_of_warp(k, at);
        let tiles = self.ring.tiles(k, stage);
        let whole = k.setp_s(CmpOp::Ge, limit, self.tiles.plan.copied_keys());
        let load = |k: &mut Builder, limit: Option<R32>| {
            for (to, (slice, copy)) in tiles.into_iter().zip(&self.ring.copies) {
                let to = self.own_keys(k, to, *slice);
                match self.tiles.params.pages {
                    None => self.load_strided(k, (*slice, copy, to), at, (first, limit)),
                    Some(_) => self.load_paged(k, (*slice, copy, to), at, limit),
                }
            }
        };
        k.if_else(whole, |k| load(k, None), |k| load(k, Some(limit)));
    }

    /// Copies the warp's keys and values of a block into a stage, whose mbarrier counts the bytes. Rows
    /// beyond the keys are filled with zeros. `was_read` says whether the lanes have read the stage before.
    fn load_boxes(
        &self,
        k: &mut Builder,
        at: &LineCursor,
        boxes: [PageBoxes; 2],
        (stage, barrier, was_read): (R32, Shared, bool),
    ) {
        let [_, limit] = self.rows_of_warp(k, at);
        let page_rows = self.tiles.baked.pages.unwrap_or(1);
        let parts: Vec<_> = (boxes.iter())
            .zip(self.slices)
            .map(|(boxes, slice)| {
                let tile = self.tiles.plan.boxes(slice, page_rows);
                let places = (0..tile.boxes).map(|i| self.place_of_box(k, boxes, &tile, (i, limit)));
                let places: Vec<_> = places.collect();
                let column = match self.tiles.plan.dim_warps {
                    1 => k.mov(0),
                    _ => k.mad(self.tiles.part, slice.columns, slice.first),
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
        let place = self.ring.next.map(|next| k.shfl_idx(next, before));
        let left = k.sub(limit, before);
        boxes.coordinates(k, tile, place, left)
    }

    /// Copies rows at strides, the first of which is `first`.
    fn load_strided(
        &self,
        k: &mut Builder,
        (slice, copy, to): (Slice, &TileCopy, Shared),
        at: &LineCursor,
        (first, limit): (R32, Option<R32>),
    ) {
        let zero = k.mov(0);
        let head = self.row_at(k, slice, at, [at.batch, zero]);
        let row = at.entry.kv.row(k, first);
        let from = copy.start(k, head, row);
        copy.load(k, to, from, limit);
    }

    /// Copies rows in pages. Each lane has computed the address of one row. If the copies of a pass always
    /// begin in one page, the lanes take the address of the page's first row of the tile.
    fn load_paged(
        &self,
        k: &mut Builder,
        (slice, copy, to): (Slice, &TileCopy, Shared),
        at: &LineCursor,
        limit: Option<R32>,
    ) {
        let own = self.row_at(k, slice, at, self.ring.next);
        let row_bytes = self.tiles.baked.row_bytes(slice.tensor);
        let together = self.rows_together(at);
        let mut begun: Option<(u32, Global)> = None;
        copy.load_from(k, to, limit, |k, first, row| {
            if together < copy.rows_at_once() {
                let lane = if first == 0 { row } else { k.add(row, first) };
                return of_lane(k, own, lane);
            }
            let begin = first / together * together;
            let from = match begun {
                Some((of, from)) if of == begin => from,
                _ => {
                    let from = of_lane(k, own, begin);
                    let row = k.zext(row);
                    Global { base: k.mad(row, row_bytes, from.base), ..from }
                }
            };
            begun = Some((begin, from));
            k.advance(from, i64::from(first - begin).wrapping_mul(row_bytes))
        });
    }

    /// Rows of a warp's tile that always lie in one page, a power of two.
    fn rows_together(&self, at: &LineCursor) -> u32 {
        match (self.tiles.params.pages, at.entry.kv.start) {
            (Some(pages), None) => (1 << pages.rows().trailing_zeros()).min(self.tiles.plan.copied_keys()),
            _ => 1,
        }
    }

    /// The first row of a block that the warp loads, and the number of rows from there to the end of the
    /// sequence.
    fn rows_of_warp(&self, k: &mut Builder, at: &LineCursor) -> [R32; 2] {
        let origin = k.mul(at.block, self.tiles.plan.block_n());
        let first = match self.tiles.plan.dim_warps {
            1 => k.mad(self.tiles.part, self.tiles.plan.warp_keys, origin),
            _ if self.tiles.plan.tiles() == 1 => origin,
            _ => k.mad(self.tiles.threads.row_warp, self.tiles.plan.copied_keys(), origin),
        };
        [first, k.sub(at.entry.kv.len, first)]
    }

    /// Finds the place of the lane's row in the block to request next.
    pub(super) fn find_next(&self, k: &mut Builder, at: &LineCursor) {
        let Some(table) = self.tiles.params.pages else { return };
        let [first, _] = self.rows_of_warp(k, at);
        let row = k.add(first, self.tiles.threads.lane);
        // Rows beyond the keys stand for the last row, which is in the page table; they are not read.
        let [row, past] = [row, at.entry.kv.len].map(|row| at.entry.kv.row(k, row));
        let past = k.max_s(past, 1);
        let last = k.sub(past, 1);
        let row = k.min_s(row, last);
        let place = table.of_sequence(k, at.batch, None).place(k, row);
        for (to, from) in self.ring.next.into_iter().zip(place) {
            k.mov_to(to, from);
        }
    }

    /// The address of the warp's part of a row of the KV head: `place` is the row's batch entry or page, and
    /// its index there.
    fn row_at(&self, k: &mut Builder, slice: Slice, at: &LineCursor, place: [R32; 2]) -> Global {
        let tensor = slice.tensor;
        let TensorStart { start, batch_bytes, head_bytes } = self.tiles.params.tensors[tensor.into()];
        let [head, entry, row] = [at.head, place[0], place[1]].map(|n| k.zext(n));
        let of_head = k.mad(head, head_bytes, start.base);
        let of_entry = k.mad(entry, batch_bytes, of_head);
        let row = Global { base: k.mad(row, self.tiles.baked.row_bytes(tensor), of_entry), ..start };
        self.in_row(k, row, slice)
    }

    /// The first of the keys in a tile that the warp copies.
    fn own_keys(&self, k: &mut Builder, tile: Shared, slice: Slice) -> Shared {
        if self.tiles.plan.tiles() == 1 {
            return tile;
        }
        let pitch = self.tiles.plan.layout(slice).pitch();
        k.shared_index(tile, self.tiles.threads.row_warp, self.tiles.plan.copied_keys() * pitch)
    }

    /// The warp's first element of a slice in a row of the tensor, or in a row of Q, whose columns are those
    /// of K.
    pub(super) fn in_row(&self, k: &mut Builder, row: Global, slice: Slice) -> Global {
        if self.tiles.plan.dim_warps == 1 {
            return row;
        }
        k.index(row, self.tiles.part, slice.columns * slice.bytes).at((slice.first * slice.bytes).into())
    }
}

/// The address that lane `lane` holds.
fn of_lane(k: &mut Builder, own: Global, lane: impl Into<Src<R32>>) -> Global {
    let lane = k.mov(lane);
    let high = k.shr_u(own.base, 32);
    let [low, high] = [own.base, high].map(|half: R64| {
        let half = k.trunc(half);
        let half = k.shfl_idx(half, lane);
        k.zext(half)
    });
    let high = k.shl(high, 32);
    Global { base: k.or(low, high), ..own }
}
