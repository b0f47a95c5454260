//! The epilogue: addresses and stores of O and of the LSE.

use attend::{OnlineSoftmax, RowRange, Sinks, store_lse_at};
use ptx::{Builder, F32, Global, R32, Shared};
use tile::{
    AccTile, BulkStore, Consumer, RowStore, SwizzledTile, TileStream, WARPGROUP_ROWS, WarpgroupVote,
    WorkTile, store_fragments_at,
};

use super::consumer::{ConsumerState, ConsumerTile};
use super::launch::Params;
use super::memory::{Forward, TmaOut};
use super::plan::Store;
use crate::forward::before::FinishedRows;
use crate::forward::contract::{half, lse_of_row, out_half, row_of_output};
use crate::forward::descale::Scores;

impl Forward<'_> {
    /// The end of a tile: normalises O and stores O and the LSE. For a shared tile, only the warps that
    /// complete it do so.
    pub(super) fn finish(&self, k: &mut Builder, state: &ConsumerState, at: &WorkTile, tile: &ConsumerTile) {
        let ConsumerState { consumer, main_loop, .. } = state;
        let rows = &tile.rows;
        let bulk = state.bulk.map(|bulk| self.staged(k, bulk, consumer, &main_loop.rings.queries));
        let softmax = tile.softmax.clone().with_output_factor(self.value_descale(k, at));
        let o = softmax.take_sums(k, &main_loop.tiles.o);
        self.spoil_seen(k, &softmax, tile.factor);
        self.if_complete(k, consumer, at, &softmax, &o, |k| {
            let sinks = self.params.sinks;
            let sinks = sinks.map(|start| Sinks::load(k, start, at.head, &consumer.threads, rows, 16));
            let finished = softmax.finish(k, &o, sinks.as_ref()); //      O / l, LSE = m + ln l
            let lse = self.merged(k, consumer, at, rows, &o, finished.lse);
            match &bulk {
                None => self.store(k, consumer, at, rows, &o),
                Some(bulk) => self.store_bulk(k, bulk, consumer, at, rows, &o),
            }
            self.store_lse(k, consumer, at, rows, &lse);
        });
    }

    /// Merges the rows with those of the result from which they continue, and returns their LSE.
    fn merged(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        rows: &RowRange,
        o: &AccTile,
        lse: Vec<F32>,
    ) -> Vec<F32> {
        let Some(before) = &self.params.before else { return lse };
        let limits = self.row_limits(k, consumer, rows);
        let result = FinishedRows { threads: &consumer.threads, o, lse: &lse, limits };
        let of_lse = |k: &mut Builder, row: R32| self.place_of_lse(k, tile, rows, row, before.lse);
        let of_out = |k: &mut Builder, row: R32| self.place(k, tile, rows, row, before.out);
        before.merge(k, self.baked, &result, true, of_lse, of_out)
    }

    /// Runs `finish` on complete results. For a shared tile, only the warps that complete it run `finish`.
    fn if_complete(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        softmax: &OnlineSoftmax,
        o: &AccTile,
        finish: impl FnOnce(&mut Builder),
    ) {
        match self.merge.zip(tile.part) {
            None => finish(k),
            Some((merge, part)) => {
                let complete = merge.join(k, consumer, &part, softmax, o);
                k.if_(complete, finish);
            }
        }
    }

    /// The warp's first row, and one past the last row that it stores.
    fn row_limits(&self, k: &mut Builder, consumer: &Consumer, rows: &RowRange) -> (R32, R32) {
        let first = k.mad(consumer.threads.row_warp, 16, rows.first);
        let limit = k.mul(rows.seq_q, rows.heads);
        let tile_rows = self.plan.tile_rows(self.baked);
        if tile_rows == self.plan.block_m() {
            return (first, limit);
        }
        // The rows of a position that the tile contains only in part belong to the next tile.
        let end = k.add(rows.first, tile_rows);
        (first, k.min_u(limit, end))
    }

    /// Stores the warp's rows of O.
    fn store(&self, k: &mut Builder, consumer: &Consumer, tile: &WorkTile, rows: &RowRange, o: &AccTile) {
        let limits = self.row_limits(k, consumer, rows);
        let (columns, dim) = (8 * o.n_tiles(), self.baked.head_dim_v());
        let before = consumer.threads.part.map(|part| k.mul(part, columns));
        let place = |k: &mut Builder, row: R32| {
            let place = self.place(k, tile, rows, row, self.params.out);
            match before {
                None => place,
                Some(before) => k.index(place, before, self.baked.dims.dtypes.out.bytes() as u32),
            }
        };
        let width = match before {
            Some(before) if 2 * columns > dim => {
                let all = k.mov(dim);
                Some(k.sub(all, before))
            }
            None if columns > dim => Some(k.mov(dim)),
            _ => None,
        };
        let store = if self.baked.chunks_out { RowStore::Chunks } else { RowStore::Pairs };
        store_fragments_at(k, &consumer.threads, out_half(self.baked), o, limits, place, store, width);
    }

    /// The store of a warp's rows of O by TMA, if the plan has one. Where O takes the place of Q, it is the
    /// store from stage 0 of Q.
    pub(super) fn bulk_store(&self, k: &mut Builder, consumer: &Consumer) -> Option<BulkStore> {
        let TmaOut { map, tile, staging } = self.tma_out?;
        let warp = consumer.threads.row_warp;
        let place = match staging {
            Some(first) => k.shared_index(first, warp, tile.bytes()),
            None => self.place_in_queries(k, warp, tile.bytes()),
        };
        Some(BulkStore::new(k, tile, place, map, consumer))
    }

    /// The place of a warp's rows of O, of `bytes` bytes, in stage 0 of Q. The 64 rows of a warpgroup are
    /// contiguous in each panel of Q, and hold the rows of O of four warps, two or one.
    fn place_in_queries(&self, k: &mut Builder, warp: R32, bytes: u32) -> Shared {
        let part = WARPGROUP_ROWS * SwizzledTile::ROW_BYTES;
        let (group, warp) = (k.shr_u(warp, 2), k.and(warp, 3));
        let place = k.shared_index(self.queries.first, group, part);
        let in_part = part / bytes;
        let (panel, number) = (k.shr_u(warp, in_part.ilog2()), k.and(warp, in_part - 1));
        let place = k.shared_index(place, panel, self.queries.tile.panel_bytes());
        k.shared_index(place, number, bytes)
    }

    /// The store of a tile that has ended. Where O takes the place of its Q, a warp writes over rows of Q
    /// that other warps of its warpgroup have read, unless a row of O fills one panel.
    fn staged(
        &self,
        k: &mut Builder,
        bulk: BulkStore,
        consumer: &Consumer,
        queries: &TileStream,
    ) -> BulkStore {
        if self.plan.store != Store::OverQueries {
            return bulk;
        }
        if self.baked.head_dim_v() > SwizzledTile::PANEL {
            WarpgroupVote::new(k, consumer.group).sync(k);
        }
        let ended = queries.previous(k);
        bulk.at_stage(k, &ended, self.queries.tile.bytes())
    }

    /// Stores the warp's rows of O by TMA.
    fn store_bulk(
        &self,
        k: &mut Builder,
        bulk: &BulkStore,
        consumer: &Consumer,
        tile: &WorkTile,
        rows: &RowRange,
        o: &AccTile,
    ) {
        let (first, _) = self.row_limits(k, consumer, rows);
        let to = self.out_place(k, tile, first);
        if self.plan.store == Store::Bulk {
            bulk.wait_until_free(k);
        }
        bulk.store(k, half(self.baked), o, to);
    }

    /// Stores the LSE of the warp's rows, if it is returned.
    fn store_lse(&self, k: &mut Builder, consumer: &Consumer, tile: &WorkTile, rows: &RowRange, lse: &[F32]) {
        let Some(start) = self.params.lse else { return };
        let limits = self.row_limits(k, consumer, rows);
        let to = |k: &mut Builder, row: R32| self.place_of_lse(k, tile, rows, row, start);
        store_lse_at(k, &consumer.threads, lse, limits, to);
    }

    /// The address of the LSE of a row, in an array that begins at `start`.
    fn place_of_lse(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        rows: &RowRange,
        row: R32,
        start: Global,
    ) -> Global {
        let [head, position] = rows.head_and_position(k, tile.head, row);
        let ([batch, row], seq_q) = self.lse_place(k, tile, position);
        lse_of_row(k, self.baked, (start, seq_q), [batch, head, row])
    }

    /// The address of a row of O, in memory that begins at `out`.
    fn place(&self, k: &mut Builder, tile: &WorkTile, rows: &RowRange, row: R32, out: Global) -> Global {
        let Params { out_batch_bytes, out_head_bytes, .. } = self.params;
        let [head, position] = rows.head_and_position(k, tile.head, row);
        let row = self.row_of_sequence(k, tile, position);
        // The batch stride of packed queries is 0.
        let strides = [out_batch_bytes, out_head_bytes];
        row_of_output(k, self.baked, (out, strides), [tile.batch, head, row])
    }
}
