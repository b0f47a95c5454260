//! The backward family of sm_90a: FlashAttention-2's Algorithm 2 with five products, on `wgmma` and TMA.
//!
//! A CTA computes tiles of 128 keys of a KV head, which it takes from a counter. For each of them it visits
//! the query rows that see the keys, tile by tile, of all query heads of the group. One producer thread
//! requests Q and dO; two consumer warpgroups own 64 keys each. All score tiles are transposed, so that the
//! A operands Pᵀ and dSᵀ of dV += Pᵀ dO and dK += dSᵀ Q are in registers, as the accumulators are.
//! dS also passes through shared memory: dQ = dS K needs the dS of both warpgroups, which compute one half of
//! dQ each and add it to f32 sums in global memory. Above head dim 64, the warpgroups take the tensor cores
//! in turn (`turns.rs`). Head dims above 128 leave room for 64 keys, and each gradient has a consumer
//! warpgroup (`apart.rs`); a CTA then computes one tile.
//!
//! A tile of keys may be computed in parts by several CTAs, which divide the query rows (`parts.rs`).
//!
//! Three kernels are launched. The second and the third start before their predecessor has ended, and wait
//! for it. The first (`rows.rs`) sets the sums to zero and computes −L·log2 e and −D of each row.
//! The second (`emit.rs`) is the main kernel. The third (`convert.rs`) scales and rounds the sums to dQ. CTAs
//! add to the sums in the order in which they run, so the bits of dQ differ between runs, unless the pass has
//! to be deterministic: then each tile of query rows has an order of additions (`order.rs`, `adders.rs`).

mod adders;
mod apart;
mod balance;
mod consume;
mod convert;
mod emit;
mod family;
mod free;
mod order;
mod params;
mod parts;
mod plan;
mod produce;
mod rows;
mod staging;
mod tiles;
mod turns;

pub use plan::FusedPlan;
