//! Why candidates are rejected, as the ledger counts them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason of a rejection. The detail of the rejection says more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The proposer made no candidate.
    Proposer,
    /// The plan does not fit its problem or device.
    Plan,
    /// No kernel could be generated.
    Emit,
    /// The source does not compile, or it is not valid PTX.
    Source,
    /// The compiler of the source is missing or cannot be used.
    Compiler,
    /// The launch does not fit the kernel.
    Launch,
    /// The kernel is for another problem, or its problem cannot be judged.
    Problem,
    /// It is the kernel of an earlier candidate.
    Identical,
    /// ptxas refuses the kernel.
    Ptxas,
    /// Too many registers are spilled.
    Spills,
    /// Its predicted time is too far behind.
    PredictedSlow,
    /// The time model cannot predict its time.
    NoPrediction,
    /// The budget ended before it was evaluated or raced.
    Budget,
    /// The gate in the emulator found it wrong.
    #[serde(alias = "refuted")]
    Failed,
    /// The gate could not judge it.
    Incomplete,
    /// The driver refuses the kernel.
    Compile,
    /// It needs more resources than the device has.
    Resources,
    /// It needs more memory than the device has.
    Memory,
    /// Its outputs are wrong on the device, or in a race.
    Wrong,
    /// Its times in a race do not count.
    Fault,
    /// It did not end within its time.
    Hangs,
    /// Its evaluation ended with an error.
    Crashed,
    /// The device cannot be used.
    Device,
    /// The incumbent of its race is at fault.
    Incumbent,
    /// It was slower than the baseline, or than the candidates that were raced.
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
    /// Reasons that leave a candidate's time valid, so that it is ranked.
    pub const RANKED: [Reason; 2] = [Reason::Slower, Reason::Budget];
    /// Reasons that show a candidate to be wrong wherever it runs.
    pub const ANYWHERE: [Reason; 2] = [Reason::Failed, Reason::Wrong];

    /// The word for it in the ledger.
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

    /// The reason with this word.
    pub fn named(word: &str) -> Option<Reason> {
        Reason::ALL.into_iter().find(|reason| reason.name() == word)
    }

    /// Reasons as a list for SQL: `'slower', 'budget'`.
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
