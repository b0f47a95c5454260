//! Where the elements of a tile are: in shared memory, in the registers of a warp, and which thread holds
//! them.

mod fragment;
mod swizzled;
mod threads;
mod tile_layout;

pub use fragment::{AccTile, Fragment, OperandTile, OperandType, column_of_byte};
pub use swizzled::SwizzledTile;
pub use threads::Threads;
pub(crate) use tile_layout::CHUNK_BYTES;
pub use tile_layout::TileLayout;
