//! The stages that a candidate must pass, the cheapest first, and the reasons of rejection. The result of
//! each stage decides whether the next one runs:
//!
//! 1. `Screen`: plan check, emission, comparison with known kernels, ptxas' limits, spills, and a predicted
//!    time that is not far above that of the fastest known candidate;
//! 2. `Check`: the gate in the emulator;
//! 3. `Microbench`: on a GPU the gate on the device, then a short timing for ranking;
//! 4. `Race`: the fastest few against the baseline, under the rules of `bench`;
//! 5. `HeldOut`: the winner once more against the baseline, and on problems that the search never used.

use super::member::{CandidateState, Member};
use super::task::{Stage, reject};
use check::gate::Verdict;
use ledger::{Against, Candidate, CandidateId, CheckFact, Reason, Rejection};

/// Number of the random samples from which the time model picks that continue.
pub const PICKED: usize = 2;
/// Limit on spilled bytes per thread. A few spilled registers around a loop cost nothing; more spills change
/// the character of the kernel.
const SPILLS: u32 = 256;

/// Rejects a kernel that is known already.
pub fn identical(first: CandidateId, stage: Stage) -> Rejection {
    reject(stage, Reason::Identical, format!("the same kernel as candidate {}", first.0))
}

/// The reason to reject a screened candidate, if any. `standard` is the prediction of the fastest known
/// candidate.
pub fn screened(member: &Member, standard: Option<[f64; 3]>) -> Option<Rejection> {
    let spills = member.screening.as_ref().and_then(|s| s.spill_bytes).unwrap_or(0);
    if spills > SPILLS {
        return Some(reject(
            Stage::Screen,
            Reason::Spills,
            format!("invalid value '{spills}' for spilled bytes per thread: expected at most {SPILLS}"),
        ));
    }
    let ([low, _, _], [_, standard, _]) = (member.predicted?, standard?);
    // Errors of the model's constants affect both predictions, so the interval of one bounds their
    // difference.
    (low > standard).then(|| {
        let detail = format!(
            "its predicted time is at least {low:.2} µs; that of the fastest known candidate is {standard:.2} µs"
        );
        reject(Stage::Screen, Reason::PredictedSlow, detail)
    })
}

/// For a CPU, one in this many candidates is timed whatever its prediction is.
const AUDIT: i64 = 6;
/// An audit skips candidates that are predicted to take more than this many times as long as the fastest:
/// their timing would take seconds.
const AUDITED: f64 = 8.0;

/// Whether a candidate is timed despite a bad prediction. Forecasts are then also scored on slow plans, and a
/// model that rejects good plans is detected.
pub fn is_audited(member: &Member, standard: &[f64; 3]) -> bool {
    let is_cpu = matches!(member.candidate, Candidate::Cpu(_));
    let predicted = member.predicted.map_or(f64::INFINITY, |predicted| predicted[1]);
    is_cpu && member.id.0 % AUDIT == 0 && predicted < AUDITED * standard[1]
}

/// Rejects a random sample because others of its draw have better predictions.
pub fn not_picked(rank: usize) -> Rejection {
    let detail = format!("{rank} samples of the same draw have shorter predicted times");
    reject(Stage::Screen, Reason::PredictedSlow, detail)
}

/// Rejects a candidate because the budget ended before its evaluation, or before its draw was complete.
pub fn not_reached(place: CandidateState) -> Rejection {
    let (stage, detail) = match place {
        CandidateState::Ready(stage) => (stage, "the budget ended before it was its turn"),
        CandidateState::Held | CandidateState::Timed | CandidateState::Rejected => {
            (Stage::Screen, "the budget ended before all of its draw were screened")
        }
    };
    reject(stage, Reason::Budget, detail)
}

/// Rejects a finalist because the budget ended before its race.
pub fn not_raced() -> Rejection {
    reject(Stage::Race, Reason::Budget, "no time was left for its race")
}

/// The reason to reject a candidate after the gate, if any.
pub fn judged(check: &CheckFact, stage: Stage) -> Option<Rejection> {
    let reason = match (check.verdict, stage) {
        (Verdict::Passed, _) => return None,
        (Verdict::Incomplete, _) => Reason::Incomplete,
        (Verdict::Failed, Stage::Check) => Reason::Failed,
        (Verdict::Failed, _) => Reason::Wrong,
    };
    Some(reject(stage, reason, check.reasons.join("; ")))
}

/// Rejects a candidate that is slower than the baseline in its race.
pub fn lost(against: &Against) -> Rejection {
    let Against { ratio, low, high, .. } = against;
    reject(Stage::Race, Reason::Slower, format!("{ratio:.3}× the baseline's speed ({low:.3} to {high:.3})"))
}

/// Rejects a candidate that was not among the fastest when the budget was spent.
pub fn not_among_the_fastest(us: f64, best: f64) -> Rejection {
    reject(Stage::Microbench, Reason::Slower, format!("{us:.2} µs; the fastest took {best:.2}"))
}
