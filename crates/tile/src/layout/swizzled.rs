//! The shared-memory layout that TMA writes and `wgmma` reads without bank conflicts: rows of 16-bit or 8-bit
//! elements in swizzled panels.

use ptx::Swizzle;

/// A tile of rows of 16-bit elements in shared memory: `[columns / 64 panels][rows][64 elements]`. The eight
/// 16-byte chunks of a panel's row are permuted by the last three bits of the row (128-byte swizzle). Columns
/// beyond the tensor's width are zero up to the end of the last panel.
///
/// A panel of 8-bit elements has 128 columns. A tile of at most 64 columns has panels of 64 bytes, whose four
/// chunks are permuted by bits 1 and 2 of the row (64-byte swizzle).
///
/// The tile begins at a multiple of [`SwizzledTile::ALIGNMENT`], since the hardware swizzles address bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SwizzledTile {
    /// Rows, a multiple of 8.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub columns: u32,
    /// Number of CTAs of a cluster that each request an equal part of the rows, a power of two; 1 if one CTA
    /// requests all rows.
    pub parts: u32,
    /// Number of boxes in which the rows are loaded, each from a place of its own
    /// ([`SwizzledTile::load_box`]); 1 if one copy loads all rows of a panel.
    pub boxes: u32,
    /// Number of packed heads (pack-GQA): this many consecutive rows are one sequence position of
    /// neighbouring heads; 1 without packing.
    pub heads: u32,
    /// Whether each load states the end of the rows ([`SwizzledTile::ragged_at`]).
    pub ragged: bool,
    /// Bytes of an element: 2 or 1.
    pub element: u32,
    /// Whether successive tiles of a tensor follow each other along its columns. A load then states the first
    /// column; the rows are all rows of the tensor.
    pub along_columns: bool,
    /// Whether the tensor's columns end within a panel ([`SwizzledTile::of_width`]).
    pub clipped: bool,
}

impl SwizzledTile {
    /// Columns of a panel of 16-bit elements, which make 128 bytes.
    pub const PANEL: u32 = 64;
    /// Bytes of a row of a panel of 16-bit elements.
    pub const ROW_BYTES: u32 = 128;
    /// Alignment of a tile's address: the swizzle atom of eight 128-byte rows.
    pub const ALIGNMENT: u32 = 8 * SwizzledTile::ROW_BYTES;

    /// A tile of `rows` × `columns` elements of 16 bits.
    pub const fn new(rows: u32, columns: u32) -> SwizzledTile {
        SwizzledTile {
            rows,
            columns,
            parts: 1,
            boxes: 1,
            heads: 1,
            ragged: false,
            element: 2,
            along_columns: false,
            clipped: false,
        }
    }

    /// The tile with elements of `bytes` bytes: 2 or 1.
    #[must_use]
    pub const fn of_bytes(self, bytes: u32) -> SwizzledTile {
        SwizzledTile { element: bytes, ..self }
    }

    /// The tile, with successive tiles along the columns of a tensor.
    #[must_use]
    pub const fn along_columns(self) -> SwizzledTile {
        SwizzledTile { along_columns: true, ..self }
    }

    /// The tile with its rows divided among `parts` CTAs. Each part has a multiple of 8 rows.
    #[must_use]
    pub const fn in_parts(self, parts: u32) -> SwizzledTile {
        SwizzledTile { parts, ..self }
    }

    /// The tile with its rows in `boxes` boxes. Each box has a multiple of 8 rows.
    #[must_use]
    pub const fn in_boxes(self, boxes: u32) -> SwizzledTile {
        SwizzledTile { boxes, ..self }
    }

    /// The tile with the rows of `heads` heads packed. `heads` divides the tile's rows and the tensor's
    /// heads.
    #[must_use]
    pub const fn packed(self, heads: u32) -> SwizzledTile {
        SwizzledTile { heads, ..self }
    }

    /// The tile, with the end of the rows stated by each load.
    #[must_use]
    pub const fn ragged(self, ragged: bool) -> SwizzledTile {
        SwizzledTile { ragged, ..self }
    }

    /// The tile for a tensor with `width` columns, at most as many as the tile has. The remaining columns are
    /// zero. The element size must be set before.
    #[must_use]
    pub const fn of_width(self, width: u32) -> SwizzledTile {
        SwizzledTile { clipped: !width.is_multiple_of(self.panel()), ..self }
    }

    /// Bytes of a row of a panel: the range within which the swizzle permutes chunks.
    pub const fn row_bytes(self) -> u32 {
        if self.element == 1 && self.columns <= 64 { 64 } else { SwizzledTile::ROW_BYTES }
    }

    /// Columns of a panel.
    pub const fn panel(self) -> u32 {
        self.row_bytes() / self.element
    }

    /// The permutation of the chunks in a panel's row.
    pub const fn swizzle(self) -> Swizzle {
        if self.row_bytes() == 64 { Swizzle::Bytes64 } else { Swizzle::Bytes128 }
    }

    pub const fn panels(self) -> u32 {
        self.columns.div_ceil(self.panel())
    }

    /// Rows of a box.
    pub const fn box_rows(self) -> u32 {
        self.rows / self.boxes
    }

    /// Bytes from one panel to the next.
    pub const fn panel_bytes(self) -> u32 {
        self.rows * self.row_bytes()
    }

    /// Bytes of the tile.
    pub const fn bytes(self) -> u32 {
        self.panels() * self.panel_bytes()
    }

    /// Bytes that a load adds to its mbarrier. Rows and columns beyond the tensor's end count, but rows that
    /// are too few for one position of packed heads do not.
    pub const fn loaded_bytes(self) -> u32 {
        self.panels() * (self.rows / self.heads * self.heads) * self.row_bytes()
    }

    /// Byte offset of an element from the tile's start.
    pub const fn offset(self, row: u32, column: u32) -> u32 {
        let (panel, byte) = (column / self.panel(), column % self.panel() * self.element);
        let pattern = row * self.row_bytes() / 128 % (self.row_bytes() / 16);
        let chunk = (byte / 16) ^ pattern;
        panel * self.panel_bytes() + row * self.row_bytes() + chunk * 16 + byte % 16
    }

    /// Whether one TMA copy loads all panels. The tensor map then splits the columns into two dimensions, so
    /// that a box holds one panel after the other. If the width is not a multiple of a panel, the last panel
    /// would read into the next row, so each panel needs its own copy.
    pub(crate) const fn whole(self) -> bool {
        let plain = self.heads == 1 && self.parts == 1 && !self.ragged && !self.along_columns;
        self.columns.is_multiple_of(self.panel()) && plain && !self.clipped && self.boxes == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_has_a_place_of_its_own_and_eight_rows_meet_all_banks() {
        for (columns, element) in [8, 64, 72, 96, 128, 256].into_iter().flat_map(|n| [(n, 2), (2 * n, 1)]) {
            let tile = SwizzledTile::new(24, columns).of_bytes(element);
            let mut taken = vec![false; (tile.bytes() / 16) as usize];
            for row in 0..tile.rows {
                for column in (0..columns).step_by(16 / element as usize) {
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
