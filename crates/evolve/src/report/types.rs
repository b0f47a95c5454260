//! The types of a run's report. Its JSON has the schema `evolve.json` or, for several problems,
//! `evolve-several.json` in `docs/src/reference/schemas`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bench::{Load, SpeedVerdict};
use kernels::select::Shape;
use ledger::{Against, Arm, Candidate, CandidateId, Gain, MadeBy, Reason, Rejection, RunId, TimeKind};
use serde::Serialize;
use serde_json::Value;

use crate::advice::Advice;
use crate::bandit::Account;
use crate::config::Configuration;
use crate::earlier::TakenOver;
use crate::finals::{Evidence, HeldOut};
use crate::member::Member;
use crate::population::Population;
use crate::rank;

/// The report of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub cases: Cases,
    pub run: RunId,
    /// The load of the processor before the run.
    pub load: Option<Load>,
    pub ledger: PathBuf,
    pub configuration: Configuration,
    pub seed: u64,
    pub seconds: Seconds,
    pub cost: Option<Bill>,
}

/// The report on one problem, or on several.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Cases {
    One(Box<CaseReport>),
    Several { device: String, problems: Vec<CaseReport> },
}

impl Cases {
    /// The reports by problem.
    pub fn all(&self) -> &[CaseReport] {
        match self {
            Cases::One(case) => std::slice::from_ref(case),
            Cases::Several { problems, .. } => problems,
        }
    }
}

/// Time spent.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Seconds {
    pub evaluators: f64,
    pub device: f64,
}

/// The cost of the device time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bill {
    pub device_seconds: f64,
    pub price_per_hour: Option<f64>,
    pub price: Option<f64>,
}

/// The report on one problem.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    pub problem: Shape,
    pub words: String,
    pub device: String,
    /// The verdict of the search in one sentence.
    pub conclusion: String,
    /// Whether the times are measured or predicted.
    pub kind: Option<TimeKind>,
    pub baseline: Option<Shown>,
    pub best: Option<Shown>,
    /// The best candidate's race against the baseline.
    pub speedup: Option<f64>,
    pub interval: Option<[f64; 2]>,
    pub verdict: Option<SpeedVerdict>,
    /// Differences below this ratio are noise in this run.
    pub noise_floor: Option<f64>,
    pub promoted: Option<Winner>,
    pub refused: Option<Refused>,
    pub held_out: Vec<HeldOutEnd>,
    pub shipped: Option<Shipped>,
    pub random_arm: RandomArm,
    pub control: Control,
    pub candidates: Counts,
    pub rejected: BTreeMap<Reason, usize>,
    pub taken_over: TakenOver,
    /// Races that were left out for lack of time, in words.
    pub skipped: Vec<String>,
    pub forecasts: Forecasts,
    pub operators: Vec<Account>,
    pub niches: Vec<NicheBest>,
    pub decision: Advice,
}

/// A candidate with its origin.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    pub id: CandidateId,
    pub candidate: Candidate,
    pub us: Option<f64>,
    pub arm: Arm,
    pub operator: MadeBy,
    pub parents: Vec<CandidateId>,
    pub changes: Value,
}

impl Shown {
    pub(crate) fn new(member: &Member) -> Shown {
        Shown {
            id: member.id,
            candidate: member.candidate.clone(),
            us: member.time.map(|time| time.us),
            arm: member.arm,
            operator: member.operator.clone(),
            parents: member.parents.clone(),
            changes: member.changes.clone(),
        }
    }

    /// The candidate with the time by which it is ranked.
    pub(crate) fn ranked(population: &Population, member: &Member) -> Shown {
        Shown { us: rank::us(population, member), ..Shown::new(member) }
    }
}

/// The promoted candidate.
#[derive(Clone, Debug, Serialize)]
pub struct Winner {
    #[serde(flatten)]
    pub evidence: Evidence,
    pub id: CandidateId,
    pub candidate: Candidate,
    /// Whether the winner is a plan that is kept for this user.
    pub kept: bool,
    /// The winner's row of the tuned table, without its origin.
    pub row: Option<Value>,
    /// Why there is no row.
    pub no_row: Option<&'static str>,
}

/// A candidate that beat the baseline and is not promoted.
#[derive(Clone, Debug, Serialize)]
pub struct Refused {
    pub id: CandidateId,
    pub why: String,
}

/// The result of a candidate on a held-out problem.
#[derive(Clone, Debug, Serialize)]
pub struct HeldOutEnd {
    pub problem: Shape,
    pub end: End,
    pub race: Option<Against>,
    /// Why the race failed.
    pub reason: Option<Reason>,
}

/// How the race on a held-out problem ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    NotTried,
    NotComputed,
    Wrong,
    Failed,
    Raced,
}

impl HeldOutEnd {
    pub(crate) fn new(problem: Shape, found: HeldOut) -> HeldOutEnd {
        let (end, race, reason) = match found {
            HeldOut::Open => (End::NotTried, None, None),
            HeldOut::NotComputed => (End::NotComputed, None, None),
            HeldOut::Wrong => (End::Wrong, None, None),
            HeldOut::Failed(reason) => (End::Failed, None, Some(reason)),
            HeldOut::Raced(against) => (End::Raced, Some(against), None),
        };
        HeldOutEnd { problem, end, race, reason }
    }
}

/// The shipped plan and its race, if the run started elsewhere.
#[derive(Clone, Debug, Serialize)]
pub struct Shipped {
    pub candidate: Candidate,
    pub race: Option<Against>,
}

/// The control group of random samples.
#[derive(Clone, Debug, Serialize)]
pub struct RandomArm {
    pub candidates: usize,
    pub best: Option<Shown>,
    pub race: Option<Against>,
    /// The gain of the evolution over the control group.
    pub gain: Option<Gain>,
    pub at_equal_budget: EqualBudget,
    pub best_seed: Option<Shown>,
    pub says: &'static str,
}

/// The best short timings of both arms among equal numbers of candidates, µs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EqualBudget {
    pub candidates: usize,
    pub evolution_us: Option<f64>,
    pub random_us: Option<f64>,
}

/// The baseline raced against itself. The verdict must be undecided.
#[derive(Clone, Debug, Serialize)]
pub struct Control {
    pub verdict: Option<SpeedVerdict>,
    pub race: Option<Against>,
    pub rejection: Option<Rejection>,
    pub sound: Option<bool>,
}

/// Numbers of candidates by stage.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Counts {
    pub total: usize,
    pub evolution: usize,
    pub random: usize,
    pub screened: usize,
    pub timed: usize,
    pub raced: usize,
}

/// The forecasts of the time model.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Forecasts {
    pub count: usize,
    /// Number of forecasts whose times were measured afterwards.
    pub measured: usize,
    #[serde(flatten)]
    pub score: Option<Scored>,
}

/// The accuracy of the forecasts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Scored {
    pub bias: f64,
    pub coverage: f64,
    pub rank_correlation: Option<f64>,
    pub median_error: f64,
}

/// The best candidate of a niche.
#[derive(Clone, Debug, Serialize)]
pub struct NicheBest {
    pub bound: String,
    pub tile: String,
    pub candidate: CandidateId,
    pub us: f64,
}
