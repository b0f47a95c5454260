//! The stages through which a search takes a candidate.

use serde::{Deserialize, Serialize};

/// The stages of the cascade, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Parsing of a proposer's answer.
    Propose,
    /// Plan check, emission, comparison with known kernels, ptxas and time model.
    Screen,
    /// The gate in the emulator.
    #[serde(alias = "prove")]
    Check,
    /// The gate on the device and a short timing. Without the device, a prediction from more CTAs.
    Microbench,
    /// A race against the incumbent under the rules of `bench`.
    Race,
    /// A race on problems that the search never used. The winner first runs a second race on its own problem.
    HeldOut,
}

impl Stage {
    /// Whether the stage needs exclusive use of the device.
    pub const fn is_of_device(self) -> bool {
        match self {
            Stage::Propose | Stage::Screen | Stage::Check => false,
            Stage::Microbench | Stage::Race | Stage::HeldOut => true,
        }
    }
}
