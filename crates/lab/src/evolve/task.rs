//! What an evolution asks of whoever evaluates its candidates, and what it is told: plain data, so that an evaluation can take
//! place in a thread, in a child process that may die, or on another machine.

use kernels::select::Shape;
use serde::{Deserialize, Serialize};

use super::candidate::Candidate;
use crate::ledger::{CandidateId, CheckFact, MeasurementFact, Rejection, Screening};

/// The cascade's stages, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// A proposer's answer: a candidate at all?
    Propose,
    /// Plan check, emission, identity, ptxas, time model.
    Screen,
    /// The gate in the emulator.
    #[serde(alias = "prove")]
    Check,
    /// The gate on the device, and a short timing. Where the device is not at hand, the time model again, with more CTAs.
    Microbench,
    /// Against the incumbent, by the law of time.
    Race,
    /// The same on problems that the search never saw; before that, of who won, once more on its own.
    HeldOut,
}

/// Where candidates are to be fast.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// This machine's CPU, measured.
    Cpu,
    /// A GPU of this machine, measured.
    Cuda {
        /// Which, from 0.
        ordinal: i32,
    },
    /// A machine of the time model's table, predicted.
    Model {
        /// Its name there, in lower case: `h200`, `l4`, ….
        machine: String,
    },
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The candidate's number; with the stage it names the task: an answer that comes twice counts once.
    pub candidate: CandidateId,
    /// What is to be done.
    pub stage: Stage,
    /// Where.
    pub target: Target,
    /// On which problem: of most of [`Stage::HeldOut`], another than the candidate's own.
    pub problem: Shape,
    /// With what.
    pub subject: Candidate,
    /// Whom a race is against.
    pub incumbent: Option<(CandidateId, Candidate)>,
    /// Seconds that a timing may take, about.
    pub seconds: f64,
}

/// What came of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// As in the task.
    pub candidate: CandidateId,
    /// As in the task.
    pub stage: Stage,
    /// As in the task.
    pub problem: Shape,
    /// What it took the evaluator, s.
    pub seconds: f64,
    /// Seconds of these that the device was held.
    pub device_seconds: f64,
    /// What is known now.
    pub finding: Finding,
}

/// What is known of a candidate after a stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// It can be built, and this is what it is. The predicted time of one call with its interval (low, expected, high), µs, where there is a model.
    Screened {
        /// What it is.
        screening: Screening,
        /// What it is expected to take.
        predicted_us: Option<[f64; 3]>,
        /// What the diagnosis says of it, as `explain --json` gives findings.
        findings: serde_json::Value,
    },
    /// The gate's verdict.
    Judged(CheckFact),
    /// Its times; on a GPU with the device's own verdict before them.
    Timed {
        /// The gate on the device.
        #[serde(alias = "proof")]
        check: Option<CheckFact>,
        /// The times.
        measurement: MeasurementFact,
    },
    /// It went no further.
    Rejected(Rejection),
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::gate::Verdict;

    /// Outcomes that were written before verdicts were passed and failed.
    #[test]
    fn former_words_are_read() {
        let read = |verdict: &str| {
            let proof = json!({
                "judge": "emulator", "verdict": verdict, "reasons": [], "hazards": [], "error_rel": null, "seconds": 1.0
            });
            let measurement = json!({
                "trial": "microbench", "kind": "measured", "samples": [1.0], "us": 1.0, "low_us": 1.0, "high_us": 1.0,
                "against": null, "problem": Shape::of(&problem::Problem::mission()),
            });
            let finding: Value = json!({ "timed": { "proof": proof, "measurement": measurement } });
            let Finding::Timed { check, .. } = serde_json::from_value(finding).unwrap() else {
                panic!("timed")
            };
            check.unwrap().verdict
        };
        assert_eq!(
            ["proven", "refuted", "incomplete"].map(read),
            [Verdict::Passed, Verdict::Failed, Verdict::Incomplete]
        );
        assert_eq!(serde_json::from_value::<Stage>(json!("prove")).unwrap(), Stage::Check);
        assert_eq!(
            json!([Verdict::Passed, Verdict::Failed, Verdict::Incomplete]),
            json!(["passed", "failed", "incomplete"])
        );
    }
}
