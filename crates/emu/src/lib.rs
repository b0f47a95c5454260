//! The machine on a CPU: runs PTX exactly, finds its hazards, counts what it does and predicts its time.

pub mod numerics;
pub mod trace;
