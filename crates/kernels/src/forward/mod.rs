//! Forward attention.

pub mod mma;
pub mod wgmma;
