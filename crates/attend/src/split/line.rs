//! Tiles whose KV blocks lie on one line that is cut evenly over all CTAs: split-KV through global memory in
//! one kernel, with the merge of FlashDecoding (Dao et al. 2023).
//!
//! A CTA's piece of the line holds the end of one tile, whole tiles, and the beginning of another tile, so
//! that a CTA leaves at most two partial results, whatever the number of sequences. Warps merge as in
//! [`StreamKMerge`](super::StreamKMerge): the warp that completes a tile's count reads all parts in the order
//! of the keys, so the result does not depend on which warp is last, and no warp waits.

use ptx::{Builder, CmpOp, Global, Pred, R32};
use tile::{AccTile, Pieces, Threads};

use super::stream_k::{count_in, warp_bytes};
use crate::OnlineSoftmax;

/// Number of parts that a warp loads at once: up to eight, in at most 96 registers.
fn parts_at_once(o: &AccTile) -> u32 {
    (96 / (4 * (1 + o.n_tiles()))).clamp(1, 8)
}

/// Buffers and counters for the merge of tiles that a line divides. A warp holds 16 rows and its part of the
/// columns of O.
#[derive(Clone, Copy, Debug)]
pub struct LineMerge {
    /// [`LineMerge::bytes`] bytes of global memory.
    pub parts: Global,
    /// [`LineMerge::counter_bytes`] bytes of global memory, all zero before and after a launch.
    pub counters: Global,
    /// The pieces of the line.
    pub pieces: Pieces,
    /// The CTA, counted along the line.
    pub cta: R32,
}

impl LineMerge {
    /// Bytes of the parts for `ctas` CTAs of `warps` warps, which hold `columns` columns of O together.
    pub const fn bytes(ctas: u64, warps: u32, columns: u32) -> u64 {
        2 * ctas * warps as u64 * warp_bytes(columns / 8 / warps) as u64
    }

    /// Bytes of the counters: one for each warp of the tile that begins in a CTA's piece and ends beyond it.
    pub const fn counter_bytes(ctas: u64, warps: u32) -> u64 {
        4 * ctas * warps as u64
    }

    /// Stores a warp's part of the tile whose blocks are `first` to `last` on the line. In the warp that
    /// finishes last, replaces `o` and the softmax by those of the whole tile. Returns whether `o` is
    /// complete; if not, another warp completes it.
    pub fn join(
        &self,
        k: &mut Builder,
        threads: &Threads,
        [first, last]: [R32; 2],
        softmax: &OnlineSoftmax,
        o: &AccTile,
    ) -> Pred {
        let [first, last] = [first, last].map(|block| self.pieces.owner(k, block));
        let own = self.place(k, threads, [first, self.cta], o);
        softmax.write(k, o, own);
        let counter = self.counter(k, threads, first);
        let place = |k: &mut Builder, cta: R32| self.place(k, threads, [first, cta], o);
        merge_when_last(k, threads, counter, [first, last], place, (softmax, o))
    }

    /// The warp's counter of the tile that begins in the piece of `first`.
    pub(super) fn counter(&self, k: &mut Builder, threads: &Threads, first: R32) -> Global {
        let index = k.mad(first, threads.warps(), threads.warp);
        k.index(self.counters, index, 4)
    }

    /// The address of the lane's first vector in part `part` of all parts.
    pub(super) fn part(&self, k: &mut Builder, threads: &Threads, part: R32, o: &AccTile) -> Global {
        let warp = k.mad(part, threads.warps(), threads.warp);
        let of_warp = k.index(self.parts, warp, warp_bytes(o.n_tiles()));
        k.index(of_warp, threads.lane, 16)
    }

    /// Address of the lane's first vector in the part that `cta` computes of the tile that begins in the
    /// piece of `first`. A CTA has the part of a tile that began before its piece, and that of the tile that
    /// begins in its piece and ends beyond it.
    fn place(&self, k: &mut Builder, threads: &Threads, [first, cta]: [R32; 2], o: &AccTile) -> Global {
        let begins = k.setp_u(CmpOp::Eq, first, cta);
        let second: R32 = k.selp(1, 0, begins);
        let part = k.mad(cta, 2, second);
        self.part(k, threads, part, o)
    }
}

/// Counts in the warp's part. In the warp that is the last one, replaces `o` and the softmax by the merge of
/// the parts `first` to `last`, in this order. Returns whether it did.
pub(super) fn merge_when_last(
    k: &mut Builder,
    threads: &Threads,
    counter: Global,
    [first, last]: [R32; 2],
    place: impl Fn(&mut Builder, R32) -> Global,
    (softmax, o): (&OnlineSoftmax, &AccTile),
) -> Pred {
    let elected = k.setp_u(CmpOp::Eq, threads.lane, 0);
    let before = count_in(k, elected, counter);
    let others = k.sub(last, first);
    let complete = k.setp_u(CmpOp::Eq, before, others);
    k.if_(complete, |k| {
        let zero: R32 = k.mov(0);
        k.guarded(elected, |k| k.st(counter, zero));
        softmax.reset(k, o);
        let next = k.mov(first);
        k.do_while(|k| {
            // The loads of several parts are in flight together.
            let parts: Vec<R32> = (0..parts_at_once(o)).map(|number| k.add(next, number)).collect();
            let load = |&part: &R32| {
                let part = k.min_u(part, last);
                let from = place(k, part);
                OnlineSoftmax::load_part(k, o, from)
            };
            let loaded: Vec<_> = parts.iter().map(load).collect();
            for (&part, loaded) in parts.iter().zip(&loaded) {
                let exists = k.setp_u(CmpOp::Le, part, last);
                k.if_(exists, |k| softmax.add_loaded(k, o, loaded));
            }
            k.add_to(next, next, parts_at_once(o));
            k.setp_u(CmpOp::Le, next, last)
        });
    });
    complete
}
