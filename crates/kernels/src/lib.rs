//! Kernel families. A [`Plan`] says how a [`Problem`](problem::Problem) is computed on an [`Arch`]; [`emit`]
//! turns the three into a [`ptx::Kernel`]. Nothing else changes a kernel: no environment, no global, no
//! device.
//!
//! ```
//! # use flashcore_kernels as kernels;
//! use kernels::{Arch, Plan, emit};
//! use problem::Problem;
//!
//! let (problem, arch) = (Problem::mission(), Arch::SM_80);
//! let plan = Plan::default_for(&problem, &arch)?;
//! let kernel = emit(&problem, &plan, &arch)?;
//! assert_eq!(kernel.buffers.iter().map(|b| b.name.as_str()).collect::<Vec<_>>(), ["q", "k", "v", "out"]);
//! # Ok::<(), kernels::KernelError>(())
//! ```

mod arch;
mod error;
mod family;
pub mod forward;
pub mod genes;
pub mod ladder;
mod plan;
pub mod select;

pub use arch::Arch;
pub use error::{KernelError, PlanError};
pub use family::Family;
pub use plan::{Plan, emit};
