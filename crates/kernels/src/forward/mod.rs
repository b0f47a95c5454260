//! Forward attention.

pub(crate) mod contract;
pub mod mma;
pub(crate) mod packing;
pub mod small;
pub mod wgmma;
