//! The portable forward family: FlashAttention-2's structure on `mma.sync.m16n8k16`, for every GPU since
//! sm_80, and on `mma.sync.m16n8k32` for 8-bit inputs since sm_89.
//!
//! A CTA takes `block_m` query rows of one head, and a warp takes 16 or more of them. The CTA visits the keys
//! in blocks of `block_n`, from the last block to the first. S = Q Kᵀ and O = P V run on the tensor cores. S,
//! P and O stay in registers: the accumulator fragments of S, rounded, are the A fragments of P V. Keys and
//! values are streamed through swizzled shared memory by `cp.async`. With [`MmaPlan::splits`], CTAs divide
//! the keys of a row block, and a second kernel merges their results.
//!
//! The code depends on the plan and on [`crate::Baked`]: of the lengths, it has whether `block_n` divides
//! `seq_kv`. Launch parameters: pointers, batch and head strides, `seq_q`, `seq_kv` and the scale. One kernel
//! therefore serves all lengths of its kind.
//!
//! With uneven lengths, a CTA first reads the lengths of its batch entry. Tiles of packed queries are counted
//! over all sequences ([`attend::Lengths::tile`]), and a CTA whose tile has no rows exits.

mod descale;
mod emit;
mod family;
mod fp8;
mod launch;
mod load;
mod place;
mod plan;
mod split;
mod steps;
mod store;

pub(crate) use place::{axis_of_rows, head_and_batch};
/// The former name of [`CtaOrder`], which the tests of `flashcore-check` still use.
pub use plan::CtaOrder as Grid;
pub use plan::{CtaOrder, MmaPlan, QueryHome};
pub(crate) use plan::{check_alignment, widest_copy};
