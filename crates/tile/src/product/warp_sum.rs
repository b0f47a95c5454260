//! The sum of the accumulators of all warps of a CTA for the same tile.

use ptx::{Builder, F32, Pointer, R32, Shared};

use crate::{AccTile, Threads, WARP_VECTOR_BYTES, warp_vectors};

/// Adds the accumulators of a CTA's warps, which divide the k dimension of a product. All warps get the sum,
/// bit for bit equal, since all add in the order of the warps. Registers pass through shared memory in
/// fragment layout, so that every access is 16 bytes per lane with contiguous lanes.
///
/// Two buffers take turns, so that one barrier of the CTA is enough for each sum: a warp writes to a buffer
/// again after the barrier of the sum between, before which all warps have read the buffer.
#[derive(Clone, Copy, Debug)]
pub struct WarpSum {
    warps: u32,
    /// Bytes of an accumulator.
    bytes: u32,
    /// The lane's place in the accumulators of the first warp, and in those of its own.
    first: Shared,
    own: Shared,
    /// Bytes from the first buffer to that of the next sum.
    turn: R32,
}

impl WarpSum {
    /// Bytes of shared memory for `warps` warps, with accumulators of `rows` × `columns`.
    pub const fn bytes(warps: u32, rows: u32, columns: u32) -> u32 {
        2 * warps * WarpSum::accumulator_bytes(rows, columns)
    }

    const fn accumulator_bytes(rows: u32, columns: u32) -> u32 {
        (rows / 16) * (columns / 8) * WARP_VECTOR_BYTES
    }

    /// For accumulators of `shape` rows and columns. `room` has [`WarpSum::bytes`] bytes.
    pub fn new(k: &mut Builder, room: Shared, threads: &Threads, (rows, columns): (u32, u32)) -> WarpSum {
        let bytes = WarpSum::accumulator_bytes(rows, columns);
        let first = k.shared_index(room, threads.lane, 16);
        let own = k.shared_index(first, threads.warp, bytes);
        WarpSum { warps: threads.warps(), bytes, first, own, turn: k.mov(0) }
    }

    /// Replaces the accumulator of each warp by the sum. All warps of the CTA call this.
    pub fn add(&self, k: &mut Builder, acc: &AccTile) {
        let [first, own] = [self.first, self.own].map(|place| k.shared_advance(place, self.turn));
        for (i, tile) in (0..).zip(acc.tiles()) {
            k.st_vec(own.at(warp_vectors(i)), *tile);
        }
        k.bar_sync();
        for (i, tile) in (0..).zip(acc.tiles()) {
            for warp in 0..self.warps {
                let part: [F32; 4] = k.ld_vec(first.at(i64::from(warp * self.bytes) + warp_vectors(i)));
                for (&sum, part) in tile.iter().zip(part) {
                    if warp == 0 { k.mov_to(sum, part) } else { k.add_to(sum, sum, part) }
                }
            }
        }
        k.xor_to(self.turn, self.turn, self.warps * self.bytes);
    }
}
