//! Tiles whose keys are cut at fixed multiples of a piece, so that the bits of a row depend neither on the
//! batch nor on the grid.
//!
//! The result of a tile is the merge of its pieces from the left, `((p0 + p1) + p2) + ...`, whichever CTA
//! computes which piece. The line of all pieces is cut evenly over the CTAs. A CTA merges the pieces of a
//! tile that begins with it in registers, and leaves one part for all of them. It leaves one part for each
//! piece of a tile that began before, because the merge is not associative in floating point.

use ptx::{Builder, CmpOp, Global, Pred, R32};
use tile::{AccTile, Threads};

use super::LineMerge;
use super::line::parts_at_once;
use super::stream_k::warp_bytes;
use crate::OnlineSoftmax;

/// Buffers and counters for the merge of tiles whose pieces lie on a line.
#[derive(Clone, Copy, Debug)]
pub struct FixedMerge {
    /// The line of pieces. The array of its parts has [`FixedMerge::bytes`] bytes.
    pub line: LineMerge,
    /// Parts for which a CTA has room: one for the tile that begins in its share of the line, and one for
    /// each piece of the tile that began before.
    pub slots: R32,
}

impl FixedMerge {
    /// Bytes of the parts for `ctas` CTAs of `warps` warps, which hold `columns` columns of O together.
    pub const fn bytes(ctas: u64, slots: u64, warps: u32, columns: u32) -> u64 {
        ctas * slots * warps as u64 * warp_bytes(columns / 8 / warps) as u64
    }

    /// Stores a warp's part of the tile whose pieces are `first` to `last` on the line; the part ends with
    /// piece `own`. In the warp that finishes last, replaces `o` and the softmax by those of the whole tile.
    /// Returns whether `o` is complete; if not, another warp completes it.
    pub fn join(
        &self,
        k: &mut Builder,
        threads: &Threads,
        ([first, last], own): ([R32; 2], R32),
        softmax: &OnlineSoftmax,
        o: &AccTile,
    ) -> Pred {
        let begins = self.line.pieces.owner(k, first);
        let next = k.add(begins, 1);
        // The first piece that has a part of its own.
        let apart = self.line.pieces.start(k, next);
        // Part 0 is that of the CTA in which the tile begins.
        let number = |k: &mut Builder, piece: R32| {
            let after = k.sub(piece, apart);
            let number = k.add(after, 1);
            k.max_s(number, 0)
        };
        let place = |k: &mut Builder, part: R32| {
            let is_first = k.setp_u(CmpOp::Eq, part, 0);
            let piece = k.add(apart, part);
            let piece = k.sub(piece, 1);
            let cta = self.line.pieces.owner(k, piece);
            let start = self.line.pieces.start(k, cta);
            let in_share = k.sub(piece, start);
            let slot = k.add(in_share, 1);
            let slot = k.selp(0, slot, is_first);
            let index = k.mad(cta, self.slots, slot);
            self.line.part(k, threads, index, o)
        };
        let part = number(k, own);
        let to: Global = place(k, part);
        softmax.write_rows(k, o, self.line.lane_rows(), to);
        let others = number(k, last);
        let counter = self.line.counter(k, threads, begins, 0);
        // Addresses of parts take more registers than on a line of blocks.
        let at_once = parts_at_once(o, 2);
        self.line.when_last(k, threads, (counter, others), (softmax, o), |k| {
            let next = k.mov(0);
            k.do_while(|k| {
                let parts: Vec<R32> = (0..at_once).map(|number| k.add(next, number)).collect();
                let load = |&part: &R32| {
                    let part = k.min_u(part, others);
                    let from = place(k, part);
                    OnlineSoftmax::load_rows(k, o, self.line.lane_rows(), from)
                };
                let loaded: Vec<_> = parts.iter().map(load).collect();
                for (&part, loaded) in parts.iter().zip(&loaded) {
                    let exists = k.setp_u(CmpOp::Le, part, others);
                    k.if_(exists, |k| softmax.add_registers(k, o, self.line.lane_rows(), loaded));
                }
                k.add_to(next, next, at_once);
                k.setp_u(CmpOp::Le, next, others)
            });
        })
    }
}

impl OnlineSoftmax {
    /// Merges the result of another piece: `(self, o) = (self, o) ⊕ (other, of_other)`, as the warp that
    /// completes a tile merges parts.
    pub fn merge_piece(&self, k: &mut Builder, o: &AccTile, (other, of_other): (&OnlineSoftmax, &AccTile)) {
        self.add_registers(k, o, 2, &other.registers(of_other, 2));
    }
}
