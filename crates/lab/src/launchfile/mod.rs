//! The launch file of `flashcore check`: what a kernel that comes without host code is launched with.
//!
//! ```toml
#![doc = include_str!("format.toml")]
//! ```
//!
//! What is parsed (`RawFile`) is kept apart from what is validated ([`LaunchSpec`]), and that from what is bound to a
//! module ([`Bound`]).

mod bind;
mod error;
mod map;
mod raw;
mod spec;
#[cfg(test)]
mod tests;
mod write;

pub use bind::{Bound, Role};
pub use error::LaunchError;
pub use map::{MapSpec, MapTarget};
pub use spec::{ArgSpec, BufferType, Init, LaunchSpec, Memory};

/// Every key of a launch file, with what it means and its default: a launch file itself.
pub const FORMAT: &str = include_str!("format.toml");
