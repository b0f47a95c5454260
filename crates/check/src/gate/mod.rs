//! The gate: the check that a kernel must pass before it is timed.
//!
//! [`check_kernel`] runs a kernel in the emulator on several styles of input, each under a different
//! adversarial schedule. It checks that no hazard occurred, that every output element was written and nothing
//! between the rows, that the inputs are unchanged, and that the output is within the error model ([`judge`])
//! of the f64 oracle. Outputs start as a NaN pattern, and the emulator leaves gaps between buffers, so an
//! unwritten element or an access outside a buffer is found.
//!
//! There are three verdicts. The gate fails closed: a kernel with an unsupported instruction is `incomplete`,
//! never passed.

mod coverage;
mod feed;
mod kept;
mod mutants;
pub mod mutate;
mod outcome;
mod polls;
pub mod quantised;
mod repeat;
mod report;
mod residency;
mod rows;
mod run;
mod sample;
mod sampler;
mod starts;
mod steps;
pub mod torture;
mod trial;
mod version;
mod watch;

pub use coverage::Coverage;
pub use feed::{Feed, contents};
pub use mutants::{Mutant, MutantResult, check_mutants};
pub use outcome::GateError;
pub use report::{CheckReport, HazardRow, Recorded, Verdict};
pub use run::{Settings, check_family, check_kernel, check_watched};
pub use sample::{Choice, Sample};
pub use trial::{Launched, Trial, TrialError, bind, launch, trial};
pub use version::{VersionError, judge_by_version};
pub use watch::Watch;
