//! Captures launches of CUDA kernels in other programs, without CUPTI.
//!
//! [`LIBRARY`] is loaded into the program by `LD_PRELOAD`. It wraps the driver's functions that load modules,
//! encode tensor maps and launch kernels, and writes a [`Record`] of each launch that its environment
//! ([`protocol`]) selects. [`fatbin`] finds the PTX in the image of a module.

pub mod fatbin;
pub mod protocol;
mod record;

pub use record::{Record, RecordedBuffer, RecordedMap, RecordedParam};

/// The library, a shared object; empty where it does not exist: it is for glibc on x86-64 and aarch64.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libflashcore_capture.so"));
