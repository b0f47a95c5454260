//! A warp's fragments into a swizzled tile.

use ptx::{Builder, Shared};

use crate::{ProbTile, SwizzledTile, Threads};

/// 16 rows of a [`SwizzledTile`] that a warp writes by `stmatrix`.
#[derive(Clone, Copy, Debug)]
pub struct WarpRows {
    /// Where the lane's row of a 16×16 tile begins, and its chunk of the first.
    lane_place: Shared,
    panel_bytes: u32,
}

impl WarpRows {
    /// Rows of a warp.
    pub const ROWS: u32 = 16;

    /// The rows of `tile` from `first` on, which is at a multiple of 1024 bytes, as is each 8 rows' first.
    pub fn new(k: &mut Builder, tile: SwizzledTile, first: Shared, threads: &Threads) -> WarpRows {
        // Lanes 0–7 and 8–15 have the rows of the left half of a 16×16 tile, the others those of the right
        // (PTX ISA, "stmatrix").
        let row = k.and(threads.lane, 15);
        let start = k.shared_index(first, row, SwizzledTile::ROW_BYTES);
        let right = k.shr_u(threads.lane, 4);
        let in_eight = k.and(threads.lane, 7);
        let chunk = k.xor(right, in_eight);
        let lane_place = k.shared_index(start, chunk, 16);
        WarpRows { lane_place, panel_bytes: tile.panel_bytes() }
    }

    /// Writes them.
    pub fn write(&self, k: &mut Builder, rows: &ProbTile) {
        let per_panel = SwizzledTile::PANEL / 16;
        // A step of two chunks is a bit of the address that the swizzle has left alone or turned.
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
