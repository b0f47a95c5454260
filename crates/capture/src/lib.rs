//! Captures launches of CUDA kernels in other programs, without CUPTI.
//!
//! [`library`] is loaded into the program by `LD_PRELOAD`. It wraps the driver's functions that load modules,
//! encode tensor maps and launch kernels, and writes a [`Record`] of each launch that its environment
//! ([`protocol`]) selects. [`fatbin`] finds the PTX in the image of a module.

pub mod fatbin;
pub mod protocol;
mod record;

pub use record::{Record, RecordedBuffer, RecordedMap, RecordedParam};

/// The library, compressed by `build.rs`; empty where it does not exist.
const COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libflashcore_capture.so.deflate"));

/// The library, a shared object for glibc on x86-64 and aarch64. `None` elsewhere.
pub fn library() -> Option<Vec<u8>> {
    (!COMPRESSED.is_empty()).then(|| {
        miniz_oxide::inflate::decompress_to_vec(COMPRESSED).expect("build.rs compressed the library")
    })
}
