//! Building blocks above single instructions: tiles, pipelines, the online softmax and tile schedulers.
//!
//! A kernel is written in tiles of rows, and this crate turns them into lanes, addresses and instructions:
//! [`TileLayout`] places a tile in shared memory without bank conflicts, [`TileCopy`] fills it from global
//! memory, [`MatrixReader`] reads it as tensor-core operands, [`AccTile`] and [`OnlineSoftmax`] hold the
//! state in registers, [`Bound`] gives the KV blocks that a CTA visits, and [`KvPipeline`] visits them while
//! later blocks are in flight.
//!
//! On sm_90a, [`SwizzledTile`] is the shared-memory layout that TMA writes and `wgmma` reads, [`Roles`]
//! splits a CTA into a producer warpgroup and consumer warpgroups, [`TileRing`] is a ring of stages with the
//! full and empty mbarriers of its [`Handover`], [`Visits`] is a consumer warpgroup's main loop over the KV
//! blocks, and [`Scheduler`] assigns tiles to persistent CTAs.

mod bulk_out;
mod copy;
mod divide;
mod epilogue;
mod exchange;
mod exp2;
mod fragment;
mod fragments_out;
mod gemm;
mod handover;
mod layout;
mod mailbox;
mod mask;
mod mbarrier;
mod merge;
mod ones;
mod packing;
mod partials;
mod peers;
mod pipeline;
mod reader;
mod roles;
mod scheduler;
mod shared_probs;
mod skips;
mod softcap;
mod softmax;
mod softmax_overlapped;
mod tail;
mod threads;
mod tile_grid;
mod tile_stream;
mod tma;
mod visits;
mod warp_rows;
mod wgmma;

pub use bulk_out::BulkStore;
pub use copy::{CopyMode, TileCopy};
pub use divide::divide;
pub use epilogue::{store_lse, store_rows};
pub use exchange::{Division, Exchange, Place};
pub use fragment::{AccTile, Fragment, ProbTile};
pub use fragments_out::{RowStore, store_fragments, store_fragments_at, store_lse_at};
pub use gemm::{KeyTile, Queries, Sign, mma_pv, mma_qk};
pub use handover::{Handover, TileRing};
pub use layout::TileLayout;
pub use mailbox::{COUNTER_BYTES, Mailbox};
pub use mask::{After, Bound, Coverage, KeyBand, Lower, Masker, RowRange};
pub use mbarrier::{Mbarriers, Ring};
pub use merge::merge_bytes;
pub use ones::{Ones, Sums};
pub use packing::Packing;
pub use partials::Partials;
pub use peers::Peers;
pub use pipeline::{Block, KvPipeline, Order, Steps, Stream};
pub use reader::{MatrixReader, OpenTile};
pub use roles::{Agreement, Circle, Consumer, Roles, Turns};
pub use scheduler::{Handout, Scheduler, Turn};
pub use shared_probs::SharedProbs;
pub use skips::Skips;
pub use softcap::Softcap;
pub use softmax::{Finished, LaneMaxima, OnlineSoftmax, Rescale};
pub use softmax_overlapped::{Chains, Due};
pub use tail::{LastRound, Part, Shares, Tail};
pub use threads::Threads;
pub use tile_grid::{TileGrid, TileOrder, WorkTile};
pub use tile_stream::{Supply, TileStream};
pub use tma::{SwizzledTile, TensorRows};
pub use visits::{BlockSteps, Blocks, Guess, Masked, Tiles, Visits};
pub use warp_rows::WarpRows;
pub use wgmma::{Accumulate, Group, Products, SharedMatrix, WARPGROUP_ROWS, WARPGROUP_THREADS};
