//! Attention on tiles: the online softmax, the band of visible keys, the main loop over KV blocks, the merge
//! of split keys, and score programs.
//!
//! The crate builds attention from the tiles, products and pipelines of `tile`. [`Bound`] gives the KV blocks
//! that a CTA visits, and [`Masker`] hides the keys that a row does not see. [`OnlineSoftmax`] holds the row
//! max and the row sums. Two types implement the main loop: [`KvPipeline`] on every GPU, with a ring of
//! `cp.async` stages, and [`MainLoop`] on sm_90a, in a consumer warpgroup with keys and values loaded by TMA.
//! [`ScoreGradient`] is the gradient of the softmax, and [`BlockRing`] the loop of the backward pass.
//! [`Exchange`], [`StreamKMerge`], [`Partials`] and [`OnlineSoftmax::merge`] merge results over different
//! keys.

mod band;
mod chain;
mod continued;
mod descale;
mod dropout;
mod gradient;
mod lengths;
mod lse;
mod packing;
mod score;
mod sinks;
mod softmax;
mod split;
mod walk;

pub use band::{
    After, BlockList, BlockLists, Bound, Coverage, Hides, KeyBand, ListWriter, Lower, Masker, RowRange,
};
pub use chain::{BlockScores, ScoreChain};
pub use continued::{MergedRows, load_lse_before, merge_rows};
pub use descale::{BlockFactors, ScoreFactors, ValueFactors, WarpKeys, accepted_score_factor};
pub use dropout::{DropoutMask, DropoutParams, DropoutPlace};
pub use gradient::{BlockRing, QueryNumbers, RingBlock, ScoreGradient, SoftcapSlope};
pub use lengths::{Lengths, Sequence, SequenceRows, SequenceTiles, SideLengths};
pub use lse::{store_lse, store_lse_at};
pub use packing::Packing;
pub use score::{
    Elements, GradientPrograms, ProgramCode, ProgramParams, RowPrograms, ScorePrograms, Softcap,
    StagedParams, StagedTables, TableParams, Tanh, TileMask, TileRead, Words, half_of,
};
pub use sinks::Sinks;
pub use softmax::{
    Chains, DeferredRescale, Finished, LaneMaxima, OnlineSoftmax, Rescale, SpeculativeMax, Sums,
    accepted_value_factor,
};
pub use split::{
    Division, Exchange, FixedMerge, LineMerge, Partials, SharedRowMax, SplitRow, StreamKMerge,
    WarpgroupPlace, merge_bytes,
};
pub use walk::{
    Block, BlockOutput, KvPipeline, LoopProducts, LoopSchedule, LoopTiles, MainLoop, Masked, Order,
    OutputSums, Rings, SharedProbs, Skips, Steps, Stream, TileRows, Tiles, Walk,
};
