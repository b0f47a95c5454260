//! Backward attention: the kernel families.

pub mod split;
