//! Warp specialisation: rings of stages between a producer and consumers, and the order of the consumers.

mod barriers;
mod mbarrier;
mod ping_pong;
mod roles;
mod row_stream;
mod stream;
mod vote;

pub use barriers::{Pipeline, TileRing};
pub use mbarrier::{Mbarriers, PipelineState};
pub use ping_pong::{PingPong, Turns};
pub use roles::{Consumer, Roles};
pub use row_stream::RowStream;
pub use stream::{Supply, TileStream};
pub use vote::WarpgroupVote;
