//! Warp specialisation: rings of stages between a producer and consumers, and the order of the consumers.

mod barriers;
mod handover;
mod mbarrier;
mod pair;
mod ping_pong;
mod relay;
mod roles;
mod stream;
mod vote;

pub use barriers::{Pipeline, TileRing};
pub use handover::Handover;
pub use mbarrier::{Mbarriers, PipelineState};
pub use pair::WarpgroupPair;
pub use ping_pong::{PingPong, Turns};
pub use relay::Relay;
pub use roles::{Consumer, Roles};
pub use stream::{Supply, TileStream};
pub use vote::WarpgroupVote;
