//! Forward attention.

pub mod mma;
