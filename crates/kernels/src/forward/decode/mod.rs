//! The `decode` family: attention of few query rows to many keys on `mma.sync`, in one kernel without a plan
//! of the host.
//!
//! The query rows of all heads of a KV head are packed into tiles of 16 rows. The KV blocks of all tiles of
//! all sequences form one line, which is cut evenly over a fixed grid. Each CTA finds its piece from the
//! lengths in device memory, so that a captured graph serves other lengths and other page tables. A tile that
//! several CTAs divide is merged by the last of them, in the order of the keys ([`attend::LineMerge`]).
//!
//! The warps of a CTA divide the keys of each block. Each warp has its own ring of `cp.async` stages, which
//! it fills across the ends of tiles, so that memory is read while results are merged and stored.

mod emit;
mod family;
mod line;
mod load;
mod plan;
mod ring;

pub use plan::DecodePlan;
