//! Writes a warp's fragments into a swizzled tile.

use ptx::{Builder, Shared};

use crate::{OperandTile, SwizzledTile, Threads};

/// 16 rows of a [`SwizzledTile`] that a warp writes with `stmatrix`.
#[derive(Clone, Copy, Debug)]
pub struct WarpRows {
    /// Address of the lane's row in the first 16×16 tile, with the swizzled chunk.
    lane_place: Shared,
    panel_bytes: u32,
}

impl WarpRows {
    /// Rows of a warp.
    pub const ROWS: u32 = 16;

    /// The rows of `tile` from `first` on. `first` is a multiple of 1024 bytes, the size of a swizzle atom of
    /// 8 rows.
    pub fn new(k: &mut Builder, tile: SwizzledTile, first: Shared, threads: &Threads) -> WarpRows {
        // Lanes 0–15 address the rows of the left half of a 16×16 tile, lanes 16–31 those of the right half
        // (PTX ISA, "stmatrix").
        let row = k.and(threads.lane, 15);
        let start = k.shared_index(first, row, SwizzledTile::ROW_BYTES);
        let right = k.shr_u(threads.lane, 4);
        let in_eight = k.and(threads.lane, 7);
        let chunk = k.xor(right, in_eight);
        let lane_place = k.shared_index(start, chunk, 16);
        WarpRows { lane_place, panel_bytes: tile.panel_bytes() }
    }

    pub fn write(&self, k: &mut Builder, rows: &OperandTile) {
        let per_panel = SwizzledTile::PANEL / 16;
        // A step of two chunks changes an address bit that the swizzle may have flipped, so the step is an
        // XOR.
        let lane_places: Vec<Shared> = (0..per_panel.min(rows.k_tiles()))
            .map(|j| Shared { base: k.xor(self.lane_place.base, 32 * j), offset: self.lane_place.offset })
            .collect();
        for j in 0..rows.k_tiles() {
            let panel = i64::from(j / per_panel * self.panel_bytes);
            let place = lane_places[(j % per_panel) as usize];
            k.stmatrix(Shared { offset: place.offset + panel, ..place }, rows.fragment(0, j));
        }
    }
}
