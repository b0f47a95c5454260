//! Partial tiles: several CTAs compute one tile, each over its own KV blocks. This is split-KV through global
//! memory with the merge of FlashDecoding (Dao et al. 2023).
//!
//! Warps merge independently of each other. Each warp writes its partial result in fragment layout and
//! increments a counter. The warp that completes the count reads all parts, including its own, in the order
//! of the keys, so the result does not depend on which warp is last. No warp waits.

use ptx::{Builder, CmpOp, F32, Global, Pointer, Pred, R32, SpecialReg};
use tile::{AccTile, Cluster, Consumer, StreamK, TilePart, WARP_VECTOR_BYTES, add_one, warp_vectors};

use crate::OnlineSoftmax;
use crate::softmax::NO_MAX;

/// Buffers and counters for the merge of partial tiles.
#[derive(Clone, Copy, Debug)]
pub struct StreamKMerge {
    /// [`StreamKMerge::bytes`] bytes of global memory.
    pub parts: Global,
    /// [`StreamKMerge::counter_bytes`] bytes of global memory, all zero before and after a launch.
    pub counters: Global,
    /// How the tiles are shared.
    pub stream_k: StreamK,
    /// Warps that compute a tile, over all CTAs of a cluster.
    pub warps: u32,
    /// Present if the CTAs of a cluster take a tile together.
    pub cluster: Option<Cluster>,
}

impl StreamKMerge {
    /// Bytes of the parts for `takers` CTAs or clusters and any number of remaining tiles. A part holds row
    /// maxima, sums and O (`columns` wide) for the 16 rows of each of a tile's warps. From one part to the
    /// next, the CTA index, the tile index or both advance by one.
    pub const fn bytes(takers: u64, warps: u32, columns: u32) -> u64 {
        2 * (takers - 1) * warps as u64 * warp_bytes(columns / 8) as u64
    }

    /// Bytes of the counters: one counter for each warp of a tile.
    pub const fn counter_bytes(takers: u64, warps: u32) -> u64 {
        (takers - 1) * warps as u64 * 4
    }

    /// Stores a warp's part of a tile. In the warp that finishes last, replaces `o` and the softmax by those
    /// of the whole tile. Returns whether `o` is complete; if not, another warp completes it.
    pub fn join(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        part: &TilePart,
        softmax: &OnlineSoftmax,
        o: &AccTile,
    ) -> Pred {
        let missing = k.mov(0);
        let shared = k.setp_u(CmpOp::Ne, part.tile, TilePart::WHOLE);
        k.if_(shared, |k| {
            let of_lane = self.place_in_tile(k, consumer, o);
            let taker =
                k.special(if self.cluster.is_some() { SpecialReg::ClusteridX } else { SpecialReg::CtaidX });
            let own = self.place(k, of_lane, part.tile, taker, o);
            softmax.write(k, o, own);
            let [first, last] = self.takers(k, part.tile);
            let others = k.sub(last, first);
            let counter = self.counter(k, consumer, part.tile);
            let before = count_in(k, consumer.elected, counter);
            k.sub_to(missing, others, before);
            let complete = k.setp_u(CmpOp::Eq, missing, 0);
            k.if_(complete, |k| {
                let zero: R32 = k.mov(0);
                k.guarded(consumer.elected, |k| k.st(counter, zero));
                softmax.reset(k, o);
                let taker = first;
                k.do_while(|k| {
                    let from = self.place(k, of_lane, part.tile, taker, o);
                    softmax.add_part(k, o, from);
                    k.add_to(taker, taker, 1);
                    k.setp_u(CmpOp::Le, taker, last)
                });
            });
        });
        k.setp_u(CmpOp::Eq, missing, 0)
    }

    /// The first and the last CTA whose pieces contain blocks of a shared tile.
    fn takers(&self, k: &mut Builder, tile: R32) -> [R32; 2] {
        let first = k.mul(tile, self.stream_k.blocks);
        let last = k.add(first, self.stream_k.blocks);
        let last = k.sub(last, 1);
        [first, last].map(|block| self.stream_k.pieces.owner(k, block))
    }

    /// Index of the warp among the warps that compute a tile.
    fn warp(&self, k: &mut Builder, consumer: &Consumer) -> R32 {
        match self.cluster {
            None => consumer.threads.row_warp,
            Some(cluster) => k.mad(cluster.rank, self.warps / cluster.ctas, consumer.threads.row_warp),
        }
    }

    fn counter(&self, k: &mut Builder, consumer: &Consumer, tile: R32) -> Global {
        let warp = self.warp(k, consumer);
        let index = k.mad(tile, self.warps, warp);
        k.index(self.counters, index, 4)
    }

    /// Address of the lane's first vector in part 0.
    fn place_in_tile(&self, k: &mut Builder, consumer: &Consumer, o: &AccTile) -> Global {
        let warp = self.warp(k, consumer);
        let of_warp = k.index(self.parts, warp, warp_bytes(o.n_tiles()));
        k.index(of_warp, consumer.threads.lane, 16)
    }

    /// Address of the lane's first vector in the part of `tile` that CTA or cluster `taker` computes. From
    /// one part to the next, the taker, the tile or both advance by one, so the sum of both indices is
    /// unique.
    fn place(&self, k: &mut Builder, of_lane: Global, tile: R32, taker: R32, o: &AccTile) -> Global {
        let part = k.add(taker, tile);
        k.index(of_lane, part, self.warps * warp_bytes(o.n_tiles()))
    }
}

