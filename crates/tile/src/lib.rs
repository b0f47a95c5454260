//! The vocabulary of tiles: everything that emits more than one instruction.
//!
//! A kernel is written in tiles of rows, and this crate turns them into lanes, addresses and instructions:
//! [`TileLayout`] places a tile in shared memory without bank conflicts, [`TileCopy`] fills it from global
//! memory, [`MatrixReader`] hands it to the tensor cores, [`AccTile`] and [`OnlineSoftmax`] hold what stays
//! in registers, [`Bound`] says which blocks of keys a CTA visits, and [`KvPipeline`] visits them while later
//! ones are on their way.
//!
//! On sm_90a, [`SwizzledTile`] places a tile where TMA writes and `wgmma` reads it, [`Roles`] splits a CTA
//! into a producer and consumers, [`TileRing`] is a ring of stages with the full and empty mbarriers of its
//! [`Handover`], [`Visits`] is a consumer's loop over the blocks of keys, and [`Scheduler`] gives persistent
//! CTAs their tiles.

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
