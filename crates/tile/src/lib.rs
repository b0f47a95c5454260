//! Building blocks above single instructions: tiles, copies, products, pipelines and tile schedulers.
//!
//! A kernel is written in tiles of rows, and this crate translates them to lanes, addresses and instructions:
//! [`TileLayout`] places a tile in shared memory without bank conflicts, [`TileCopy`] fills it from global
//! memory, [`MatrixReader`] reads it as tensor-core operands, and [`AccTile`] holds accumulators in
//! registers.
//!
//! On sm_90a, [`SwizzledTile`] is the shared-memory layout that TMA writes and `wgmma` reads, [`Roles`]
//! splits a CTA into a producer warpgroup and consumer warpgroups, [`TileRing`] is a ring of stages with the
//! full and empty mbarriers of its [`Pipeline`], and [`TileScheduler`] assigns tiles to persistent CTAs.

mod cluster;
mod copy;
mod divide;
mod layout;
mod named_barriers;
mod pipeline;
mod product;
mod schedule;

pub use cluster::Cluster;
pub use copy::{
    AddedRows, BulkStore, ByteTranspose, CopyMode, PagedRows, QuadTransposition, RowPages, RowStore,
    RowStream, RowsOut, TensorRows, TileCopy, WarpRows, add_rows, store_fragments, store_fragments_at,
    store_rows, store_rows_in_f32,
};
pub use divide::{Divisor, divide};
pub use layout::{
    AccTile, Fragment, OperandTile, OperandType, SwizzledTile, Threads, TileLayout, WARP_VECTOR_BYTES,
    column_of_byte, warp_vectors,
};
pub use pipeline::{
    Consumer, Handover, Mbarriers, PingPong, Pipeline, PipelineState, Relay, Roles, Supply, TileRing,
    TileStream, Turns, WarpgroupPair, WarpgroupVote,
};
pub use product::{
    Accumulate, Group, MatrixReader, MmaType, Ones, OpenTile, OperandA, OperandB, PairSum, Products,
    SharedMatrix, Sign, WARPGROUP_ROWS, WARPGROUP_THREADS, WarpSum, mma_ab, mma_ab_apart, mma_ab_scaled,
    mma_ab_widened, mma_abt, mma_abt_onto, mma_abt_widened, row_dots,
};
pub use schedule::{
    COUNTER_BYTES, Handout, LastWave, Locate, Pieces, Spans, StreamK, Tail, TileBroadcast, TileCursor,
    TileGrid, TileOrder, TilePart, TileScheduler, WorkTile, add_one,
};
