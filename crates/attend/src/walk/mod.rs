//! The main loop over the KV blocks, from the last block to the first.

mod blocks;
mod by_block;
mod cp_async;
mod halved;
mod main_loop;
mod overlapped;
mod shared_probs;
mod skips;
mod speculative;

pub use blocks::{Masked, Walk};
pub use by_block::{BlockOutput, OutputSums};
pub use cp_async::{Block, KvPipeline, Steps, Stream};
pub use main_loop::{LoopProducts, LoopSchedule, LoopTiles, MainLoop, Rings, TileRows};
pub use shared_probs::SharedProbs;
pub use skips::Skips;

/// Order of the steps of successive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// One block after the other.
    InTurn,
    /// The scores of the next block are issued before this block's P V. Neither depends on the other, so
    /// within one warp the tensor cores have work during the exponentials (FlashAttention-3, Algorithm 2).
    /// Keys are one block ahead of values.
    ScoresAhead,
}

/// How successive tiles of query rows follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tiles {
    /// One after the other: the first scores and the last P V of a tile run alone on the tensor cores.
    InTurn,
    /// The first scores of a tile are issued together with the last P V of the tile before it. Q has two
    /// stages, so that the next queries have already arrived.
    Overlapped,
}

impl Tiles {
    /// Number of stages of Q.
    pub const fn query_stages(self) -> u32 {
        match self {
            Tiles::InTurn => 1,
            Tiles::Overlapped => 2,
        }
    }
}
