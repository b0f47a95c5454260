//! A tile of keys of a CTA, and the tiles of query rows that it visits.

use attend::{Bound, KeyBand, RowRange, Sequence, SequenceRows};
use problem::Tensor;
use ptx::{Builder, CmpOp, Pred, R32, Src};
use tile::{SwizzledTile, WorkTile, divide};

use super::emit::Main;
use super::parts::KeyGradients;
use super::plan::LOADED;

/// The tile of keys that a CTA computes.
pub(super) struct KeyTile<'m> {
    pub main: &'m Main<'m>,
    /// Batch entry, KV head and tile of keys.
    pub at: [R32; 3],
    /// The part of the tile's query rows, if there are several.
    pub part: Option<R32>,
    /// The rows of the batch entry; `None` if it has all rows of the tensors.
    pub sequence: Option<Sequence>,
    /// The number of the batch entry's first tile of query rows, if queries are packed.
    first_tile: Option<R32>,
    /// The keys of the tile. Queries and keys have changed places.
    pub keys: RowRange,
    /// The band of queries that a key sees.
    pub band: KeyBand,
    /// The tiles of query rows that the keys see, in each head.
    pub bound: Bound,
}

/// The position of a tile of query rows among those that the CTA visits: all tiles of the first head of the
/// group, then those of the next. At the end, `head` is the size of the group.
#[derive(Clone, Copy)]
pub(super) struct Visit {
    pub head: R32,
    pub tile: R32,
}

impl<'m> KeyTile<'m> {
    pub fn new(k: &mut Builder, main: &'m Main<'m>, tile: &WorkTile) -> KeyTile<'m> {
        let (params, sizes) = (&main.params, main.sizes);
        let (head, part) = match params.gradients {
            KeyGradients::Whole(_) => (tile.head, None),
            KeyGradients::Parts(parts) => {
                let head = parts.parts.divide(k, tile.head);
                let before = k.mul(head, parts.parts.number);
                (head, Some((k.sub(tile.head, before), parts.parts)))
            }
        };
        let at = [tile.batch, head, tile.row_block];
        let sequence = tile.spans.map(|spans| {
            let [kv, q] =
                [spans.rows, spans.reduced].map(|[start, len]| SequenceRows { start: Some(start), len });
            Sequence { batch: tile.batch, q, kv }
        });
        let [seq_q, seq_kv] = match sequence {
            None => [params.seq_kv, params.seq_q],
            Some(sequence) => [sequence.kv.len, sequence.q.len],
        };
        // The number of the first tile in `RowTiles` (`Lengths::tile`).
        let packed = params.lengths.and_then(|lengths| lengths.q.packed);
        let first_tile = packed.zip(sequence).zip(tile.spans).map(|((_, sequence), spans)| {
            let before = divide(k, spans.reduced[0], sizes.rows);
            k.add(before, sequence.batch)
        });
        let first = k.mul(tile.row_block, sizes.keys());
        let keys = RowRange { first, rows: sizes.keys(), seq_q, seq_kv, heads: 1 };
        let band = params.band.transposed(k);
        // Rows beyond the queries have probabilities of 0, so no mask needs to hide them.
        let bound = Bound::new(k, &band, &keys, sizes.rows, true);
        let bound = match part {
            None => bound,
            Some((part, parts)) => bound.divided(k, part, parts),
        };
        let part = part.map(|(part, _)| part);
        KeyTile { main, at, part, sequence, first_tile, keys, band, bound }
    }

    /// The first visit.
    pub fn first_visit(&self, k: &mut Builder) -> Visit {
        let tile = k.mov(self.bound.from());
        let some = k.setp_s(CmpOp::Lt, tile, self.bound.end);
        Visit { head: k.selp(0, self.group_size(), some), tile }
    }

    /// Whether there is the visit.
    pub fn is_visit(&self, k: &mut Builder, visit: Visit) -> Pred {
        k.setp_u(CmpOp::Lt, visit.head, self.group_size())
    }

    /// Whether another visit follows a visit.
    pub fn is_followed(&self, k: &mut Builder, visit: Visit) -> Pred {
        let next = k.add(visit.tile, 1);
        let in_head = k.setp_s(CmpOp::Lt, next, self.bound.end);
        let last = self.group_size() - 1;
        if last == 0 {
            return in_head;
        }
        let in_group = k.setp_u(CmpOp::Lt, visit.head, last);
        k.or_pred(in_head, in_group)
    }

    /// Runs `visits` from the first visit, if there is one.
    pub fn if_visited(&self, k: &mut Builder, visits: impl FnOnce(&mut Builder, Visit)) {
        let visit = self.first_visit(k);
        let some = self.is_visit(k, visit);
        k.if_(some, |k| visits(k, visit));
    }

    /// Moves to the next visit.
    pub fn advance(&self, k: &mut Builder, Visit { head, tile }: Visit) {
        k.add_to(tile, tile, 1);
        let ends = k.setp_s(CmpOp::Ge, tile, self.bound.end);
        k.selp_to(tile, self.bound.from(), tile, ends);
        k.guarded(ends, |k| k.add_to(head, head, 1));
    }

    /// The batch entry, query head and tile of a visit in the values between kernels.
    pub fn place(&self, k: &mut Builder, visit: Visit) -> [R32; 3] {
        let [batch, head, _] = self.at;
        let head = k.mad(head, self.group_size(), visit.head);
        match self.first_tile {
            None => [batch, head, visit.tile],
            Some(first) => [k.mov(0), head, k.add(first, visit.tile)],
        }
    }

    /// The coordinates in a tensor map of the batch entry's rows from `first` on. Heads and batch entries
    /// with stride 0 count as one.
    pub fn coordinates(&self, k: &mut Builder, tensor: Tensor, head: R32, first: R32) -> [Src<R32>; 3] {
        let ([batch, ..], repeated) = (self.at, self.main.baked.repeated[tensor.into()]);
        let head = if repeated.head { 0.into() } else { head.into() };
        let batch_rows = LOADED.into_iter().zip(self.main.params.batch_rows).find(|&(of, _)| of == tensor);
        let ragged = batch_rows.and_then(|(_, rows)| rows).zip(self.sequence);
        let Some((batch_rows, sequence)) = ragged else {
            return [first.into(), head, if repeated.batch { 0.into() } else { batch.into() }];
        };
        let rows = sequence.side(tensor);
        let start = match rows.start {
            None => k.mul(batch, batch_rows),
            Some(start) => k.mad(batch, batch_rows, start),
        };
        let [row, end] = SwizzledTile::ragged_at(k, first, [start, rows.len]);
        [row.into(), head, end.into()]
    }

    fn group_size(&self) -> u32 {
        self.main.baked.group_size()
    }
}

impl Main<'_> {
    /// The tile of keys of a CTA that computes one.
    pub fn own_tile(&self, k: &mut Builder) -> KeyTile<'_> {
        let tile = self.schedule.first_tile(k);
        KeyTile::new(k, self, &tile)
    }
}
