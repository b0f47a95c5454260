//! The columns of keys and values that a warp loads and multiplies.

use problem::Tensor;
use tile::TileLayout;

use super::DecodePlan;
use crate::Dims;

/// Columns of K or V, in a tile of shared memory for each warp: all of them, or those of the warp among the
/// warps that divide the head dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    pub tensor: Tensor,
    /// The first column of the first warp.
    pub first: u32,
    /// Columns of a warp.
    pub columns: u32,
    /// Bytes of an element.
    pub bytes: u32,
}

/// Which tile of a stage has the values.
pub(super) fn values_tile(slices: &[Slice; 2]) -> usize {
    usize::from(slices[1].tensor == Tensor::V)
}

impl DecodePlan {
    /// Whether values are read as the first columns of the keys.
    pub(super) fn views(&self, dims: impl Into<Dims>) -> bool {
        let dims = dims.into();
        self.dim_warps > 1 && dims.v_in_k && dims.head_dim > dims.head_dim_v
    }

    /// A warp's slices, in the order of their tiles in a stage: of K and of V, or of K's columns that are V
    /// and of K's other columns.
    pub(super) fn slices(&self, dims: impl Into<Dims>) -> [Slice; 2] {
        let dims = dims.into();
        let slice = |tensor, first, end| Slice {
            tensor,
            first: first as u32,
            columns: (end - first) as u32 / self.dim_warps,
            bytes: dims.dtypes.of(tensor).bytes() as u32,
        };
        if self.views(dims) {
            return [(0, dims.head_dim_v), (dims.head_dim_v, dims.head_dim)]
                .map(|(first, end)| slice(Tensor::K, first, end));
        }
        [slice(Tensor::K, 0, dims.head_dim), slice(Tensor::V, 0, dims.head_dim_v)]
    }

    /// Columns of Q and K that a warp multiplies, and columns of O that it holds.
    pub(super) fn warp_columns(&self, dims: impl Into<Dims>) -> [u32; 2] {
        let dims = dims.into();
        [dims.head_dim, dims.head_dim_v].map(|dim| dim as u32 / self.dim_warps)
    }

    /// A warp's tile of a slice.
    pub(super) fn layout(&self, slice: Slice) -> TileLayout {
        let tile = TileLayout::of_bytes(self.warp_keys, slice.bytes * slice.columns);
        if self.tma { tile.in_panels() } else { tile }
    }
}
