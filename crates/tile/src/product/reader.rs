//! Reads tiles of a [`TileLayout`] as operands of `mma`, with `ldmatrix`.

use ptx::{Builder, Pointer, R32, Shared};

use crate::Threads;
use crate::TileLayout;
use crate::layout::CHUNK_BYTES;

/// The order in which the four address groups of an `ldmatrix.x4` address 8×8 matrices (PTX ISA, "ldmatrix"
/// and "Matrix Fragments for mma.m16n8k16").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// 16 rows of one chunk, then the next chunk of these rows: A fragments, and with `.trans` B fragments.
    RowsFirst,
    /// 8 rows of two chunks, then the next 8 rows of both: B fragments without `.trans`.
    ChunksFirst,
    /// 16 rows of one chunk: the last, odd chunk of B for m16n8k8.
    OneChunk,
}

/// A lane's `ldmatrix` offsets, valid for every tile of this layout.
#[derive(Clone, Copy, Debug)]
pub struct MatrixReader {
    layout: TileLayout,
    /// The lane's byte offset for row 0, chunk 0.
    lane: R32,
    /// Bytes to add to the chunks of the upper half of a swizzle group, if the reader begins in the middle of
    /// a group ([`MatrixReader::in_halves`]).
    wrap: Option<R32>,
}

impl MatrixReader {
    /// Reads A fragments (16 rows × 16 columns), or with `.trans` B fragments of a tile whose rows run along
    /// k.
    pub fn rows_first(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::RowsFirst)
    }

    /// Reads B fragments of a tile whose rows run along n (k is contiguous).
    pub fn chunks_first(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::ChunksFirst)
    }

    /// Reads one chunk of 16 rows of B: the odd last chunk, for m16n8k8.
    pub fn one_chunk(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::OneChunk)
    }

    /// Reads single 32-bit elements of a tile whose rows run along k. From every 8 rows, the lane reads row
    /// `2t + odd`, where `t` is its index in the quad; from every 8 columns, it reads the column of its quad
    /// ([`OpenTile::address`] counts chunks of 4 columns).
    pub fn elements(k: &mut Builder, threads: &Threads, layout: TileLayout, odd: u32) -> MatrixReader {
        let row = if odd == 0 { threads.column } else { k.add(threads.column, odd) };
        let chunk = k.shr_u(threads.quad, 2);
        let lane = layout.emit_offset(k, row, chunk);
        let in_chunk = k.and(threads.quad, 3);
        MatrixReader { layout, lane: k.mad(in_chunk, 4, lane), wrap: None }
    }

    fn new(k: &mut Builder, threads: &Threads, layout: TileLayout, order: Order) -> MatrixReader {
        let lane = threads.lane;
        let low = k.and(lane, 15);
        let (row, chunk): (R32, R32) = match order {
            Order::RowsFirst => (low, k.shr_u(lane, 4)),
            Order::OneChunk => (low, k.mov(0)),
            Order::ChunksFirst => {
                let in_matrix = k.and(lane, 7);
                let upper = k.and(lane, 16);
                let half = k.shr_u(upper, 1);
                let third = k.shr_u(lane, 3);
                (k.add(in_matrix, half), k.and(third, 1))
            }
        };
        MatrixReader { layout, lane: layout.emit_offset(k, row, chunk), wrap: None }
    }

    /// The reader for one half of the chunks of each row: the first half if `half` is 0, the second if it is
    /// 1. Chunks count from the start of the half, which has an even number of chunks.
    pub fn in_halves(self, k: &mut Builder, half: R32) -> MatrixReader {
        let (group, chunks) = (self.layout.group(), self.layout.chunks / 2);
        debug_assert!(self.layout.chunks.is_multiple_of(4), "an even number of chunks a half");
        if chunks.is_multiple_of(group) {
            return MatrixReader { lane: k.mad(half, chunks * CHUNK_BYTES, self.lane), ..self };
        }
        // The second half begins in the middle of a swizzle group. At a distance of half a group, the
        // position of a chunk differs in one bit, and the chunks of the group's upper half lie in the next
        // group.
        let middle = k.mul(half, group / 2 * CHUNK_BYTES);
        let lane = k.xor(self.lane, middle);
        let lane = k.mad(half, (chunks - group / 2) * CHUNK_BYTES, lane);
        MatrixReader { lane, wrap: Some(k.mul(half, group * CHUNK_BYTES)), ..self }
    }

    /// The reader for a tile that begins at row `first` of this layout, a multiple of 8.
    pub fn skip_rows(self, k: &mut Builder, first: R32) -> MatrixReader {
        MatrixReader { lane: k.mad(first, self.layout.pitch(), self.lane), ..self }
    }

    /// The lane's addresses in the tile at `tile`, which is aligned to 128 bytes.
    pub fn open(&self, k: &mut Builder, tile: Shared) -> OpenTile {
        let base = k.add(tile.base, self.lane);
        // Within a swizzle group, chunk 2j is chunk 0 XOR 2j; groups follow each other by addition.
        let addresses = (0..(self.layout.group() / 2).max(1))
            .map(|j| {
                let base = if j == 0 { base } else { k.xor(base, 2 * j * CHUNK_BYTES) };
                let base = match self.wrap {
                    Some(wrap) if 2 * j >= self.layout.group() / 2 => k.add(base, wrap),
                    _ => base,
                };
                Shared { base, offset: tile.offset }
            })
            .collect();
        OpenTile { layout: self.layout, addresses }
    }
}

/// A lane's `ldmatrix` addresses in one tile.
#[derive(Clone, Debug)]
pub struct OpenTile {
    layout: TileLayout,
    /// Addresses of chunks 0, 2, 4, 6 of a swizzle group.
    addresses: Vec<Shared>,
}

impl OpenTile {
    /// The lane's `ldmatrix` address for the matrices that begin at `row` (a multiple of 8) and `chunk`
    /// (even, or the last chunk of an odd number).
    pub fn address(&self, row: u32, chunk: u32) -> Shared {
        let group = self.layout.group();
        let offset = row * self.layout.pitch() + self.layout.group_offset(chunk);
        self.addresses[(chunk % group / 2) as usize].at(i64::from(offset))
    }

    /// The tile's layout.
    pub fn layout(&self) -> TileLayout {
        self.layout
    }
}
