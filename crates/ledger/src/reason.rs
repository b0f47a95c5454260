//! The reasons for which candidates are rejected.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason of a rejection. [`Rejection::detail`](crate::Rejection::detail) says more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The proposer made no candidate.
    Proposer,
    /// The plan does not fit its problem or device.
    Plan,
    /// No kernel could be generated for the plan.
    Emit,
    /// The source does not compile or is not valid PTX.
    Source,
    /// The compiler of the source is missing or cannot be used.
    Compiler,
    /// The launch does not fit the kernel.
    Launch,
    /// The kernel computes another problem, or the gate does not support its problem.
    Problem,
    /// The kernel is identical to that of an earlier candidate.
    Identical,
    /// ptxas rejects the kernel.
    Ptxas,
    /// The kernel spills too many registers.
    Spills,
    /// The predicted time is too long.
    PredictedSlow,
    /// The time model cannot predict the kernel.
    NoPrediction,
    /// The budget ended before the candidate was evaluated or raced.
    Budget,
    /// The gate in the emulator found the kernel wrong.
    #[serde(alias = "refuted")]
    Failed,
    /// The gate gave no verdict.
    Incomplete,
    /// The driver rejects the kernel.
    Compile,
    /// The kernel needs more resources than the device has.
    Resources,
    /// The problem needs more memory than the device has.
    Memory,
    /// The outputs are wrong on the device or in a race.
    Wrong,
    /// The times of the race are not valid.
    Fault,
    /// The kernel did not end within the time limit.
    Hangs,
    /// The evaluation ended with an error.
    Crashed,
    /// The device cannot be used.
    Device,
    /// The incumbent of the race is at fault.
    Incumbent,
    /// The candidate was slower than the baseline or than the candidates that were chosen for races.
    Slower,
}

impl Reason {
    /// Every reason, in the order of the stages.
    pub const ALL: [Reason; 25] = [
        Reason::Proposer,
        Reason::Plan,
        Reason::Emit,
        Reason::Source,
        Reason::Compiler,
        Reason::Launch,
        Reason::Problem,
        Reason::Identical,
        Reason::Ptxas,
        Reason::Spills,
        Reason::PredictedSlow,
        Reason::NoPrediction,
        Reason::Budget,
        Reason::Failed,
        Reason::Incomplete,
        Reason::Compile,
        Reason::Resources,
        Reason::Memory,
        Reason::Wrong,
        Reason::Fault,
        Reason::Hangs,
        Reason::Crashed,
        Reason::Device,
        Reason::Incumbent,
        Reason::Slower,
    ];
    /// Reasons that leave a candidate's time valid: the candidate is still ranked.
    pub const RANKED: [Reason; 2] = [Reason::Slower, Reason::Budget];
    /// Reasons that reject a kernel on every device.
    pub const ANYWHERE: [Reason; 2] = [Reason::Failed, Reason::Wrong];

    /// The reason's name in the ledger.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Proposer => "proposer",
            Reason::Plan => "plan",
            Reason::Emit => "emit",
            Reason::Source => "source",
            Reason::Compiler => "compiler",
            Reason::Launch => "launch",
            Reason::Problem => "problem",
            Reason::Identical => "identical",
            Reason::Ptxas => "ptxas",
            Reason::Spills => "spills",
            Reason::PredictedSlow => "predicted_slow",
            Reason::NoPrediction => "no_prediction",
            Reason::Budget => "budget",
            Reason::Failed => "failed",
            Reason::Incomplete => "incomplete",
            Reason::Compile => "compile",
            Reason::Resources => "resources",
            Reason::Memory => "memory",
            Reason::Wrong => "wrong",
            Reason::Fault => "fault",
            Reason::Hangs => "hangs",
            Reason::Crashed => "crashed",
            Reason::Device => "device",
            Reason::Incumbent => "incumbent",
            Reason::Slower => "slower",
        }
    }

    /// The reason with this name.
    pub fn named(word: &str) -> Option<Reason> {
        Reason::ALL.into_iter().find(|reason| reason.name() == word)
    }

    /// The names of reasons as a list for SQL: `'slower', 'budget'`.
    pub(crate) fn listed(reasons: &[Reason]) -> String {
        let quoted: Vec<String> = reasons.iter().map(|reason| format!("'{reason}'")).collect();
        quoted.join(", ")
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
