//! Tiles whose KV blocks lie on one line that is cut evenly over all CTAs: split-KV through global memory in
//! one kernel, with the merge of FlashDecoding (Dao et al. 2023).
//!
//! A CTA's piece of the line holds the end of one tile, whole tiles, and the beginning of another tile, so
//! that a CTA leaves at most two partial results, whatever the number of sequences. Warps merge as in
//! [`StreamKMerge`](super::StreamKMerge): the warp that completes a tile's count reads all parts, or, if they
//! are many, the merged parts of groups. The order of additions depends on the number of parts alone, so that
//! the result does not depend on which warp is last. No warp waits.

use ptx::{Builder, CmpOp, F32, Global, Pred, R32};
use tile::{AccTile, Pieces, Threads};

use super::stream_k::{count_in, part_vectors, warp_bytes};
use crate::OnlineSoftmax;
use crate::softmax::NO_MAX;

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
    /// The most rows of a tile: 1, 2, 4, 8 or 16. With less than 8, lanes without a row merge parts, too.
    pub tile_rows: u32,
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
        softmax.write_rows(k, o, self.lane_rows(), own);
        let others = k.sub(last, first);
        // The last step merges the parts of every `stride`-th CTA.
        let [stride, complete]: [R32; 2] = [k.mov(1), k.mov(1)];
        // A second step takes about as long as three loads of `at_once` parts.
        let at_once = parts_at_once(o, self.lane_rows()) * self.lane_groups();
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
                let of_group = |k: &mut Builder, threads: &Threads, number: R32| {
                    let cta = k.add(begin, number);
                    self.place(k, threads, [first, cta], o)
                };
                let merged = self.merge_parts(k, threads, (counter, rest), of_group, (softmax, o));
                k.selp_to(complete, 1, 0, merged);
                k.if_(merged, |k| {
                    let to = place(k, begin);
                    softmax.write_rows(k, o, self.lane_rows(), to);
                });
            });
            k.mov_to(stride, GROUP);
            let groups = k.shr_u(others, GROUP.trailing_zeros());
            k.mov_to(others, groups);
        });
        let remains = k.setp_u(CmpOp::Ne, complete, 0);
        k.if_(remains, |k| {
            let counter = self.counter(k, threads, first, 0);
            let of_tile = |k: &mut Builder, threads: &Threads, number: R32| {
                let cta = k.mad(number, stride, first);
                self.place(k, threads, [first, cta], o)
            };
            let merged = self.merge_parts(k, threads, (counter, others), of_tile, (softmax, o));
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

    /// The rows that a lane has in parts.
    pub fn lane_rows(&self) -> usize {
        if self.tile_rows <= 8 { 1 } else { 2 }
    }

    /// Groups of the lanes that have all rows of a tile.
    fn lane_groups(&self) -> u32 {
        (8 / self.tile_rows).max(1)
    }

    /// Counts in the warp's part. In the warp that is the last one, replaces `o` and the softmax by the merge
    /// of the parts 0 to `others`, which are at `place` for the lanes of `Threads`. Returns whether it did.
    ///
    /// Each group of lanes merges some of the parts: it loads several at once, and scales each by its
    /// distance from the largest row max. At last the groups are merged.
    fn merge_parts(
        &self,
        k: &mut Builder,
        threads: &Threads,
        (counter, others): (Global, R32),
        place: impl Fn(&mut Builder, &Threads, R32) -> Global,
        (softmax, o): (&OnlineSoftmax, &AccTile),
    ) -> Pred {
        let groups = self.lane_groups();
        let lanes = 32 / groups;
        let at_once = parts_at_once(o, self.lane_rows());
        self.when_last(k, threads, (counter, others), (softmax, o), |k| {
            if self.by_vector {
                let next = k.mov(0);
                return k.do_while(|k| {
                    let from = place(k, threads, next);
                    softmax.add_part(k, o, from);
                    k.add_to(next, next, 1);
                    k.setp_u(CmpOp::Le, next, others)
                });
            }
            let readers = Threads { lane: k.and(threads.lane, lanes - 1), ..*threads };
            let group = k.shr_u(threads.lane, lanes.trailing_zeros());
            let next = k.mov(0);
            k.do_while(|k| {
                let own = k.add(next, group);
                let parts: Vec<(Pred, Vec<F32>)> = (0..at_once)
                    .map(|number| {
                        let part = k.add(own, groups * number);
                        let exists = k.setp_u(CmpOp::Le, part, others);
                        let part = k.min_u(part, others);
                        let from = place(k, &readers, part);
                        (exists, OnlineSoftmax::load_rows(k, o, self.lane_rows(), from))
                    })
                    .collect();
                softmax.add_parts(k, o, self.lane_rows(), &parts);
                k.add_to(next, next, groups * at_once);
                k.setp_u(CmpOp::Le, next, others)
            });
            for mask in [4, 8, 16].into_iter().filter(|&mask| mask >= lanes) {
                softmax.add_lanes(k, o, self.lane_rows(), mask);
            }
        })
    }

    /// Counts in the warp's part. In the warp that is the last one of `others` and one, resets the counter
    /// and the softmax, and calls `merge`. Returns whether it did.
    pub(super) fn when_last(
        &self,
        k: &mut Builder,
        threads: &Threads,
        (counter, others): (Global, R32),
        (softmax, o): (&OnlineSoftmax, &AccTile),
        merge: impl FnOnce(&mut Builder),
    ) -> Pred {
        let elected = k.setp_u(CmpOp::Eq, threads.lane, 0);
        let before = count_in(k, elected, counter);
        let complete = k.setp_u(CmpOp::Eq, before, others);
        k.if_(complete, |k| {
            let zero: R32 = k.mov(0);
            k.guarded(elected, |k| k.st(counter, zero));
            softmax.reset(k, o);
            merge(k);
        });
        complete
    }
}

impl OnlineSoftmax {
    /// Adds those of some parts of [`OnlineSoftmax::registers`] of `rows` rows that exist.
    fn add_parts(&self, k: &mut Builder, o: &AccTile, rows: usize, parts: &[(Pred, Vec<F32>)]) {
        let mut weights = vec![Vec::new(); parts.len()];
        for row in 0..rows {
            let (row_max, sum) = (self.row_max[row], self.sum[row]);
            let own: Vec<F32> =
                parts.iter().map(|(exists, part)| k.selp(part[row], NO_MAX, *exists)).collect();
            let largest = own.iter().fold(row_max, |largest, &own| k.max(largest, own));
            let mut weight = |row_max: F32| {
                let distance = k.sub(row_max, largest);
                k.ex2(distance)
            };
            let old = weight(row_max);
            for (weights, &own) in weights.iter_mut().zip(&own) {
                weights.push(weight(own));
            }
            k.mov_to(row_max, largest);
            k.mul_to(sum, sum, old);
            for x in o.row(row as u32) {
                k.mul_to(x, x, old);
            }
        }
        for ((exists, part), weights) in parts.iter().zip(&weights) {
            k.guarded(*exists, |k| {
                for (row, &weight) in weights.iter().enumerate() {
                    k.mad_to(self.sum[row], part[rows + row], weight, self.sum[row]);
                }
                for (n, part) in (0..o.n_tiles()).zip(part[2 * rows..].chunks(2 * rows)) {
                    for (i, (x, &part)) in o.tile(0, n).into_iter().zip(part).enumerate() {
                        k.mad_to(x, part, weights[i / 2], x);
                    }
                }
            });
        }
    }

    /// Merges `rows` rows of the lane with those of the lane whose number differs in the bit `mask`. Both
    /// lanes then have the same.
    fn add_lanes(&self, k: &mut Builder, o: &AccTile, rows: usize, mask: u32) {
        for row in 0..rows {
            let row_max = self.row_max[row];
            let other = k.shfl_xor(row_max, mask);
            let largest = k.max(row_max, other);
            let distance = k.sub(row_max, largest);
            let weight = k.ex2(distance);
            k.mov_to(row_max, largest);
            for x in std::iter::once(self.sum[row]).chain(o.row(row as u32)) {
                k.mul_to(x, x, weight);
                let other = k.shfl_xor(x, mask);
                k.add_to(x, x, other);
            }
        }
    }
}
