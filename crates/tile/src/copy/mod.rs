//! Copies of tiles between global memory, shared memory and registers.

mod added;
mod async_copy;
mod bulk;
mod fragments;
mod pages;
mod quad;
mod row_stream;
mod rows;
mod tma;
mod transpose;
mod warp_rows;

pub use added::{AddedRows, add_rows};
pub use async_copy::{CopyMode, TileCopy};
pub use bulk::BulkStore;
pub use fragments::{RowStore, store_fragments, store_fragments_at};
pub use pages::{PagedRows, RowPages};
pub use quad::QuadTransposition;
pub use row_stream::RowStream;
pub use rows::{RowsOut, store_rows, store_rows_in_f32};
pub use tma::TensorRows;
pub use transpose::ByteTranspose;
pub use warp_rows::WarpRows;
