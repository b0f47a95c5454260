//! Layouts of tiles: the place of each element in shared memory or in the registers of a warp, and the thread
//! that holds it.

mod fragment;
mod swizzled;
mod threads;
mod tile_layout;

pub use fragment::{
    AccTile, Fragment, OperandTile, OperandType, WARP_VECTOR_BYTES, column_of_byte, warp_vectors,
};
pub use swizzled::SwizzledTile;
pub use threads::Threads;
pub(crate) use tile_layout::CHUNK_BYTES;
pub use tile_layout::TileLayout;
