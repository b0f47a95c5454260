//! What a candidate must pass, the cheapest first, and the words in which it fails. Each stage's answer decides whether the next is
//! asked for:
//!
//! 1. `Screen`: plan check, emission, identity with a kernel known already, ptxas' limits, spills, and a predicted time that is not
//!    hopeless beside the fastest known;
//! 2. `Check`: the gate in the emulator;
//! 3. `Microbench`: on a GPU the gate there, then a short timing to rank by;
//! 4. `Race`: the fastest few against the baseline, by the law of time;
//! 5. `HeldOut`: the winner once more against the baseline, and on problems that the search never saw.

use super::population::{Member, Place};
use super::task::Stage;
use crate::gate::Verdict;
use crate::ledger::{Against, CandidateId, CheckFact, Rejection};

/// The operator of the draws that the model picks from.
pub const DRAWN: &str = "seed:model";
/// How many of them go on.
pub const PICKED: usize = 2;
/// Bytes that a thread may spill: a few registers around a loop cost nothing, more is another kernel than was meant.
const SPILLS: u32 = 256;

fn reject(stage: Stage, reason: &str, detail: String) -> Rejection {
    Rejection { stage, reason: reason.to_owned(), detail }
}

/// What is known already is not evaluated again.
pub fn identical(first: CandidateId, stage: Stage) -> Rejection {
    reject(stage, "identical", format!("the same kernel as candidate {}", first.0))
}

/// Why a screened candidate goes no further. `standard` is the prediction of the fastest known.
pub fn screened(member: &Member, standard: Option<[f64; 3]>) -> Option<Rejection> {
    let spills = member.screening.as_ref().and_then(|s| s.spill_bytes).unwrap_or(0);
    if spills > SPILLS {
        return Some(reject(
            Stage::Screen,
            "spills",
            format!("{spills} bytes a thread; up to {SPILLS} are let pass"),
        ));
    }
    let ([low, _, _], [_, standard, _]) = (member.predicted?, standard?);
    // Constants of the model that are off are off for both: the interval of one is what two predictions may differ by.
    (low > standard).then(|| {
        let detail =
            format!("at least {low:.2} µs are predicted where {standard:.2} are of the fastest known");
        reject(Stage::Screen, "predicted_slow", detail)
    })
}

/// Of a draw, others were predicted to be faster.
pub fn not_picked(rank: usize) -> Rejection {
    let detail = format!("{} others of its draw are predicted to be faster", rank);
    reject(Stage::Screen, "predicted_slow", detail)
}

/// The budget ended before it was evaluated, or before its draw was whole.
pub fn not_reached(place: Place) -> Rejection {
    let (stage, detail) = match place {
        Place::Ready(stage) => (stage, "the budget ended before it was its turn"),
        Place::Held | Place::Timed | Place::Dead => {
            (Stage::Screen, "the budget ended before all of its draw were screened")
        }
    };
    reject(stage, "budget", detail.to_owned())
}

/// Among the fastest, but the budget ended before it raced.
pub fn not_raced() -> Rejection {
    reject(Stage::Race, "budget", "no time was left for its race".to_owned())
}

/// Why a judged candidate goes no further.
pub fn judged(check: &CheckFact, stage: Stage) -> Option<Rejection> {
    let reason = match (check.verdict, stage) {
        (Verdict::Passed, _) => return None,
        (Verdict::Incomplete, _) => "incomplete",
        (Verdict::Failed, Stage::Check) => "failed",
        (Verdict::Failed, _) => "wrong",
    };
    Some(reject(stage, reason, check.reasons.join("; ")))
}

/// Slower than what it raced.
pub fn lost(against: &Against) -> Rejection {
    let Against { ratio, low, high, .. } = against;
    reject(Stage::Race, "slower", format!("{ratio:.3}× the baseline's speed ({low:.3} to {high:.3})"))
}

/// Not among the fastest when the budget was spent.
pub fn not_among_the_fastest(us: f64, best: f64) -> Rejection {
    reject(Stage::Microbench, "slower", format!("{us:.2} µs; the fastest took {best:.2}"))
}
