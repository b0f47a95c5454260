//! Tiles whose KV blocks lie on one line that is cut evenly over all CTAs: split-KV through global memory in
//! one kernel, with the merge of FlashDecoding (Dao et al. 2023).
//!
//! A CTA's piece of the line holds the end of one tile, whole tiles, and the beginning of another tile, so
//! that a CTA leaves at most two partial results, whatever the number of sequences. Warps merge as in
//! [`StreamKMerge`](super::StreamKMerge): the warp that completes a tile's count reads all parts in the order
//! of the keys, or, if they are many, the merged parts of groups. So the result does not depend on which warp
//! is last, and no warp waits.

use ptx::{Builder, CmpOp, Global, Pred, R32};
use tile::{AccTile, Pieces, Threads};

use super::stream_k::{count_in, part_vectors, warp_bytes};
use crate::OnlineSoftmax;

/// Parts of a group. A tile of many parts is merged in two steps, so that no warp reads all of them: the last
/// warp of each group merges its parts, and the last one of these warps merges the groups.
const GROUP: u32 = 8;

/// Number of parts that a warp loads at once: up to eight, in at most 96 registers.
pub(super) fn parts_at_once(o: &AccTile, lane_rows: usize) -> u32 {
    (96 / (4 * part_vectors(o, lane_rows))).clamp(1, 8)
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
    /// The rows that a lane has in parts: one if no tile has more than 8 rows, else two.
    pub lane_rows: usize,
    /// Whether a part is added vector by vector, because a warp has no registers for all of it beside O.
    pub by_vector: bool,
}

impl LineMerge {
    /// Bytes of the parts for `ctas` CTAs of `warps` warps, which hold `columns` columns of O together.
    pub const fn bytes(ctas: u64, warps: u32, columns: u32) -> u64 {
        2 * ctas * warps as u64 * warp_bytes(columns / 8 / warps) as u64
    }

    /// Bytes of the counters: for each warp one of the tile that begins in a CTA's piece and ends beyond it,
    /// and one of the group of parts that begins with the CTA's.
    pub const fn counter_bytes(ctas: u64, warps: u32) -> u64 {
        2 * 4 * ctas * warps as u64
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
        let place = |k: &mut Builder, cta: R32| self.place(k, threads, [first, cta], o);
        let own = place(k, self.cta);
        softmax.write_rows(k, o, self.lane_rows, own);
        let others = k.sub(last, first);
        // The last step merges the parts of every `stride`-th CTA.
        let [stride, complete]: [R32; 2] = [k.mov(1), k.mov(1)];
        // A second step takes about as long as three loads of `at_once` parts.
        let at_once = parts_at_once(o, self.lane_rows);
        let many = k.setp_u(CmpOp::Ge, others, GROUP + 4 * at_once);
        k.if_(many, |k| {
            let before = k.sub(self.cta, first);
            let into = k.and(before, GROUP - 1);
            let begin = k.sub(self.cta, into);
            let rest = k.sub(last, begin);
            let rest = k.min_u(rest, GROUP - 1);
            // A group of one part has no count: a tile may begin in the same CTA, whose first group it is.
            let several = k.setp_u(CmpOp::Ne, rest, 0);
            k.if_(several, |k| {
                let counter = self.counter(k, threads, begin, 1);
                let of_group = |k: &mut Builder, number: R32| {
                    let cta = k.add(begin, number);
                    place(k, cta)
                };
                let group = (counter, rest, at_once);
                let merged = self.merge_when_last(k, threads, group, of_group, (softmax, o));
                k.selp_to(complete, 1, 0, merged);
                k.if_(merged, |k| {
                    let to = place(k, begin);
                    softmax.write_rows(k, o, self.lane_rows, to);
                });
            });
            k.mov_to(stride, GROUP);
            let groups = k.shr_u(others, GROUP.trailing_zeros());
            k.mov_to(others, groups);
        });
        let remains = k.setp_u(CmpOp::Ne, complete, 0);
        k.if_(remains, |k| {
            let counter = self.counter(k, threads, first, 0);
            let of_tile = |k: &mut Builder, number: R32| {
                let cta = k.mad(number, stride, first);
                place(k, cta)
            };
            let tile = (counter, others, at_once);
            let merged = self.merge_when_last(k, threads, tile, of_tile, (softmax, o));
            k.selp_to(complete, 1, 0, merged);
        });
        k.setp_u(CmpOp::Ne, complete, 0)
    }

    /// The warp's counter of the tile (`level` 0) or of the group (`level` 1) that begins in the piece of
    /// `first`.
    pub(super) fn counter(&self, k: &mut Builder, threads: &Threads, first: R32, level: u32) -> Global {
        let index = k.mad(first, 2, level);
        let index = k.mad(index, threads.warps(), threads.warp);
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

    /// Counts in the warp's part. In the warp that is the last one, replaces `o` and the softmax by the merge
    /// of the parts 0 to `others`, in this order; the loads of `at_once` parts are in flight together.
    /// Returns whether it did.
    pub(super) fn merge_when_last(
        &self,
        k: &mut Builder,
        threads: &Threads,
        (counter, others, at_once): (Global, R32, u32),
        place: impl Fn(&mut Builder, R32) -> Global,
        (softmax, o): (&OnlineSoftmax, &AccTile),
    ) -> Pred {
        let elected = k.setp_u(CmpOp::Eq, threads.lane, 0);
        let before = count_in(k, elected, counter);
        let complete = k.setp_u(CmpOp::Eq, before, others);
        k.if_(complete, |k| {
            let zero: R32 = k.mov(0);
            k.guarded(elected, |k| k.st(counter, zero));
            softmax.reset(k, o);
            let next = k.mov(0);
            if self.by_vector {
                return k.do_while(|k| {
                    let from = place(k, next);
                    softmax.add_part(k, o, from);
                    k.add_to(next, next, 1);
                    k.setp_u(CmpOp::Le, next, others)
                });
            }
            k.do_while(|k| {
                let parts: Vec<R32> = (0..at_once).map(|number| k.add(next, number)).collect();
                let load = |&part: &R32| {
                    let part = k.min_u(part, others);
                    let from = place(k, part);
                    OnlineSoftmax::load_rows(k, o, self.lane_rows, from)
                };
                let loaded: Vec<_> = parts.iter().map(load).collect();
                for (&part, loaded) in parts.iter().zip(&loaded) {
                    let exists = k.setp_u(CmpOp::Le, part, others);
                    k.if_(exists, |k| softmax.add_registers(k, o, self.lane_rows, loaded));
                }
                k.add_to(next, next, at_once);
                k.setp_u(CmpOp::Le, next, others)
            });
        });
        complete
    }
}
