//! Every way to look faster than one is that has been seen in the wild, tried on us; each must be caught, for its reason.
//!
//! A candidate kernel is PTX and a launch contract: whatever it tries must fail at the gate (`kernels.rs`). A library has host
//! code as well: what it can try is tried on the race, on a device made up for it (`device.rs`, `libraries.rs`).

mod device;
mod kernels;
mod libraries;
