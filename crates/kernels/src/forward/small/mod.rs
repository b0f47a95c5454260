//! The forward family for small grids, latency first, on Hopper (sm_90a).
//!
//! A cluster of CTAs takes 64 query rows (or a few times as many) of one head, or of all query heads of a
//! group, and each of its warpgroups one part of the keys. Everything a warpgroup needs is requested at once
//! by TMA, its scores stay in registers, and there is no loop: S = Q Kᵀ is issued as keys land, the softmax
//! runs over the scores in few steps, P goes to the tensor cores from registers, and the parts are joined
//! through distributed shared memory.
//!
//! Baked into the code: dtype, head dimensions, mask, group size, row strides, whether the parts are whole
//! and whether all keys fit the stages (then nothing is refilled), by how much the diagonal is off the tiles,
//! `heads_q` for an LSE, and the plan. Parameters of the launch: tensor maps of Q, K and V, the output's
//! pointer and strides, `seq_q`, `seq_kv`, the scale. A kernel serves another problem only if that one's text
//! is the same: compare modules, not shapes.

mod block;
mod default;
mod emit;
mod loads;
mod paths;
mod plan;
mod store;
mod stream;

pub use plan::{Merge, Requests, RowOrder, Scores, SmallPlan};
