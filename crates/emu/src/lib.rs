//! A CPU emulator of PTX. It runs any PTX module on a grid, bit for bit, and reports hazards that a GPU does
//! not report.
//!
//! - [`numerics`]: the arithmetic, exact where the hardware is specified or known.
//! - `decode`: converts PTX to a flat list of instructions on register slots.
//! - `semantics`: the arithmetic that instructions name.
//! - `memory`: address spaces. Gaps between buffers make every access out of bounds visible.
//! - `order`: happens-before by vector clocks, and the last accesses of every memory location.
//! - `exec`: warps of 32 lanes that diverge and reconverge, barriers, asynchronous copies, atomics.
//! - [`trace`]: records the instructions that a CTA issued, which the time model replays.
//!
//! [`run`] runs a kernel and returns a report with all findings. [`Emulator`] is the same as a
//! [`ptx::Machine`].

mod again;
mod contract;
mod counters;
mod decode;
mod earlier;
mod error;
mod exec;
mod grid;
mod machine;
mod memory;
pub mod numerics;
mod order;
mod quiet;
mod report;
mod seeds;
mod semantics;
mod stopwatch;
pub mod trace;

pub use again::run;
pub use counters::{Counter, Counters};
pub use earlier::{EarlierUse, EarlierUses};
pub use error::EmuError;
pub use grid::{argument_bytes, communicates};
pub use machine::Emulator;
pub use memory::Buffer;
pub use report::{
    Allowed, Checks, Fidelity, Footprint, Hazard, HazardKind, Options, Place, Placement, Printed, Report,
    Schedule, Survey, ThreadId,
};
pub use stopwatch::Stopwatch;
