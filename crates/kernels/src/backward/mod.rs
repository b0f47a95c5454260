//! Backward attention: the kernel families.

pub mod fused;
pub mod split;
mod sums;
