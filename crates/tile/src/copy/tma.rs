//! TMA copies of [`SwizzledTile`]s between global and shared memory, and the tensor maps that describe them.

use crate::{Cluster, SwizzledTile};
use ptx::{
    Builder, BulkOptions, Element, L2Promotion, Pointer, R32, Shared, Src, TensorMapPtr, TensorMapSpec,
};

/// A tensor `[batch, head, row, column]` in global memory whose columns are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRows {
    /// Index of the tensor's buffer in the launch contract.
    pub buffer: usize,
    /// Bytes from the buffer's start to element 0.
    pub offset: u64,
    /// Type of the elements.
    pub element: Element,
    /// Batch entries, heads, rows and columns.
    pub extents: [u64; 4],
    /// Distance in bytes between neighbouring batch entries, heads and rows. The stride of an extent of 1 is
    /// arbitrary.
    pub strides: [u64; 3],
}

/// Number of rows of a ragged tensor map, and the coordinate that moves the address back by as many rows.
const RAGGED_ROWS: u32 = 1 << 30;
/// Extent of the dimensions of a ragged tensor map that only shift addresses. It exceeds every coordinate.
const SHIFTS: u64 = 0x7fff_0000;
/// `RAGGED_ROWS` steps of this many bytes are 0 modulo 2^64.
const FULL_TURN: u64 = 1 << 34;

impl SwizzledTile {
    /// Tensors with ragged tiles must have a row stride in bytes below this limit.
    pub const RAGGED_STRIDE_LIMIT: u64 = FULL_TURN;
    /// The sum of start and length in [`SwizzledTile::ragged_at`] must be below this limit.
    pub const RAGGED_END_LIMIT: u64 = SHIFTS;

    /// Row and batch coordinates for [`SwizzledTile::load`] and [`SwizzledTile::store`] of a ragged tile: the
    /// rows from `row` on of a sequence of `len` rows that begins at row `start` of the tensor. Rows from
    /// `len` on are loaded as zeros, and not stored.
    ///
    /// The map has two dimensions in addition to those of the tensor, which shift the address by rows. The
    /// row coordinate is counted so that row `len` is the first one beyond the extent of 2^30 rows. The end
    /// of the sequence and 2^30 steps back, modulo 2^64, cancel the difference (Triton, `ragged_tma.py`).
    pub fn ragged_at(k: &mut Builder, row: R32, [start, len]: [R32; 2]) -> [R32; 2] {
        let row = k.add(row, RAGGED_ROWS);
        [k.sub(row, len), k.add(start, len)]
    }

    /// The tensor map with which [`SwizzledTile::load`] copies tiles of `tensor`.
    pub fn map(self, tensor: &TensorRows) -> TensorMapSpec {
        let [batch, heads, rows, columns] = tensor.extents;
        let [of_batch, of_head, of_row] = tensor.strides;
        let (panel, row_bytes) = (u64::from(self.panel()), self.row_bytes().into());
        let heads_together = u64::from(self.heads);
        let (extents, strides, box_extents) = if self.ragged {
            // The distance between batch entries is a whole number of rows, so the start of a sequence
            // includes the batch entry.
            (
                vec![columns, RAGGED_ROWS.into(), heads, SHIFTS, SHIFTS],
                vec![of_row, of_head, of_row, FULL_TURN - of_row],
                vec![self.panel(), self.box_rows(), 1, 1, 1],
            )
        } else if self.heads > 1 {
            (
                vec![columns, heads_together, rows, heads / heads_together, batch],
                vec![of_head, of_row, of_head * heads_together, of_batch],
                vec![self.panel(), self.heads, self.rows / self.heads, 1, 1],
            )
        } else if self.whole() {
            (
                vec![panel, rows, columns / panel, heads, batch],
                vec![of_row, row_bytes, of_head, of_batch],
                vec![self.panel(), self.rows, self.panels(), 1, 1],
            )
        } else {
            (
                vec![columns, rows, heads, batch],
                vec![of_row, of_head, of_batch],
                vec![self.panel(), self.box_rows() / self.parts, 1, 1],
            )
        };
        TensorMapSpec {
            buffer: tensor.buffer,
            offset: tensor.offset,
            element: tensor.element,
            extents,
            strides,
            box_extents,
            swizzle: self.swizzle(),
            l2_promotion: L2Promotion::default(),
            wraps: self.ragged,
        }
    }

