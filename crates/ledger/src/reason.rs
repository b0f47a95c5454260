//! The reasons for which candidates are rejected.

use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, IntoStaticStr, VariantNames};

/// The reason of a rejection. [`Rejection::detail`](crate::Rejection::detail) says more.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    Display,
    EnumString,
    IntoStaticStr,
    VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
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
    /// The names of all reasons, in the order of the stages.
    pub const NAMES: &'static [&'static str] = <Reason as VariantNames>::VARIANTS;
    /// Reasons that leave a candidate's time valid: the candidate is still ranked.
    pub const RANKED: [Reason; 2] = [Reason::Slower, Reason::Budget];
    /// Reasons that reject a kernel on every device.
    pub const ANYWHERE: [Reason; 2] = [Reason::Failed, Reason::Wrong];

    /// The reason's name in the ledger.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// The reason with this name.
    pub fn named(word: &str) -> Option<Reason> {
        word.parse().ok()
    }

    /// The names of reasons as a list for SQL: `'slower', 'budget'`.
    pub(crate) fn listed(reasons: &[Reason]) -> String {
        let quoted: Vec<String> = reasons.iter().map(|reason| format!("'{reason}'")).collect();
        quoted.join(", ")
    }
}
