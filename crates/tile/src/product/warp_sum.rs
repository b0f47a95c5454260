//! The sum of the accumulators of the warps of a CTA that have the same rows.

use ptx::{Builder, F32, Pointer, R32, Shared};

use crate::{AccTile, Threads, WARP_VECTOR_BYTES, warp_vectors};

/// Adds the accumulators of the warps that share rows ([`Threads::kv_warps`]) and divide the k dimension of a
/// product. All of them get the sum, bit for bit equal, since all add in the order of the parts. Registers
/// pass through shared memory in fragment layout, so that every access is 16 bytes per lane with contiguous
/// lanes.
///
/// With two buffers, which take turns, one barrier of the CTA is enough for each sum: a warp writes to a
/// buffer again after the barrier of the sum between, before which all warps have read the buffer. With one
/// buffer, another barrier must come between two sums.
#[derive(Clone, Copy, Debug)]
pub struct WarpSum {
    parts: u32,
    /// Bytes from one part to the next.
    apart: u32,
    /// The lane's place in the first part of its rows, and in the warp's own.
    first: Shared,
    own: Shared,
    /// Bytes from the first buffer to that of the next sum; `None` with one buffer.
    turn: Option<R32>,
    buffer_bytes: u32,
}

impl WarpSum {
    /// Bytes of shared memory for a CTA of `warps` warps, with accumulators of `rows` × `columns`.
    pub const fn bytes(warps: u32, (rows, columns): (u32, u32), buffers: u32) -> u32 {
        buffers * warps * WarpSum::accumulator_bytes(rows, columns)
    }

    const fn accumulator_bytes(rows: u32, columns: u32) -> u32 {
        (rows / 16) * (columns / 8) * WARP_VECTOR_BYTES
    }

    /// For accumulators of `shape` rows and columns. `room` has [`WarpSum::bytes`] bytes for one or two
    /// buffers.
    pub fn new(k: &mut Builder, room: Shared, threads: &Threads, shape: (u32, u32), buffers: u32) -> WarpSum {
        let bytes = WarpSum::accumulator_bytes(shape.0, shape.1);
        let lane = k.shared_index(room, threads.lane, 16);
        let own = k.shared_index(lane, threads.warp, bytes);
        // The warps of a part follow each other, one for each group of rows.
        let first =
            if threads.row_warps() == 1 { lane } else { k.shared_index(lane, threads.row_warp, bytes) };
        WarpSum {
            parts: threads.kv_warps,
            apart: threads.row_warps() * bytes,
            first,
            own,
            turn: (buffers == 2).then(|| k.mov(0)),
            buffer_bytes: threads.warps() * bytes,
        }
    }

    /// Replaces the accumulator of each warp by the sum. All warps of the CTA call this.
    pub fn add(&self, k: &mut Builder, acc: &AccTile) {
        let [first, own] =
            [self.first, self.own].map(|place| self.turn.map_or(place, |turn| k.shared_advance(place, turn)));
        for (i, tile) in (0..).zip(acc.tiles()) {
            k.st_vec(own.at(warp_vectors(i)), *tile);
        }
        k.bar_sync();
        for (i, tile) in (0..).zip(acc.tiles()) {
            for number in 0..self.parts {
                let part: [F32; 4] = k.ld_vec(first.at(i64::from(number * self.apart) + warp_vectors(i)));
                for (&sum, part) in tile.iter().zip(part) {
                    if number == 0 { k.mov_to(sum, part) } else { k.add_to(sum, sum, part) }
                }
            }
        }
        if let Some(turn) = self.turn {
            k.xor_to(turn, turn, self.buffer_bytes);
        }
    }
}
