//! Where rows of O and of the LSE go.

use ptx::{Builder, F32, Global, R32};
use tile::{AccTile, BulkStore, Consumer, RowRange, WorkTile, store_fragments_at, store_lse_at};

use super::emit::Forward;
use crate::forward::contract::stepped;

impl Forward<'_> {
    /// The warp's first row, and one past the last that is stored.
    pub(super) fn row_limits(&self, k: &mut Builder, consumer: &Consumer, rows: &RowRange) -> (R32, R32) {
        let first = k.mad(consumer.threads.row_warp, 16, rows.first);
        (first, k.mul(self.params.seq_q, rows.heads))
    }

    /// Stores the warp's rows of O.
    pub(super) fn store(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        rows: &RowRange,
        o: &AccTile,
    ) {
        let limits = self.row_limits(k, consumer, rows);
        let place = |k: &mut Builder, row: R32| self.place(k, tile, rows, row);
        let store = self.plan.row_store(self.problem);
        store_fragments_at(k, &consumer.threads, self.half, o, limits, place, store);
    }

    /// The same by TMA.
    pub(super) fn store_bulk(
        &self,
        k: &mut Builder,
        bulk: &BulkStore,
        consumer: &Consumer,
        tile: &WorkTile,
        rows: &RowRange,
        o: &AccTile,
    ) {
        let (first, _) = self.row_limits(k, consumer, rows);
        bulk.store(k, self.half, o, [first.into(), tile.head.into(), tile.batch.into()]);
    }

    /// Stores the LSE of the warp's rows, where it is wanted.
    pub(super) fn store_lse(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        rows: &RowRange,
        lse: &[F32],
    ) {
        let Some(start) = self.params.lse else { return };
        let limits = self.row_limits(k, consumer, rows);
        let to = |k: &mut Builder, row: R32| {
            let [head, position] = head_and_position(k, tile, rows, row);
            let before = k.mad(tile.batch, self.problem.heads_q as u32, head);
            let index = k.mul_wide_u(before, self.params.seq_q);
            let position = k.zext(position);
            let index = k.add(index, position);
            Global { base: k.mad(index, 4, start.base), offset: start.offset }
        };
        store_lse_at(k, &consumer.threads, lse, limits, to);
    }

    /// Where a row of O begins.
    pub(super) fn place(&self, k: &mut Builder, tile: &WorkTile, rows: &RowRange, row: R32) -> Global {
        let p = &self.params;
        let [head, position] = head_and_position(k, tile, rows, row);
        let [batch, head, position] = [tile.batch, head, position].map(|n| k.zext(n));
        let to = k.mad(batch, p.out_batch_bytes, p.out.base);
        let to = k.mad(head, p.out_head_bytes, to);
        let row_bytes = stepped(self.problem.seq_q, self.problem.out.row);
        Global { base: k.mad(position, row_bytes, to), offset: p.out.offset }
    }
}

/// The query head of a tile's row, and its position in the sequence.
fn head_and_position(k: &mut Builder, tile: &WorkTile, rows: &RowRange, row: R32) -> [R32; 2] {
    if rows.heads == 1 {
        return [tile.head, row];
    }
    let position = rows.position(k, row);
    let before = k.mul(position, rows.heads);
    let in_group = k.sub(row, before);
    [k.mad(tile.head, rows.heads, in_group), position]
}
