//! The launch file of `flashcore check`, which describes the launch of a kernel without host code.
//!
//! ```toml
#![doc = include_str!("format.toml")]
//! ```
//!
//! The parsed file (`RawFile`), the validated one ([`LaunchSpec`]) and the one bound to a module ([`Bound`])
//! are separate types.

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

/// Every key of a launch file with its meaning and default, in the form of a launch file.
pub const FORMAT: &str = include_str!("format.toml");
