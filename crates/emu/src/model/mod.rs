//! The time model: how long a kernel takes on a described machine, what bounds it, and where the time goes.
//!
//! It needs the PTX, the launch, the traces of a few CTAs ([`crate::trace`]) and what a CTA takes of an SM
//! ([`crate::resources`]). Then:
//!
//! 1. `lower`: each PTX instruction becomes what ptxas leaves of it: slots, pipe, latency, registers.
//! 2. `schedule`: blocks are unrolled, renamed and ordered as ptxas would.
//! 3. `replay`: one SM, the busiest, issues its CTAs at their occupancy through four schedulers, with a scoreboard,
//!    pipes, shared-memory passes, barriers, copies, and its share of L2 and DRAM.
//! 4. `predict`: what was not replayed is taken at the mean rate of what was; clock, launch and uncertainty are added.
//!
//! On sm_90a units work beside the warps, and the replay keeps their time: tensor cores that run a warpgroup's products group by group,
//! bulk copies that tell an mbarrier, stores that are waited for by groups, the way to the rest of the cluster. CTAs of a cluster stand
//! for each other.
//!
//! Constants are public ones or those of our own microbenchmarks ([`machine`]); none is fitted to a kernel's time. Not modelled: instruction
//! cache misses, TLB misses, register-bank conflicts, DRAM refresh and page conflicts, and what products take of the register
//! files' bandwidth.

mod address;
mod cost;
pub(crate) mod dataflow;
mod description;
mod lower;
pub mod machine;
mod memory;
mod plan;
mod predict;
mod prediction;
mod replay;
mod schedule;
#[cfg(test)]
mod tests;

pub use description::MachineError;
pub use machine::Gpu;
pub use memory::CacheState;
pub use predict::{ModelError, Subject, predict};
pub use prediction::{Bound, Cause, Prediction, Roofline, Utilisation};
