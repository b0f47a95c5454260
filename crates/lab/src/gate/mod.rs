//! The gate: no time is taken of a kernel that has not passed it.
//!
//! [`prove`] runs a kernel in the emulator on several kinds of input, each under another adversarial schedule, and asks:
//! was there a hazard; was every element of the outputs written, and nothing between their rows; is every input as it
//! was; is the answer within the error model ([`judge`]) of the f64 oracle? Outputs start as a NaN pattern, and the
//! emulator leaves gaps between buffers, so nothing can be right by luck and no access next to a buffer goes unseen.
//!
//! There are three verdicts, and the gate fails closed: what the emulator does not know is `incomplete`, never proven.

mod coverage;
mod feed;
pub mod inputs;
pub mod judge;
pub mod mutate;
mod proof;
mod prove;
mod quantised;
pub mod torture;
mod trial;
mod watch;

pub use coverage::Coverage;
pub use feed::{Feed, contents};
pub use judge::References;
pub use proof::{HazardRow, Proof, Verdict};
pub use prove::{GateError, Settings, prove, prove_family, prove_watched};
pub use trial::{Launched, Trial, TrialError, bind, launch, trial};
pub use watch::Watch;
