//! The large-grid forward family of sm_90a: persistent, warp-specialised, products by `wgmma`, tiles by TMA.
//!
//! One CTA a multiprocessor takes tile after tile of `64 · consumers` query rows of one head. Its first
//! warpgroup only feeds: one thread requests queries, keys and values into rings of `stages` tiles. Each
//! other warpgroup owns 64 rows and walks the keys in blocks of `block_n`, from the last to the first: S = Q
//! Kᵀ of a block is in flight together with O += P V of the block before it, and the softmax of a block runs
//! beside the tail of both (FlashAttention-3, Algorithm 2).
//!
//! Genes change that: several CTAs a multiprocessor; pairs of CTAs on neighbouring tiles that request every
//! block together and get it by multicast; the rows of all query heads of a group in one tile; warpgroups
//! that let the blocks pass which their own rows do not see, and halve the last one they do; O by TMA while
//! the next tile is computed; the tiles of the last round in pieces, of which every CTA takes one.
//!
//! Baked into the code: dtype, head dimensions, mask, group size, output row stride, whether `block_n`
//! divides `seq_kv`, the sign of the scale, and the plan. Parameters of the launch: tensor maps, pointers,
//! strides, lengths, the scale; so one kernel serves all lengths of its kind.

mod check;
mod default;
mod emit;
mod launch;
mod plan;
mod rows;
mod store;

pub use plan::{Diagonal, Ends, Probabilities, Softmax, Store, WgmmaPlan};
