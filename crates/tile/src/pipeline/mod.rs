//! Warp specialisation: rings of stages between a producer and consumers, and the order of the consumers.

mod mbarrier;
mod ping_pong;
mod ring;
mod roles;
mod stream;
mod vote;

pub use mbarrier::{Mbarriers, Ring};
pub use ping_pong::{Circle, Turns};
pub use ring::{Handover, TileRing};
pub use roles::{Consumer, Roles};
pub use stream::{Supply, TileStream};
pub use vote::Agreement;
