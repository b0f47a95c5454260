//! The machine on a CPU: runs PTX exactly, finds its hazards, counts what it does and predicts its time.

pub mod model;
pub mod numerics;
pub mod resources;
pub mod trace;
