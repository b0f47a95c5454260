//! The gate: no time is taken of a kernel that has not passed it.

pub mod inputs;
pub mod judge;
pub mod mutate;
pub mod torture;
