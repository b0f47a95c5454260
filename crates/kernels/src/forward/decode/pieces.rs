//! The main loop over pieces of keys with fixed ends.

use attend::{FixedMerge, OnlineSoftmax};
use ptx::{Builder, CmpOp, R32};
use tile::AccTile;

use super::emit::{Decode, TileState};
use super::line::LineCursor;
use super::plan::ROWS;

/// The merge of the pieces of a tile that the CTA has computed: each warp has its columns of O.
struct Joined {
    o: AccTile,
    softmax: OnlineSoftmax,
}

impl Decode<'_> {
    /// The pieces of the CTA's share of the line, one after the other. `left` counts the pieces to compute,
    /// `to_load` those to load, and `piece` is the place of the current one on the line.
    pub(super) fn pieces(
        &self,
        k: &mut Builder,
        [at, ahead]: [&LineCursor; 2],
        tile: &TileState,
        (left, to_load, piece): (R32, R32, R32),
    ) {
        let columns = self.tiles.baked.head_dim_v() / self.tiles.plan.warps;
        let joined = Joined { o: AccTile::zero(k, ROWS, columns), softmax: self.tiles.softmax(k) };
        let stage = k.mov(0);
        k.do_while(|k| {
            self.ring.wait(k);
            self.request_next(k, ahead, to_load, stage);
            self.visit(k, at, tile, stage);
            let ends = self.tiles.line.ends_piece(k, at);
            let end = |k: &mut Builder| {
                k.sub_to(left, left, 1);
                self.end_of_piece(k, at, (tile, &joined), (piece, left));
                k.add_to(piece, piece, 1);
            };
            k.if_else(ends, end, |k| k.add_to(at.block, at.block, 1));
            self.ring.advance(k, stage);
            k.setp_u(CmpOp::Ne, left, 0)
        });
    }

    /// Merges the warps, and the piece with the tile's earlier pieces in this CTA. If the next piece belongs
    /// to another tile or another CTA, or if the tile began in another CTA, the result is stored: as O if the
    /// tile is complete, else as a part.
    fn end_of_piece(
        &self,
        k: &mut Builder,
        at: &LineCursor,
        (tile, joined): (&TileState, &Joined),
        (piece, left): (R32, R32),
    ) {
        let done = at.owned(k);
        self.tiles.line.advance(k, at);
        // The warps have read what they merged before.
        if self.tiles.plan.warps > 1 {
            k.bar_sync();
        }
        let (softmax, o) = self.merge_warps(k, tile);
        joined.softmax.merge_piece(k, &joined.o, (&softmax, &o));
        tile.softmax.reset(k, &tile.o);
        let next = k.add(done.block, 1);
        let ends = k.setp_s(CmpOp::Ge, next, done.entry.end);
        let begun = k.setp_u(CmpOp::Eq, tile.from, done.entry.from);
        let whole = k.and_pred(begun, ends);
        let apart = k.not_pred(begun);
        let last = k.setp_u(CmpOp::Eq, left, 0);
        let stops = k.or_pred(ends, last);
        let stops = k.or_pred(stops, apart);
        k.if_(stops, |k| {
            let complete: R32 = k.selp(1, 0, whole);
            let divided = k.not_pred(whole);
            k.if_(divided, |k| self.join(k, &done, joined, (piece, complete)));
            let complete = k.setp_u(CmpOp::Ne, complete, 0);
            k.if_(complete, |k| {
                // A block that hides all keys from a row makes −0 to 0, and rows of other calls lack it.
                for &element in joined.o.tiles().iter().flatten() {
                    k.add_to(element, element, 0.0f32);
                }
                self.tiles.store(k, &done, &joined.softmax, &joined.o);
            });
            joined.softmax.reset(k, &joined.o);
        });
        let more = k.setp_u_and(CmpOp::Ne, left, 0, ends);
        k.if_(more, |k| {
            self.request_queries(k, at, tile);
            self.receive_queries(k, at, tile);
            self.begin_tile(k, at, tile);
        });
    }

    /// Leaves the joined pieces as a part. Sets `complete` to 1 if they are now those of the whole tile.
    fn join(&self, k: &mut Builder, done: &LineCursor, joined: &Joined, (piece, complete): (R32, R32)) {
        let Some(slots) = self.tiles.params.slots else { return };
        let before = self.tiles.line.piece_of_tile(k, &done.entry, done.block);
        let first = k.sub(piece, before);
        let end = k.sub(done.entry.end, 1);
        let after = self.tiles.line.piece_of_tile(k, &done.entry, end);
        let last = k.add(first, after);
        let merge = FixedMerge { line: self.tiles.merge(), slots };
        let merged = merge.join(k, &self.tiles.threads, ([first, last], piece), &joined.softmax, &joined.o);
        k.selp_to(complete, 1, 0, merged);
    }
}
