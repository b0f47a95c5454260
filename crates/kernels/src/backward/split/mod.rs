//! The portable backward family: FlashAttention-2's Algorithm 2 in two kernels on `mma.sync.m16n8k16`, for
//! every GPU since sm_80. No kernel adds to memory that another CTA writes, so all results are bitwise
//! reproducible, except gradients of tables at other indices than positions.
//!
//! The first kernel (`queries.rs`) takes query rows and visits the keys that they see: dQ stays in registers.
//! The second kernel (`keys.rs`) takes keys and visits the query rows that see them, of all query heads of
//! the group: dK and dV stay in registers. Both compute S and dP, so the two kernels have seven products in
//! place of the algorithm's five. In both, a warp owns rows of its accumulators, and P and dS pass from one
//! product to the next in registers.
//!
//! The first kernel also computes D = rowsum(dO ∘ O) and passes −L·log2 e and −D of each row to the second.
//!
//! Gradients of sinks are sums over the rows of the first kernel (`../sums.rs`). Each gradient of a table, as
//! of a bias or of slopes, has a kernel of its own (`tables.rs`). At indices that are expressions, and for
//! tables that are read twice, kernels add to it by atomics.

mod cells;
mod cta;
mod family;
mod keys;
mod plan;
mod queries;
mod tables;

pub use plan::SplitPlan;
