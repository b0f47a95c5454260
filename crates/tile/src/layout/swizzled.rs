//! The shared-memory layout that TMA writes and `wgmma` reads without bank conflicts: rows of 16-bit elements
//! in 128-byte-swizzled panels.

/// A tile of rows of 16-bit elements in shared memory: `[columns / 64 panels][rows][64 elements]`. The eight
/// 16-byte chunks of a panel's row are permuted by the last three bits of the row (128-byte swizzle). Columns
/// beyond the tensor's width are zero up to the end of the last panel.
///
/// The tile begins at a multiple of [`SwizzledTile::ALIGNMENT`], since the hardware swizzles address bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SwizzledTile {
    /// Rows, a multiple of 8.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub columns: u32,
    /// CTAs of a cluster that request an equal part of the rows each, a power of two; 1 where one CTA
    /// requests all rows.
    pub parts: u32,
    /// Number of packed heads (pack-GQA): this many consecutive rows are one sequence position of
    /// neighbouring heads; 1 without packing.
    pub heads: u32,
    /// Whether tiles are loaded from rows whose end the load states ([`SwizzledTile::ragged_at`]).
    pub ragged: bool,
    /// Whether the tensor's columns end within a panel ([`SwizzledTile::of_width`]).
    pub clipped: bool,
}

impl SwizzledTile {
    /// Columns of a panel, which make 128 bytes.
    pub const PANEL: u32 = 64;
    /// Bytes of a row of a panel.
    pub const ROW_BYTES: u32 = 128;
    /// Alignment of a tile's address: the swizzle atom of eight 128-byte rows.
    pub const ALIGNMENT: u32 = 8 * SwizzledTile::ROW_BYTES;

    /// A tile of `rows` × `columns`.
    pub const fn new(rows: u32, columns: u32) -> SwizzledTile {
        SwizzledTile { rows, columns, parts: 1, heads: 1, ragged: false, clipped: false }
    }

    /// The tile with its rows divided among `parts` CTAs. Each part has a multiple of 8 rows.
    #[must_use]
    pub const fn in_parts(self, parts: u32) -> SwizzledTile {
        SwizzledTile { parts, ..self }
    }

    /// The tile with the rows of `heads` heads packed. `heads` divides the tile's rows and the tensor's
    /// heads.
    #[must_use]
    pub const fn packed(self, heads: u32) -> SwizzledTile {
        SwizzledTile { heads, ..self }
    }

    /// The tile with the end of the rows stated by each load.
    #[must_use]
    pub const fn ragged(self, ragged: bool) -> SwizzledTile {
        SwizzledTile { ragged, ..self }
    }

    /// The tile of a tensor with `width` columns, at most those of the tile. The others are zeros.
    #[must_use]
    pub const fn of_width(self, width: u32) -> SwizzledTile {
        SwizzledTile { clipped: !width.is_multiple_of(SwizzledTile::PANEL), ..self }
    }

    pub const fn panels(self) -> u32 {
        self.columns.div_ceil(SwizzledTile::PANEL)
    }

    /// Bytes from one panel to the next.
    pub const fn panel_bytes(self) -> u32 {
        self.rows * SwizzledTile::ROW_BYTES
    }

    /// Bytes of the tile.
    pub const fn bytes(self) -> u32 {
        self.panels() * self.panel_bytes()
    }

    /// Bytes that a load brings, which it counts at its mbarrier: rows and columns beyond the tensor's end
    /// included, but not the rows in which no position of packed heads fits.
    pub const fn loaded_bytes(self) -> u32 {
        self.panels() * (self.rows / self.heads * self.heads) * SwizzledTile::ROW_BYTES
    }

    /// Byte offset of an element from the tile's start.
    pub const fn offset(self, row: u32, column: u32) -> u32 {
        let (panel, column) = (column / SwizzledTile::PANEL, column % SwizzledTile::PANEL);
        let chunk = (column / 8) ^ (row % 8);
        panel * self.panel_bytes() + row * SwizzledTile::ROW_BYTES + chunk * 16 + column % 8 * 2
    }

    /// Whether one TMA copy brings all panels. The tensor map then splits the columns into two dimensions, so
    /// that a box holds one panel after the other. Where the width is not a multiple of a panel, the last
    /// panel would read into the next row, so each panel is a copy of its own.
    pub(crate) const fn whole(self) -> bool {
        let plain = self.heads == 1 && self.parts == 1 && !self.ragged && !self.clipped;
        self.columns.is_multiple_of(SwizzledTile::PANEL) && plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_has_a_place_of_its_own_and_eight_rows_meet_all_banks() {
        for columns in [8, 64, 72, 96, 128, 256] {
            let tile = SwizzledTile::new(24, columns);
            let mut taken = vec![false; (tile.bytes() / 16) as usize];
            for row in 0..tile.rows {
                for column in (0..columns).step_by(8) {
                    let at = (tile.offset(row, column) / 16) as usize;
                    assert!(!std::mem::replace(&mut taken[at], true), "{tile:?} row {row} column {column}");
                }
            }
            for first in (0..tile.rows).step_by(8) {
                let banks = (first..first + 8).fold(0, |all, row| all | 1 << (tile.offset(row, 0) / 16 % 8));
                assert_eq!(banks, 0xFF, "{tile:?} rows from {first}");
            }
        }
    }
}
