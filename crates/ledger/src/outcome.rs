//! The outcome of a task.

use kernels::select::Shape;
use serde::{Deserialize, Serialize};

use crate::facts::{CandidateId, CheckFact, MeasurementFact, Rejection, Screening};
use crate::stage::Stage;

/// The outcome of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub candidate: CandidateId,
    pub stage: Stage,
    pub problem: Shape,
    /// Duration of the evaluation, s.
    pub seconds: f64,
    /// Part of `seconds` for which the device was held.
    pub device_seconds: f64,
    pub finding: Finding,
}

/// The result of a stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The kernel was built.
    Screened {
        screening: Screening,
        /// The predicted time of one call, µs (low, expected, high), if there is a model.
        predicted_us: Option<[f64; 3]>,
        /// Findings of the diagnosis in the form of `explain --json`.
        findings: serde_json::Value,
    },
    Judged(CheckFact),
    /// Times. On a GPU, they follow the gate on the device.
    Timed {
        /// The verdict of the gate on the device.
        #[serde(alias = "proof")]
        check: Option<CheckFact>,
        measurement: MeasurementFact,
    },
    Rejected(Rejection),
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use check::gate::Verdict;

    /// Outcomes with the former words for *passed* and *failed* can be read.
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
