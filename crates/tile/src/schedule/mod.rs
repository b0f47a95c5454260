//! Tile schedulers: which CTA computes which tiles, and in which order.

mod broadcast;
mod grid;
mod scheduler;
mod stream_k;

pub use broadcast::{COUNTER_BYTES, TileBroadcast, add_one};
pub use grid::{Locate, Spans, TileGrid, TileOrder, WorkTile};
pub use scheduler::{Handout, TileCursor, TileScheduler};
pub use stream_k::{LastWave, Pieces, StreamK, Tail, TilePart};
