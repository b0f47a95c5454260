//! The resources that a kernel uses on an SM: registers, spills, stack and shared memory, and the resulting
//! occupancy.
//!
//! ptxas gives exact figures where it is installed. Otherwise the registers are estimated from the PTX (see
//! [`estimate`]). [`Resources::source`] says which.

mod liveness;
mod occupancy;
mod ptxas;

pub use liveness::estimate;
pub use occupancy::{Limiter, Occupancy, OccupancyError, occupancy};
pub use ptxas::{Ptxas, PtxasError};

use ptx::Module;
use serde::Serialize;

/// The origin of the figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResourceSource {
    /// From ptxas with this version.
    Ptxas(String),
    /// From a liveness analysis of the PTX.
    Estimate,
}

/// The resources of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Bytes that the code stores to spill slots, counted once per instruction and not per execution.
    pub spill_stores: u32,
    /// Bytes that the code loads from spill slots.
    pub spill_loads: u32,
    /// Local memory per thread, bytes.
    pub stack: u32,
    /// Static shared memory per CTA, bytes.
    pub shared: u32,
    /// The origin of the figures.
    pub source: ResourceSource,
}

/// Static shared memory of a launch of `entry`: the variables that the entry and its callees use, aligned as
/// declared.
pub fn static_shared(module: &Module, entry: &str) -> u32 {
    let total = module
        .shared_variables(entry)
        .into_iter()
        .fold(0u64, |at, v| at.next_multiple_of(u64::from(v.align.max(1))).saturating_add(v.bytes()));
    u32::try_from(total).unwrap_or(u32::MAX)
}
