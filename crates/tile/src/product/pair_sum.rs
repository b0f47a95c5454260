//! The sum of two warps' accumulators for the same tile.

use ptx::{Builder, F32, Pointer, R32, Shared};

use crate::named_barriers::FIRST_PAIR;
use crate::{AccTile, WARP_VECTOR_BYTES, warp_vectors};

/// Threads of a pair of warps.
const PAIR_THREADS: u32 = 64;

/// Adds the accumulators of two warps that divide the k dimension of a product. Both warps get the sum, bit
/// for bit equal. Registers pass through shared memory in fragment layout, so that every access is 16 bytes
/// per lane with contiguous lanes.
#[derive(Clone, Copy, Debug)]
pub struct PairSum {
    own: Shared,
    other: Shared,
    barrier: R32,
}

impl PairSum {
    /// Bytes of shared memory for `pairs` pairs of warps, with accumulators of `rows` × `columns`.
    pub const fn bytes(pairs: u32, rows: u32, columns: u32) -> u32 {
        2 * pairs * PairSum::message_bytes(rows, columns)
    }

    const fn message_bytes(rows: u32, columns: u32) -> u32 {
        (rows / 16) * (columns / 8) * WARP_VECTOR_BYTES
    }

    /// For warp `half` (0 or 1) of pair `pair`, with accumulators of `shape` rows and columns. `room` has
    /// [`PairSum::bytes`] bytes.
    pub fn new(
        k: &mut Builder,
        room: Shared,
        [lane, pair, half]: [R32; 3],
        (rows, columns): (u32, u32),
    ) -> PairSum {
        let bytes = PairSum::message_bytes(rows, columns);
        let lanes = k.shared_index(room, lane, 16);
        let first = k.shared_index(lanes, pair, 2 * bytes);
        let peer = k.xor(half, 1);
        PairSum {
            own: k.shared_index(first, half, bytes),
            other: k.shared_index(first, peer, bytes),
            barrier: k.add(pair, FIRST_PAIR),
        }
    }

    /// Adds the other warp's accumulator. Between this call and the next one, a barrier must order this
    /// warp's reads before the other warp's writes.
    pub fn add(&self, k: &mut Builder, acc: &AccTile) {
        for (i, tile) in (0..).zip(acc.tiles()) {
            k.st_vec(self.own.at(warp_vectors(i)), *tile);
        }
        self.wait(k);
        for (i, tile) in (0..).zip(acc.tiles()) {
            let other: [F32; 4] = k.ld_vec(self.other.at(warp_vectors(i)));
            for (&sum, other) in tile.iter().zip(other) {
                k.add_to(sum, sum, other);
            }
        }
    }

    /// A barrier of the pair.
    pub fn wait(&self, k: &mut Builder) {
        k.named_barrier_sync(self.barrier, PAIR_THREADS);
    }
}