    /// Loads the tile that begins at `row` of a head asynchronously. With packed heads, `head` is the index
    /// of the group. For a ragged tile, `row` and `batch` come from [`SwizzledTile::ragged_at`]. For a tile
    /// along the columns, `row` is the first column, and all rows are loaded. `barrier` counts
    /// [`SwizzledTile::loaded_bytes`]. Run by one thread.
    pub fn load(
        self,
        k: &mut Builder,
        to: Shared,
        map: TensorMapPtr,
        [row, head, batch]: [Src<R32>; 3],
        barrier: Shared,
    ) {
        debug_assert!(self.boxes == 1, "each box has a place of its own");
        if self.whole() {
            let place = [0.into(), row, 0.into(), head, batch];
            return k.tma_load(to, map, &place, barrier, BulkOptions::default());
        }
        if self.along_columns {
            return self.load_at(k, to, map, [row, 0.into(), head, batch], barrier);
        }
        self.load_box(k, (to, 0), map, [row, head, batch], barrier);
    }

    /// Loads box `index` of the tile at `to` asynchronously, from the place that [`SwizzledTile::load`]
    /// describes. Run by one thread.
    pub fn load_box(
        self,
        k: &mut Builder,
        (to, index): (Shared, u32),
        map: TensorMapPtr,
        [row, head, batch]: [Src<R32>; 3],
        barrier: Shared,
    ) {
        debug_assert!(!self.whole() && !self.along_columns, "the map has boxes of a panel");
        let options = BulkOptions::default();
        let to = to.at(i64::from(index * self.box_rows() * self.row_bytes()));
        for panel in 0..self.panels() {
            let to = to.at(i64::from(panel * self.panel_bytes()));
            let column = Src::from(panel * self.panel());
            let (row, head, batch) = (row.clone(), head.clone(), batch.clone());
            if self.ragged {
                self.load_ragged(k, to, map, [column, row, head, batch], barrier);
            } else if self.heads > 1 {
                k.tma_load(to, map, &[column, 0.into(), row, head, batch], barrier, options);
            } else {
                k.tma_load(to, map, &[column, row, head, batch], barrier, options);
            }
        }
    }

    /// Loads a box of one panel of a ragged tile from `column` on asynchronously to `to`. `row` and `batch`
    /// come from [`SwizzledTile::ragged_at`]. Run by one thread.
    pub fn load_ragged(
        self,
        k: &mut Builder,
        to: Shared,
        map: TensorMapPtr,
        [column, row, head, batch]: [Src<R32>; 4],
        barrier: Shared,
    ) {
        debug_assert!(self.ragged, "the map has dimensions that shift addresses");
        let place = [column, row, head, batch, RAGGED_ROWS.into()];
        k.tma_load(to, map, &place, barrier, BulkOptions::default());
    }

    /// Loads the tile that begins at a column and a row of a matrix asynchronously, for tiles along the
    /// columns. Run by one thread.
    pub fn load_at(
        self,
        k: &mut Builder,
        to: Shared,
        map: TensorMapPtr,
        [column, row, head, batch]: [Src<R32>; 4],
        barrier: Shared,
    ) {
        debug_assert!(self.along_columns, "the map has boxes of a panel");
        for panel in 0..self.panels() {
            let to = to.at(i64::from(panel * self.panel_bytes()));
            let column =
                if panel == 0 { column.clone() } else { shifted(k, column.clone(), panel * self.panel()) };
            let place = [column, row.clone(), head.clone(), batch.clone()];
            k.tma_load(to, map, &place, barrier, BulkOptions::default());
        }
    }

    /// Stores a whole or a ragged tile at `row` of a head asynchronously, in the thread's current bulk group.
    /// For a ragged tile, `row` and `batch` come from [`SwizzledTile::ragged_at`]; rows beyond the sequence
    /// are not written. Run by one thread.
    pub fn store(self, k: &mut Builder, from: Shared, map: TensorMapPtr, [row, head, batch]: [Src<R32>; 3]) {
        if !self.ragged {
            debug_assert!(self.whole(), "a box of all panels");
            return k.tma_store(map, &[0.into(), row, 0.into(), head, batch], from);
        }
        for panel in 0..self.panels() {
            let (from, column) = (from.at(i64::from(panel * self.panel_bytes())), panel * self.panel());
            let place = [column.into(), row.clone(), head.clone(), batch.clone(), RAGGED_ROWS.into()];
            k.tma_store(map, &place, from);
        }
    }

