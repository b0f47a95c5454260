use ptx::{Builder, Pointer, R32, Shared};

use crate::Threads;
use crate::layout::{CHUNK_BYTES, TileLayout};

/// Which 8×8 matrices the four address groups of an `ldmatrix.x4` name (PTX ISA, "ldmatrix" and "Matrix
/// Fragments for mma.m16n8k16").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// 16 rows of one chunk, then the same rows of the next: fragments of A, and transposed ones of B.
    RowsFirst,
    /// 8 rows of two chunks, then the next 8 rows of both: fragments of B as stored.
    ChunksFirst,
    /// 16 rows of one chunk: the last, odd chunk of B for m16n8k8.
    OneChunk,
}

/// A lane's offsets for reading a tile with `ldmatrix`, the same for every tile of this layout.
#[derive(Clone, Copy, Debug)]
pub struct MatrixReader {
    layout: TileLayout,
    /// The lane's offset in bytes for row 0, chunk 0.
    lane: R32,
}

impl MatrixReader {
    /// Reads fragments of A (16 rows × 16 columns), or with `.trans` of B where the tile's rows run along k.
    pub fn rows_first(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::RowsFirst)
    }

    /// Reads fragments of B where the tile's rows run along n (keys, with head_dim as k).
    pub fn chunks_first(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::ChunksFirst)
    }

    /// Reads one chunk of 16 rows of B: the odd chunk that m16n8k8 takes.
    pub fn one_chunk(k: &mut Builder, threads: &Threads, layout: TileLayout) -> MatrixReader {
        MatrixReader::new(k, threads, layout, Order::OneChunk)
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
        MatrixReader { layout, lane: layout.emit_offset(k, row, chunk) }
    }

    /// The same, of a tile that begins at row `first`, a multiple of 8, of this layout.
    pub fn skip_rows(self, k: &mut Builder, first: R32) -> MatrixReader {
        MatrixReader { lane: k.mad(first, self.layout.pitch(), self.lane), ..self }
    }

    /// The lane's addresses in the tile at `tile`, whose start is a multiple of 128 bytes.
    pub fn open(&self, k: &mut Builder, tile: Shared) -> OpenTile {
        let base = k.add(tile.base, self.lane);
        // Chunk 2j differs from chunk 0 by an exclusive or with 2j below the swizzled group, by an addition
        // above it.
        let addresses = (0..(self.layout.group() / 2).max(1))
            .map(|j| {
                let base = if j == 0 { base } else { k.xor(base, 2 * j * CHUNK_BYTES) };
                Shared { base, offset: tile.offset }
            })
            .collect();
        OpenTile { layout: self.layout, addresses }
    }
}

/// A lane's addresses in one tile.
#[derive(Clone, Debug)]
pub struct OpenTile {
    layout: TileLayout,
    /// For chunks 0, 2, 4, 6 of a swizzled group.
    addresses: Vec<Shared>,
}

impl OpenTile {
    /// What the lane hands to `ldmatrix` for the matrices that begin at `row` (a multiple of 8) and `chunk`
    /// (even; or the last one of an odd number).
    pub fn address(&self, row: u32, chunk: u32) -> Shared {
        let group = self.layout.group();
        let (outer, inner) = (chunk / group * group, chunk % group);
        let offset = row * self.layout.pitch() + outer * CHUNK_BYTES;
        self.addresses[(inner / 2) as usize].at(i64::from(offset))
    }

    /// The tile's layout.
    pub fn layout(&self) -> TileLayout {
        self.layout
    }
}
