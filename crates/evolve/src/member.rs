//! One candidate of a population.

use std::collections::BTreeMap;

use kernels::select::Shape;
use serde_json::Value;

use super::niches::Niche;
use super::task::Stage;
use ledger::{Against, Arm, Candidate, CandidateId, MadeBy, NewCandidate, Reason, Rejection};
use ledger::{Screening, TimeKind};

/// The state of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateState {
    /// The next stage can run.
    Ready(Stage),
    /// Screened, and waiting until its whole draw is screened and the model's best are picked.
    Held,
    Timed,
    /// Rejected.
    Rejected,
}

/// A time for ranking, µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Time {
    pub low: f64,
    pub us: f64,
    pub high: f64,
}

/// A candidate with all results.
#[derive(Clone, Debug)]
pub struct Member {
    pub id: CandidateId,
    pub problem: Shape,
    /// The plan or the kernel.
    pub candidate: Candidate,
    pub hash: String,
    pub arm: Arm,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    pub parents: Vec<CandidateId>,
    /// The changes against the first parent.
    pub changes: Value,
    pub place: CandidateState,
    /// The properties of its kernel.
    pub screening: Option<Screening>,
    /// The predicted time: low, expected, high, µs.
    pub predicted: Option<[f64; 3]>,
    /// Findings of the diagnosis.
    pub findings: Value,
    /// The measured or predicted time for ranking.
    pub time: Option<Time>,
    /// Whether the time was measured or predicted.
    pub kind: Option<TimeKind>,
    /// Whether the time was taken over from an earlier run.
    pub is_taken_over: bool,
    /// The result of its race against the baseline.
    pub race: Option<Against>,
    /// The noise floor that its races on the run's problem show, as a ratio.
    pub noise: Option<f64>,
    /// The median of its last race against the baseline, µs.
    pub race_us: Option<f64>,
    /// The results of a winner's further races by problem, its second race included, or the reason why a race
    /// failed.
    pub held_out: BTreeMap<String, Result<Against, Reason>>,
    /// Why the candidate was rejected.
    pub rejection: Option<Rejection>,
    /// An earlier candidate with the same kernel.
    pub same_as: Option<CandidateId>,
}

impl Member {
    pub fn new(id: CandidateId, new: &NewCandidate) -> Member {
        Member {
            id,
            problem: new.problem,
            candidate: new.candidate.clone(),
            hash: new.candidate.hash(),
            arm: new.arm,
            operator: new.operator.clone(),
            parents: new.parents.clone(),
            changes: new.changes.clone(),
            place: CandidateState::Ready(Stage::Screen),
            screening: None,
            predicted: None,
            findings: Value::Null,
            time: None,
            kind: None,
            is_taken_over: false,
            race: None,
            noise: None,
            race_us: None,
            held_out: BTreeMap::new(),
            rejection: None,
            same_as: None,
        }
    }

    /// Whether the candidate counts towards the budget. Baseline, control and references do not.
    pub fn counts(&self) -> bool {
        matches!(self.arm, Arm::Evolution | Arm::Random)
    }

    /// Whether the candidate is one of the samples from which the time model picks.
    pub fn is_drawn(&self) -> bool {
        self.operator.is_drawn()
    }

    /// The result of the second race against the baseline. That race is run because the first one was won, so
    /// it is free of selection bias.
    pub fn confirmed(&self) -> Option<Against> {
        self.held_out.get(&key(&self.problem))?.as_ref().ok().copied()
    }

    /// Whether the candidate has stages left.
    pub fn is_open(&self) -> bool {
        matches!(self.place, CandidateState::Ready(_))
    }

    /// Whether the candidate may be a parent or win: it has a time and is not rejected.
    pub fn is_fit(&self) -> bool {
        self.time.is_some() && self.place == CandidateState::Timed
    }

    /// Whether the time is valid: the candidate is correct, even if it lost its race.
    pub fn is_timed(&self) -> bool {
        self.is_fit() || self.time.is_some() && self.race.is_some()
    }

    /// The time or, without one, the predicted time, by which candidates are ordered for the next stage.
    pub fn expected_us(&self) -> f64 {
        self.time.map(|time| time.us).or(self.predicted.map(|p| p[1])).unwrap_or(f64::INFINITY)
    }

    pub fn niche(&self) -> Niche {
        let of = |text: Option<&String>| text.cloned().unwrap_or_else(|| "unknown".to_owned());
        let screening = self.screening.as_ref();
        (of(screening.and_then(|s| s.bound.as_ref())), of(screening.and_then(|s| s.tile.as_ref())))
    }
}

/// The name of a problem in tables by problem.
pub fn key(problem: &Shape) -> String {
    serde_json::json!(problem).to_string()
}
