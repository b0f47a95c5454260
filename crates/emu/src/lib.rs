//! The machine on a CPU: runs any PTX module on a grid, bit for bit, and finds what a GPU would let pass.
//!
//! - [`numerics`]: the arithmetic, exact where the hardware is specified or known.
//! - `decode`: PTX to a flat list of instructions on register slots.
//! - `memory`: address spaces, with gaps between buffers so that no access out of bounds goes unseen.
//! - `order`: happens-before by vector clocks, and the last accesses of every place.
//! - `exec`: warps of 32 lanes that part and meet, barriers, asynchronous copies, atomics.
//! - [`trace`]: what a CTA issued, for the time model to replay.
//! - [`model`]: predicted time on a described machine, and what bounds it.
//! - [`resources`]: registers, spills and occupancy.
//!
//! [`run`] runs a kernel and says everything it found; [`Emulator`] is the same as a [`ptx::Machine`].

mod counters;
mod decode;
mod error;
mod exec;
mod grid;
mod machine;
mod memory;
pub mod model;
pub mod numerics;
mod order;
mod report;
pub mod resources;
mod stopwatch;
pub mod trace;

pub use counters::{Counter, Counters};
pub use error::EmuError;
pub use grid::run;
pub use machine::Emulator;
pub use memory::Buffer;
pub use report::{Checks, Fidelity, Hazard, HazardKind, Options, Place, Report, Schedule, ThreadId};
pub use stopwatch::Stopwatch;
