//! Kernel families. A [`Plan`] says how a [`Problem`](problem::Problem) is computed on an [`Arch`]. [`emit`]
//! turns these three into a [`Program`]: its kernels and the contents of their buffers. A kernel depends on
//! nothing else, such as environment variables, global state or a device.
//!
//! ```
//! # use flashcore_kernels as kernels;
//! use kernels::{Arch, Plan, emit};
//! use problem::Problem;
//!
//! let (problem, arch) = (Problem::mission(), Arch::SM_80);
//! let plan = Plan::default_for(&problem, &arch)?;
//! let program = emit(&problem, &plan, &arch)?;
//! let operands: Vec<&str> = program.contracts.buffers.iter().map(|buffer| buffer.kind.name()).collect();
//! assert_eq!(operands, ["q", "k", "v", "out"]);
//! # Ok::<(), kernels::KernelError>(())
//! ```

mod arch;
pub mod backward;
mod baked;
pub mod cache;
mod contract;
mod derivatives;
mod draft;
mod dropout;
mod error;
mod family;
mod features;
pub mod forward;
pub mod genes;
mod grid;
pub mod merge;
mod plan;
mod program;
pub mod quantize;
pub mod select;
mod symptom;
mod words;

pub use arch::Arch;
pub use baked::{Baked, Dims, Repeated, TableKind};
pub use contract::{BufferKind, KernelArray};
pub use error::{KernelError, PlanError};
pub use family::{Family, Plan};
pub use features::Features;
pub use plan::{bind, emit};
pub use program::{Contracts, Program, ProgramBuffer, Step};
pub use symptom::Symptom;
