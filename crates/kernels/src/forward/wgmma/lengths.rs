//! Row positions in tensors whose batch entries have different lengths.

use ptx::{Builder, R32, Src};
use tile::{SwizzledTile, WorkTile};

use super::memory::Forward;

impl Forward<'_> {
    /// The numbers of queries and of keys in the tile's batch entry.
    pub(super) fn lengths(&self, tile: &WorkTile) -> [R32; 2] {
        match tile.spans {
            None => [self.params.seq_q, self.params.seq_kv],
            Some(spans) => [spans.rows[1], spans.reduced[1]],
        }
    }

    /// The row of Q and O of a position in the tile's batch entry.
    pub(super) fn row_of_sequence(&self, k: &mut Builder, tile: &WorkTile, position: R32) -> R32 {
        tile.spans.map_or(position, |spans| k.add(position, spans.rows[0]))
    }

    /// The coordinates for loading keys or values from key `first` on. `[head, batch]` are the coordinates of
    /// the KV head. Keys beyond the sequence's end are masked, but a NaN in a value, times a weight of 0,
    /// would reach O: therefore values beyond the end are loaded as zeros (`ragged`).
    pub(super) fn key_place(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        ragged: bool,
        first: R32,
        [head, batch]: [Src<R32>; 2],
    ) -> [Src<R32>; 3] {
        let Some(spans) = tile.spans else { return [first.into(), head, batch] };
        match self.params.value_batch_rows.filter(|_| ragged) {
            None => [k.add(first, spans.reduced[0]).into(), head, batch],
            Some(batch_rows) => ragged_place(k, tile.batch, batch_rows, spans.reduced, first, head),
        }
    }

    /// The coordinates for storing rows of O from position `first` on.
    pub(super) fn out_place(&self, k: &mut Builder, tile: &WorkTile, first: R32) -> [Src<R32>; 3] {
        match (tile.spans, self.params.out_batch_rows) {
            (Some(spans), Some(batch_rows)) => {
                ragged_place(k, tile.batch, batch_rows, spans.rows, first, tile.head.into())
            }
            _ => [first.into(), tile.head.into(), tile.batch.into()],
        }
    }

    /// Batch index and row of the LSE of a position, and the number of rows of a head. Packed queries have
    /// one batch index.
    pub(super) fn lse_place(&self, k: &mut Builder, tile: &WorkTile, position: R32) -> ([R32; 2], R32) {
        let row = self.row_of_sequence(k, tile, position);
        match self.params.lengths {
            None => ([tile.batch, row], self.params.seq_q),
            Some(lengths) if lengths.q.packed.is_none() => ([tile.batch, row], lengths.q.longest),
            Some(lengths) => ([k.mov(0), row], lengths.q.tensor_rows()),
        }
    }
}

/// The coordinates in a ragged tensor map of the rows of a sequence from `first` on.
fn ragged_place(
    k: &mut Builder,
    batch: R32,
    batch_rows: R32,
    [start, len]: [R32; 2],
    first: R32,
    head: Src<R32>,
) -> [Src<R32>; 3] {
    let start = k.mad(batch, batch_rows, start);
    let [row, end] = SwizzledTile::ragged_at(k, first, [start, len]);
    [row.into(), head, end.into()]
}
