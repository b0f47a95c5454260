//! The answers of a proposer.

use std::ops::RangeInclusive;

use serde::Deserialize;
use serde_json::{Value, json};

use ledger::{Candidate, KernelText, Language, TooLong};

#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    pub candidate: Candidate,
    /// Why the candidate should be faster, in the proposer's words.
    pub hypothesis: Option<String>,
    /// The forecast time, µs.
    pub predicted_us: Option<f64>,
}

/// The JSON object as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    plan: Option<Value>,
    cpu_plan: Option<Value>,
    ptx: Option<String>,
    cuda: Option<String>,
    launch: Option<String>,
    hypothesis: Option<String>,
    predicted_us: Option<f64>,
}

/// Accepted forecast times, µs: from a picosecond to some thirty years.
const TIMES: RangeInclusive<f64> = 1e-6..=1e15;

/// Why an answer is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error("invalid answer ({0}): expected one JSON object with plan, cpu_plan, or ptx or cuda with launch")]
    Form(serde_json::Error),
    #[error(
        "invalid plan ({0}): expected an object with the family and each of its genes, like the \
        incumbent's plan"
    )]
    Plan(serde_json::Error),
    /// The answer has no candidate or several.
    #[error(
        "invalid answer with {found}: expected exactly one of plan, cpu_plan, ptx and cuda, with launch \
        only beside ptx or cuda"
    )]
    Candidates {
        /// The members found.
        found: String,
    },
    #[error("invalid value '{0:e}' for predicted_us: expected {low:e} to {high:e}", low = TIMES.start(), high = TIMES.end())]
    Time(f64),
    /// Source text over the size limit.
    #[error(transparent)]
    Long(#[from] TooLong),
}

impl Proposal {
    /// Parses a proposal.
    ///
    /// # Errors
    /// When the text is not a valid proposal.
    pub fn parse(text: &str) -> Result<Proposal, AnswerError> {
        let raw: Raw = serde_json::from_str(text).map_err(AnswerError::Form)?;
        let source = |language, text, launch| Candidate::Kernel(KernelText { language, text, launch });
        let candidate = match (raw.plan, raw.cpu_plan, raw.ptx, raw.cuda, raw.launch) {
            (Some(plan), None, None, None, None) => {
                Candidate::Gpu(serde_json::from_value(plan).map_err(AnswerError::Plan)?)
            }
            (None, Some(plan), None, None, None) => {
                Candidate::Cpu(serde_json::from_value(plan).map_err(AnswerError::Plan)?)
            }
            (None, None, Some(text), None, Some(launch)) => source(Language::Ptx, text, launch),
            (None, None, None, Some(text), Some(launch)) => source(Language::Cuda, text, launch),
            (plan, cpu_plan, ptx, cuda, launch) => {
                let there = [
                    ("plan", plan.is_some()),
                    ("cpu_plan", cpu_plan.is_some()),
                    ("ptx", ptx.is_some()),
                    ("cuda", cuda.is_some()),
                    ("launch", launch.is_some()),
                ];
                let names: Vec<&str> = there.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
                let found = if names.is_empty() { "none of them".to_owned() } else { names.join(", ") };
                return Err(AnswerError::Candidates { found });
            }
        };
        if let Candidate::Kernel(source) = &candidate {
            source.check_lengths()?;
        }
        if let Some(us) = raw.predicted_us.filter(|us| !TIMES.contains(us)) {
            return Err(AnswerError::Time(us));
        }
        Ok(Proposal { candidate, hypothesis: raw.hypothesis, predicted_us: raw.predicted_us })
    }
}

/// The description of answers in the brief.
pub(super) fn help() -> Value {
    json!({
        "accepted": "one JSON object on standard output, with one of plan, cpu_plan, ptx or cuda",
        "plan": "a plan of a GPU kernel: the family and each of its genes, as in incumbent.candidate.gpu",
        "cpu_plan": "a plan of the native kernels, as in incumbent.candidate.cpu",
        "ptx": "a whole kernel as PTX; needs launch",
        "cuda": "a whole kernel as CUDA C++ (extern \"C\" __global__); needs launch",
        "launch": check::launchfile::FORMAT,
        "hypothesis": "optional: why it should be faster, in words",
        "predicted_us": "optional: what it should take, µs; kept with the hypothesis and scored",
    })
}
