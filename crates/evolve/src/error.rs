//! Why an evolution cannot continue.

use ledger::{LedgerError, Reason};

/// Why an evolution cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum EvolveError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The baseline itself was rejected.
    #[error(
        "the baseline for {problem} cannot be evaluated ({reason}: {detail}); name another plan with \
        --seed-plan, or another problem"
    )]
    Baseline { problem: String, reason: Reason, detail: String },
    /// The configuration of the run in the ledger cannot be parsed.
    #[error(
        "run {run} of the ledger cannot be resumed: this version of FlashCore cannot read its \
        configuration ({error})"
    )]
    Config { run: i64, error: serde_json::Error },
    /// Evaluations fail one after another, whatever the candidate is: the infrastructure is at fault.
    #[error(
        "the last {count} {place} all failed ({reason}: {detail}); the run is stopped and nothing is \
        lost: fix the cause and continue with --resume"
    )]
    Faults {
        /// Number of failures.
        count: usize,
        /// The kind of evaluation that failed.
        place: &'static str,
        /// The reason of the last failure.
        reason: Reason,
        /// The last failure in words.
        detail: String,
    },
    /// The request is empty or impossible.
    #[error("{what}: expected {accepted}")]
    Nothing { what: &'static str, accepted: &'static str },
}
