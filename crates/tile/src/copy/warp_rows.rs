//! A warp's rows of a swizzled tile, written from fragments or read into them.

use ptx::{Builder, R32, Shared};

use crate::{OperandTile, PipelineState, SwizzledTile, Threads};

/// 16 rows of a [`SwizzledTile`] that a warp writes with `stmatrix` or reads with `ldmatrix`.
#[derive(Clone, Copy, Debug)]
pub struct WarpRows {
    /// Address of the lane's row in the first 16×16 tile, with the swizzled chunk.
    lane_place: Shared,
    panel_bytes: u32,
}

impl WarpRows {
    /// Rows of a warp.
    pub const ROWS: u32 = 16;
    /// 16×16 tiles of a panel.
    const PER_PANEL: u32 = SwizzledTile::PANEL / 16;

    /// The rows of `tile` from `first` on. `first` is a multiple of 1024 bytes, the size of a swizzle atom of
    /// 8 rows.
    pub fn new(k: &mut Builder, tile: SwizzledTile, first: Shared, threads: &Threads) -> WarpRows {
        // Lanes 0–15 address the rows of the left half of a 16×16 tile, lanes 16–31 those of the right half
        // (PTX ISA, "stmatrix" and "ldmatrix").
        let row = k.and(threads.lane, 15);
        let start = k.shared_index(first, row, SwizzledTile::ROW_BYTES);
        let right = k.shr_u(threads.lane, 4);
        let in_eight = k.and(threads.lane, 7);
        let chunk = k.xor(right, in_eight);
        let lane_place = k.shared_index(start, chunk, 16);
        WarpRows { lane_place, panel_bytes: tile.panel_bytes() }
    }

    /// The rows of the current stage's tile, in a ring of tiles of `bytes` bytes. `self` are those of the
    /// first stage.
    #[must_use]
    pub fn at_stage(self, k: &mut Builder, at: &PipelineState, bytes: u32) -> WarpRows {
        WarpRows { lane_place: at.place(k, self.lane_place, bytes), ..self }
    }

    pub fn write(&self, k: &mut Builder, rows: &OperandTile) {
        let lane_places = self.lane_places(k, rows.k_tiles());
        for j in 0..rows.k_tiles() {
            k.stmatrix(self.place(&lane_places, j), rows.fragment(0, j));
        }
    }

    /// Reads the first `tiles` 16×16 tiles of the rows.
    pub fn read(&self, k: &mut Builder, tiles: u32) -> Vec<[R32; 4]> {
        let lane_places = self.lane_places(k, tiles);
        (0..tiles).map(|j| k.ldmatrix(self.place(&lane_places, j))).collect()
    }

    /// The lane's addresses in the 16×16 tiles of a panel, for `tiles` tiles in all. A step of two chunks
    /// changes an address bit that the swizzle may have flipped, so the step is an XOR.
    fn lane_places(&self, k: &mut Builder, tiles: u32) -> Vec<Shared> {
        (0..WarpRows::PER_PANEL.min(tiles))
            .map(|j| Shared { base: k.xor(self.lane_place.base, 32 * j), offset: self.lane_place.offset })
            .collect()
    }

    /// The lane's address in 16×16 tile `j`.
    fn place(&self, lane_places: &[Shared], j: u32) -> Shared {
        let panel = i64::from(j / WarpRows::PER_PANEL * self.panel_bytes);
        let place = lane_places[(j % WarpRows::PER_PANEL) as usize];
        Shared { offset: place.offset + panel, ..place }
    }
}
