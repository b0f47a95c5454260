//! The tasks and outcomes of an evolution as plain data, so that an evaluation can run in a thread, in a
//! child process that may crash, or on another machine.

use kernels::select::Shape;
use ledger::{Candidate, CandidateId, Reason, Rejection};
pub use ledger::{Finding, Outcome, Stage};
use serde::{Deserialize, Serialize};

/// Where candidates are evaluated.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// This machine's CPU, measured.
    Cpu,
    /// A GPU of this machine, measured.
    Cuda {
        /// Device number, from 0.
        ordinal: i32,
    },
    /// A machine of the time model's table, predicted.
    Model {
        /// The machine's name in lower case: `h200`, `l4`, ….
        machine: String,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The candidate's number. Candidate, stage and problem identify a task: a repeated outcome counts once.
    pub candidate: CandidateId,
    pub stage: Stage,
    pub target: Target,
    /// The problem. Most [`Stage::HeldOut`] tasks use a problem other than the candidate's own.
    pub problem: Shape,
    /// The plan or the kernel.
    pub subject: Candidate,
    /// The opponent in a race.
    pub incumbent: Option<(CandidateId, Candidate)>,
    /// Approximate duration of a timing, s.
    pub seconds: f64,
}

/// The rejection of a candidate at a stage.
pub(crate) fn reject(stage: Stage, reason: Reason, detail: impl ToString) -> Rejection {
    Rejection { stage, reason, detail: detail.to_string() }
}
