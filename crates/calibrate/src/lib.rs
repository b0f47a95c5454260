//! Compares the models with the hardware and FlashCore with itself.
//!
//! - [`probes`]: microbenchmarks that describe a GPU for the time model ([`machine`] reads the description).
//! - [`differential`] and [`approx`]: instructions in the emulator and on a GPU, bit for bit.
//! - [`selftest`]: every kernel family and every defect that the gate must reject, on a device.
//! - [`fuzz`]: hostile kernels, launch files and tensor files.

pub mod approx;
pub mod differential;
pub mod fuzz;
pub mod machine;
pub mod probes;
pub mod selftest;
