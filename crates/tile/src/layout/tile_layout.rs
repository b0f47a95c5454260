//! The shared-memory layout that `cp.async` writes and `ldmatrix` reads without bank conflicts.

use ptx::{Builder, R32};

/// Elements of 16 bits in a 16-byte chunk, the unit of `ldmatrix` rows and of 16-byte copies.
pub const CHUNK: u32 = 8;
/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16;
/// Chunks that the 32 banks of shared memory serve at once; also the rows of one `ldmatrix` matrix.
const BANK_CHUNKS: u32 = 8;

/// A tile of rows of 16-bit elements in shared memory, without padding and without bank conflicts.
///
/// Row `r` starts at chunk `r · chunks`; within the row, chunk `c` is stored at `c xor swizzle(r)`. With `g`
/// the largest power of two (at most 8) that divides the chunks of a row, the rows' first chunks fall on only
/// `8 / g` of the eight chunk positions that a wavefront can access; `swizzle(r) = r / (8 / g) mod g` spreads
/// eight successive rows over all of them. For rows of 128 bytes this is CuTe's `Swizzle<3,3,3>`, for 64
/// bytes `Swizzle<2,3,3>`; an odd number of chunks needs no swizzle. The formula works for any `head_dim`
/// that is a multiple of 8. The swizzle has period 8 in `r`. Panels of 128 bytes are tiles of rows of 128
/// bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileLayout {
    /// Rows.
    pub rows: u32,
    /// Chunks of 8 elements in a row.
    pub chunks: u32,
    /// Whether the columns lie in panels of 128 bytes, one panel after the other, as TMA writes them with a
    /// swizzle of 128 bytes ([`SwizzledTile`](crate::SwizzledTile)).
    pub in_panels: bool,
}

impl TileLayout {
    /// A tile of `rows` × `columns` elements of 16 bits; `columns` is a multiple of 8.
    pub const fn new(rows: u32, columns: u32) -> TileLayout {
        TileLayout { rows, chunks: columns / CHUNK, in_panels: false }
    }

    /// A tile of `rows` rows of `bytes` bytes, a multiple of 16.
    pub const fn of_bytes(rows: u32, bytes: u32) -> TileLayout {
        TileLayout { rows, chunks: bytes / CHUNK_BYTES, in_panels: false }
    }

    /// The tile with its columns in panels. Rows have a multiple of 8 chunks.
    #[must_use]
    pub const fn in_panels(self) -> TileLayout {
        TileLayout { in_panels: true, ..self }
    }

    /// Chunks from one row to the next.
    const fn row_chunks(self) -> u32 {
        if self.in_panels { BANK_CHUNKS } else { self.chunks }
    }

    /// Bytes from one row to the next.
    pub const fn pitch(self) -> u32 {
        self.row_chunks() * CHUNK_BYTES
    }

    /// Bytes of the tile.
    pub const fn bytes(self) -> u32 {
        self.rows * self.chunks * CHUNK_BYTES
    }

    /// Chunks that the swizzle permutes among themselves: 1, 2, 4 or 8.
    pub const fn group(self) -> u32 {
        let lowest_bit = 1 << self.row_chunks().trailing_zeros();
        if lowest_bit < BANK_CHUNKS { lowest_bit } else { BANK_CHUNKS }
    }

    /// The value that is XORed with the chunk indices of a row.
    pub const fn swizzle(self, row: u32) -> u32 {
        let group = self.group();
        row / (BANK_CHUNKS / group) % group
    }

    /// Bytes from the tile's start to a chunk.
    pub const fn offset(self, row: u32, chunk: u32) -> u32 {
        let in_group = chunk % self.group();
        self.group_offset(chunk) + row * self.pitch() + (in_group ^ self.swizzle(row)) * CHUNK_BYTES
    }

    /// Bytes from the start of a row to the swizzle group of a chunk.
    pub const fn group_offset(self, chunk: u32) -> u32 {
        let group = chunk / self.group();
        if self.in_panels { group * self.rows * self.pitch() } else { group * self.group() * CHUNK_BYTES }
    }

    /// Rows after which the swizzle repeats.
    pub const fn period(self) -> u32 {
        if self.group() == 1 { 1 } else { BANK_CHUNKS }
    }

    /// [`TileLayout::offset`] of a row and chunk known at run time. With panels, the chunk is in the first.
    pub fn emit_offset(self, k: &mut Builder, row: R32, chunk: R32) -> R32 {
        let group = self.group();
        let place = if group == 1 {
            chunk
        } else {
            let slow = k.shr_u(row, (BANK_CHUNKS / group).trailing_zeros());
            let swizzle = k.and(slow, group - 1);
            k.xor(chunk, swizzle)
        };
        let start = k.mul(row, self.pitch());
        k.mad(place, CHUNK_BYTES, start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row width of head dimensions from 8 to 256.
    fn layouts() -> impl Iterator<Item = TileLayout> {
        let plain = (8..=256).step_by(8).map(|columns| TileLayout::new(64, columns));
        plain.flat_map(|tile| [Some(tile), (tile.chunks % 8 == 0).then(|| tile.in_panels())]).flatten()
    }

    #[test]
    fn every_chunk_has_a_place_of_its_own() {
        for tile in layouts() {
            let mut taken = vec![false; (tile.bytes() / CHUNK_BYTES) as usize];
            for row in 0..tile.rows {
                for chunk in 0..tile.chunks {
                    let at = (tile.offset(row, chunk) / CHUNK_BYTES) as usize;
                    assert!(!std::mem::replace(&mut taken[at], true), "{tile:?} row {row} chunk {chunk}");
                }
            }
        }
    }

    /// TMA writes a chunk where the reader looks for it.
    #[test]
    fn panels_are_those_of_swizzled_tiles() {
        for columns in [64, 128, 256] {
            let (tile, written) =
                (TileLayout::new(32, columns).in_panels(), crate::SwizzledTile::new(32, columns));
            assert_eq!(tile.bytes(), written.bytes());
            for (row, chunk) in (0..32).flat_map(|row| (0..tile.chunks).map(move |chunk| (row, chunk))) {
                assert_eq!(tile.offset(row, chunk), written.offset(row, CHUNK * chunk));
            }
        }
    }

    /// `ldmatrix` reads one chunk from each of eight successive rows. These chunks must fall on eight
    /// different groups of banks.
    #[test]
    fn eight_rows_of_a_column_meet_eight_bank_groups() {
        for tile in layouts() {
            for (first, chunk) in
                (0..tile.rows).step_by(8).flat_map(|r| (0..tile.chunks).map(move |c| (r, c)))
            {
                let banks: u32 = (first..first + 8)
                    .map(|row| 1 << (tile.offset(row, chunk) / CHUNK_BYTES % BANK_CHUNKS))
                    .fold(0, |a, b| a | b);
                assert_eq!(banks, 0xFF, "{tile:?} rows {first}.. chunk {chunk}");
            }
        }
    }
}
