//! Known ways to make a contestant look faster than it is. Each one must be detected with the fault that
//! belongs to it.
//!
//! A candidate kernel is PTX and a launch contract, so its attempts are made against the gate (`kernels.rs`).
//! A library has host code as well, so its attempts are made against the race on a simulated device
//! (`device.rs`, `libraries.rs`).

mod device;
mod kernels;
mod libraries;
