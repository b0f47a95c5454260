//! The gate: no time is taken of a kernel that has not passed it.
//!
//! [`check_kernel`] runs a kernel in the emulator on several kinds of input, each under another adversarial schedule, and asks:
//! was there a hazard; was every element of the outputs written, and nothing between their rows; is every input as it
//! was; is the answer within the error model ([`judge`]) of the f64 oracle? Outputs start as a NaN pattern, and the
//! emulator leaves gaps between buffers, so nothing can be right by luck and no access next to a buffer goes unseen.
//!
//! There are three verdicts. What the emulator does not know is `incomplete`, never passed.

mod coverage;
mod feed;
pub mod inputs;
pub mod judge;
pub mod mutate;
mod quantised;
mod report;
mod run;
pub mod torture;
mod trial;
mod watch;

pub use coverage::Coverage;
pub use feed::{Feed, contents};
pub use judge::References;
pub use report::{CheckReport, HazardRow, Verdict};
pub use run::{GateError, Settings, check_family, check_kernel, check_watched};
pub use trial::{Launched, Trial, TrialError, bind, launch, trial};
pub use watch::Watch;
