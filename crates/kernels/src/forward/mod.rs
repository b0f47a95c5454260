//! Forward attention.

pub(crate) mod contract;
pub mod mma;
pub mod small;
pub mod wgmma;
