//! Tile schedulers: which CTA computes which tiles, and in which order.

mod broadcast;
mod grid;
mod scheduler;
mod stream_k;

pub use broadcast::{COUNTER_BYTES, Mailbox, add_one};
pub use grid::{TileGrid, TileOrder, WorkTile};
pub use scheduler::{Handout, Scheduler, Turn};
pub use stream_k::{LastRound, Part, Shares, Tail};
