//! The forward family for small grids on Hopper (sm_90a), optimised for latency.
//!
//! A cluster of CTAs takes 64 query rows (or a small multiple) of one head, or of all query heads of a group.
//! Each of its warpgroups takes one part of the keys. A warpgroup requests everything at once by TMA, keeps
//! its scores in registers, and runs no loop: S = Q Kᵀ is issued as keys arrive, the softmax runs over the
//! scores in few steps, P V takes P from registers, and the parts are merged through distributed shared
//! memory. Where the keys do not fit at once, KV blocks stream through a ring instead (`stream.rs`).
//!
//! Baked into the code: dtype, head dimensions, mask, group size, row strides, whether the parts are whole
//! and whether all keys fit the stages (then nothing is refilled), the offset of the diagonal from the tiles,
//! `heads_q` for an LSE, and the plan. Launch parameters: tensor maps of Q, K and V, the output's pointer and
//! strides, `seq_q`, `seq_kv` and the scale. A kernel serves another problem only if the emitted text is
//! identical: compare modules, not shapes.

mod block;
mod default;
mod emit;
mod family;
mod loads;
mod paths;
mod plan;
mod store;
mod stream;

pub use plan::{Merge, Requests, RowOrder, Scores, SmallPlan};