    /// Loads this CTA's part of the tile that begins at `row` to the same address in all CTAs of the cluster
    /// by multicast. In each CTA, `barrier` counts the part; all parts together count
    /// [`SwizzledTile::bytes`]. Run by one thread of each CTA.
    pub fn load_part(
        self,
        k: &mut Builder,
        to: Shared,
        map: TensorMapPtr,
        [row, head, batch]: [Src<R32>; 3],
        barrier: Shared,
        cluster: &Cluster,
    ) {
        let rows = self.rows / self.parts;
        let options = BulkOptions { multicast: Some(cluster.mask()), policy: None };
        let to = k.shared_index(to, cluster.rank, rows * self.row_bytes());
        let before = k.mul(cluster.rank, rows);
        let (first_column, row) = if self.along_columns {
            (Some(row), before.into())
        } else {
            (None, Src::from(k.add(before, row)))
        };
        for panel in 0..self.panels() {
            let to = to.at(i64::from(panel * self.panel_bytes()));
            let column = Src::from(panel * self.panel());
            let [column, row] = match first_column.clone() {
                None => [column, row.clone()],
                Some(first) => [shifted(k, first, panel * self.panel()), before.into()],
            };
            k.tma_load(to, map, &[column, row, head.clone(), batch.clone()], barrier, options);
        }
    }
}

/// `from + by`.
fn shifted(k: &mut Builder, from: Src<R32>, by: u32) -> Src<R32> {
    let from = k.mov(from);
    k.add(from, by).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_heads_are_neighbouring_rows() {
        let tensor = TensorRows {
            buffer: 0,
            offset: 0,
            element: Element::F16,
            extents: [2, 8, 100, 128],
            strides: [1 << 20, 256, 2048],
        };
        let tile = SwizzledTile::new(64, 128).packed(4);
        let map = tile.map(&tensor);
        assert_eq!((map.check(), 2 * map.box_bytes()), (Ok(()), tile.bytes()));
        assert_eq!((map.extents, map.strides), (vec![128, 4, 100, 2, 2], vec![256, 2048, 1024, 1 << 20]));
        assert_eq!(map.box_extents, [64, 4, 16, 1, 1]);
    }

    /// 100 rows of three heads and two batch entries.
    fn rows(element: Element, columns: u64) -> TensorRows {
        let (extents, strides) = ([2, 3, 100, columns], [1 << 20, 512, 1536]);
        TensorRows { buffer: 0, offset: 0, element, extents, strides }
    }

    #[test]
    fn maps_follow_strides_and_are_accepted() {
        let tensor = |columns| TensorRows { buffer: 1, offset: 32, ..rows(Element::Bf16, columns) };
        let whole = SwizzledTile::new(64, 128).map(&tensor(128));
        assert_eq!((whole.check(), whole.box_bytes()), (Ok(()), SwizzledTile::new(64, 128).bytes()));
        assert_eq!(whole.extents, [64, 100, 2, 3, 2]);
        assert_eq!(whole.strides, [1536, 128, 512, 1 << 20]);
        // With 96 columns the second panel must not read into the next row: each panel is a copy, cut off at
        // column 96.
        let panels = SwizzledTile::new(64, 96).map(&tensor(96));
        assert_eq!((panels.check(), 2 * panels.box_bytes()), (Ok(()), SwizzledTile::new(64, 96).bytes()));
        assert_eq!(panels.extents, [96, 100, 3, 2]);
    }

    #[test]
    fn maps_of_bytes_have_panels_of_128_or_64_columns() {
        let tensor = |columns| rows(Element::U8, columns);
        for (columns, panel) in [(64, 64), (48, 64), (128, 128), (256, 128)] {
            let tile = SwizzledTile::new(64, columns as u32).of_bytes(1);
            let map = tile.map(&tensor(columns));
            assert_eq!((map.check(), map.box_bytes()), (Ok(()), tile.bytes()), "{columns}");
            assert_eq!((map.box_extents[0], map.swizzle), (panel, tile.swizzle()), "{columns}");
        }
        // Tiles of 160 columns: two boxes, of which the second reads columns of the next tile.
        let tile = SwizzledTile::new(64, 160).of_bytes(1).along_columns();
        let map = tile.map(&tensor(1000));
        assert_eq!((map.check(), 2 * map.box_bytes()), (Ok(()), tile.bytes()));
        assert_eq!((map.extents, map.box_extents), (vec![1000, 100, 3, 2], vec![128, 64, 1, 1]));
    }
}