/// Bytes of a warp's part.
pub(super) const fn warp_bytes(n_tiles: u32) -> u32 {
    (1 + n_tiles) * WARP_VECTOR_BYTES
}

/// Increments the counter for a warp, after all writes of its lanes and before all their later reads. Returns
/// the count before.
pub(super) fn count_in(k: &mut Builder, elected: Pred, counter: Global) -> R32 {
    let before: R32 = k.mov(0);
    k.warp_sync();
    k.guarded(elected, |k| add_one(k, before, counter));
    k.warp_sync();
    k.uniform(before)
}

impl OnlineSoftmax {
    /// Writes a lane's row maxima, sums and registers of O in 16-byte vectors; the lanes of a warp are
    /// contiguous.
    pub(super) fn write(&self, k: &mut Builder, o: &AccTile, to: Global) {
        self.write_rows(k, o, 2, to);
    }

    /// Writes what the lane has of its first `rows` rows, of which it holds two.
    pub(super) fn write_rows(&self, k: &mut Builder, o: &AccTile, rows: usize, to: Global) {
        let part = self.registers(o, rows);
        for (n, vector) in (0..).zip(part.chunks(4)) {
            let vector: [F32; 4] = std::array::from_fn(|i| vector.get(i).copied().unwrap_or(vector[0]));
            k.st_vec(to.at(warp_vectors(n)), vector);
        }
    }

    /// The maxima and the sums of the lane's first `rows` rows, then their elements of each tile of O.
    pub(super) fn registers(&self, o: &AccTile, rows: usize) -> Vec<F32> {
        let statistics = self.row_max[..rows].iter().chain(&self.sum[..rows]).copied();
        let tiles = (0..o.n_tiles()).flat_map(|n| o.tile(0, n).into_iter().take(2 * rows));
        statistics.chain(tiles).collect()
    }

    /// Resets the softmax and `o` to the state before the first block or part.
    pub fn reset(&self, k: &mut Builder, o: &AccTile) {
        for (&row_max, &sum) in self.row_max.iter().zip(&self.sum) {
            k.mov_to(row_max, NO_MAX);
            k.mov_to(sum, 0.0f32);
        }
        o.clear(k);
    }

    /// Adds a part written by [`OnlineSoftmax::write`].
    pub(super) fn add_part(&self, k: &mut Builder, o: &AccTile, from: Global) {
        let part: [F32; 4] = k.ld_vec(from);
        let weights = self.take_statistics(k, &part);
        for n in 0..o.n_tiles() {
            let part: [F32; 4] = k.ld_vec(from.at(warp_vectors(1 + n)));
            add_tile(k, o.tile(0, n), &part, &weights);
        }
    }

    /// The registers of a part written by [`OnlineSoftmax::write_rows`], loaded.
    pub(super) fn load_rows(k: &mut Builder, o: &AccTile, rows: usize, from: Global) -> Vec<F32> {
        let vectors = part_vectors(o, rows);
        (0..vectors).flat_map(|n| k.ld_vec::<F32, 4>(from.at(warp_vectors(n)))).collect()
    }

    /// Adds a part of [`OnlineSoftmax::registers`] of `rows` rows.
    pub(super) fn add_registers(&self, k: &mut Builder, o: &AccTile, rows: usize, part: &[F32]) {
        let (statistics, tiles) = part.split_at(2 * rows);
        let weights = self.take_statistics(k, statistics);
        for (n, part) in (0..o.n_tiles()).zip(tiles.chunks(2 * rows)) {
            add_tile(k, o.tile(0, n), part, &weights);
        }
    }

    /// Adds the row maxima and sums of a part. Returns the weights of O and of the part for each row.
    fn take_statistics(&self, k: &mut Builder, part: &[F32]) -> [Vec<F32>; 2] {
        let mut weights: [Vec<F32>; 2] = Default::default();
        let rows = part.len() / 2;
        for (row, (&row_max, &sum)) in self.row_max.iter().zip(&self.sum).take(rows).enumerate() {
            let next = k.max(row_max, part[row]);
            let [old, new] = [row_max, part[row]].map(|row_max| {
                let distance = k.sub(row_max, next);
                k.ex2(distance)
            });
            k.mov_to(row_max, next);
            let scaled = k.mul(part[rows + row], new);
            k.mad_to(sum, sum, old, scaled);
            weights[0].push(old);
            weights[1].push(new);
        }
        weights
    }
}

/// Vectors of 16 bytes of a lane's part for `rows` rows.
pub(super) fn part_vectors(o: &AccTile, rows: usize) -> u32 {
    (rows as u32 * (1 + o.n_tiles())).div_ceil(2)
}

/// `tile = tile · old + part · new`, with a weight for each of the lane's rows.
fn add_tile(k: &mut Builder, tile: [F32; 4], part: &[F32], [old, new]: &[Vec<F32>; 2]) {
    for (i, (sum, &part)) in tile.into_iter().zip(part).enumerate() {
        let scaled = k.mul(part, new[i / 2]);
        k.mad_to(sum, sum, old[i / 2], scaled);
    }
}
