//! Forward attention.

pub(crate) mod contract;
pub mod mma;
mod packing;
pub mod small;
pub mod wgmma;
