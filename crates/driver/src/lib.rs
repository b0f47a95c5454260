//! Runs PTX on a GPU through the CUDA driver, which is loaded at run time: the same binary starts on a machine that
//! has none and says so ([`DriverError::NoDriver`]). [`Gpu`] is the second implementation of [`ptx::Machine`].
//!
//! This crate contains `unsafe`, because the driver is a C library. Each block states what makes the call sound;
//! nothing unsafe leaves the crate.

mod device;
mod error;
mod launch;
mod memory;
mod module;

pub use device::{DeviceInfo, Gpu};
pub use error::DriverError;
pub use memory::Buffer;
pub use module::Resources;
