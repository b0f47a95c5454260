//! What a kernel takes of an SM: registers, spills, stack, shared memory, and so how many CTAs fit.
//!
//! ptxas says it exactly where it can be found; otherwise the registers are estimated from the PTX (see
//! [`estimate`]), and [`Resources::source`] says so.

mod liveness;
mod occupancy;
mod ptxas;

pub use liveness::estimate;
pub use occupancy::{Limiter, Occupancy, OccupancyError, occupancy};
pub use ptxas::{Ptxas, PtxasError};

use ptx::{Module, Space};
use serde::Serialize;

/// Where the figures come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// From ptxas, of that version.
    Ptxas(String),
    /// From a liveness analysis of the PTX.
    Estimate,
}

/// What one kernel takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Bytes stored to spill slots, over the code (not over the execution).
    pub spill_stores: u32,
    /// Bytes loaded from them.
    pub spill_loads: u32,
    /// Local memory per thread, bytes.
    pub stack: u32,
    /// Static shared memory per CTA, bytes.
    pub shared: u32,
    /// Where the figures come from.
    pub source: Source,
}

/// Static shared memory of a kernel: its own variables and the module's, aligned as they ask.
pub fn static_shared(module: &Module, entry: &str) -> u32 {
    let own = module.function(entry).and_then(|f| f.body.as_ref()).map(|b| b.variables.as_slice());
    let shared = module.variables().chain(own.unwrap_or_default()).filter(|v| v.space == Space::Shared);
    let total = shared.fold(0u64, |at, v| at.next_multiple_of(u64::from(v.align.max(1))) + v.bytes());
    u32::try_from(total).unwrap_or(u32::MAX)
}
