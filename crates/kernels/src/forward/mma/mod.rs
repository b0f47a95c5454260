//! The universal forward family: FlashAttention-2's structure on `mma.sync.m16n8k16`, for every GPU since
//! sm_80.
//!
//! A CTA takes `block_m` query rows of one head, a warp 16 or more of them, and walks the keys in blocks of
//! `block_n` from the last to the first. S = Q Kᵀ and O = P V run on the tensor cores; S, P and O stay in
//! registers, where the accumulators of S are the A operand of P V as they lie. Keys and values stream
//! through swizzled shared memory by `cp.async`.
//!
//! Baked into the code: dtype, head dimensions, mask, group size, row strides, whether `block_n` divides
//! `seq_kv`, the sign of the scale, and the plan. Parameters of the launch: pointers, batch and head strides,
//! `seq_q`, `seq_kv`, the scale; so one kernel serves all lengths of its kind.

mod emit;
mod plan;

pub use plan::{Grid, MmaPlan, QueryHome};
