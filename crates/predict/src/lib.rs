//! The time model: it predicts how long a kernel takes on a described machine, which resource limits it, and
//! how the time is divided among causes.
//!
//! Its inputs are the PTX, the launch, the traces of a few CTAs ([`emu::trace`]) and the resources of a CTA
//! on an SM ([`resources`]). The steps are:
//!
//! 1. `lower`: each PTX instruction is mapped to the machine instructions that ptxas generates for it: slots,
//!    pipe, latency, registers.
//! 2. `schedule`: blocks are unrolled, renamed and ordered as ptxas would order them.
//! 3. `replay`: one SM, the busiest, issues its CTAs at their occupancy through four schedulers, with a
//!    scoreboard, pipes, shared-memory passes, barriers, copies, and its share of L2 and DRAM.
//! 4. `predict`: instructions that were not replayed take the mean rate of those that were. Clock, launch and
//!    uncertainty are added.
//!
//! On sm_90a the replay also models the asynchronous units: tensor cores that execute a warpgroup's products
//! group by group, bulk copies that signal an mbarrier, stores that are waited for by groups, and the
//! connection to the rest of the cluster. One CTA of a cluster represents the others.
//!
//! Constants come from public sources or from our own microbenchmarks ([`machine`]). None is fitted to a
//! kernel's time. Not modelled: instruction cache misses, TLB misses, register-bank conflicts, DRAM refresh
//! and page conflicts, and the register-file bandwidth that tensor-core products use.

mod address;
mod cost;
mod dataflow;
mod description;
mod joins;
mod kept;
mod lower;
pub mod machine;
mod memory;
mod plan;
mod predict;
mod prediction;
mod replay;
pub mod resources;
mod schedule;
#[cfg(test)]
mod tests;

pub use description::MachineError;
pub use machine::Gpu;
pub use memory::CacheState;
pub use predict::{ModelError, Subject, predict};
pub use prediction::{Bottleneck, Cause, Prediction, Roofline, Utilisation};
