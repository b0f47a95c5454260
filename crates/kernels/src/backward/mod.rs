//! Backward attention: the kernel families.

pub mod fused;
pub(crate) mod programs;
pub mod split;
