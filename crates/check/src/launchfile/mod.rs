//! The launch file of `flashcore check`. It describes the launch of a kernel without host code.
//!
//! ```toml
#![doc = include_str!("format.toml")]
//! ```
//!
//! The parsed file (`RawFile`), the validated one ([`LaunchSpec`]) and the one bound to a module ([`Bound`])
//! are separate types.

mod bind;
mod brief;
mod captured;
mod constant;
mod error;
mod fill;
mod map;
mod memory;
mod raw;
mod scalar;
mod spec;
mod suggest;
#[cfg(test)]
mod tests;
mod triton;
mod write;

pub use bind::{Bound, Role};
pub use brief::Brief;
pub use captured::{CaptureError, CapturedLaunch, captured};
pub use error::LaunchError;
pub(crate) use fill::fill;
pub use map::{MapSpec, MapTarget};
pub use memory::{BufferType, FileInit, Init, Memory, RANK, View};
pub(crate) use raw::{RawArg, RawLaunch, RawReference};
pub use scalar::{PointerSpec, Scalar, ScalarType, StructSpec};
pub(crate) use spec::{ARGUMENT, number_of, step_of};
pub use spec::{ArgSpec, LaunchSpec, LaunchStep};
pub use suggest::{suggest, suggest_triton};

/// Every key of a launch file with its meaning and default, in the form of a launch file.
pub const FORMAT: &str = include_str!("format.toml");
