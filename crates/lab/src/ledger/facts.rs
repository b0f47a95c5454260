//! What the ledger keeps: facts, each written once and never changed. Every type is one table's row, as it is written.

use kernels::select::Shape;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::SpeedVerdict;
use crate::evolve::{Candidate, Stage};
use crate::gate::Verdict;

/// Number of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub i64);

/// Number of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CandidateId(pub i64);

/// A search that was begun.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The device whose times are sought, as its driver or the time model's table of machines names it.
    pub device: String,
    /// How it searches: the whole configuration, so that it can be resumed.
    pub config: Value,
    /// Driver (or model), compiler, commit.
    pub environment: Environment,
    /// What an hour of the device costs, in whatever currency.
    pub price_per_hour: Option<f64>,
}

/// Where figures come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in evidence rows")]
pub struct Environment {
    pub device: String,
    pub driver: String,
    pub compiler: String,
    pub commit: Option<String>,
}

/// What happened to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEvent {
    /// It goes on after a stop or a crash.
    Resumed,
    /// Someone stopped it.
    Stopped,
    /// It came to its end.
    Finished,
}

/// Why a candidate is in a run: the search's own, the arm that shows what the search gains, or the one that shows the noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// What the run is to beat.
    Baseline,
    /// Made by the search.
    Evolution,
    /// Drawn blindly from the same space.
    Random,
    /// The baseline again, as if it were new.
    Control,
}

/// Something that could be run, and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewCandidate {
    /// Its run.
    pub run: RunId,
    /// What it computes.
    pub problem: Shape,
    /// What would be run.
    pub candidate: Candidate,
    /// Why it is in the run.
    pub arm: Arm,
    /// How it was made: `seed:tuned`, `mutate:block_n`, `crossover`, `insight:serial_reduction`, `proposer`, ….
    pub operator: String,
    /// From what: none of a seed, one of a mutation, two of a crossing.
    pub parents: Vec<CandidateId>,
    /// What differs from the first parent, gene by gene: `{"block_n": [64, 128]}`.
    pub changes: Value,
}

/// What a candidate is once it is emitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Screening {
    /// Of its PTX; of a CPU plan, of the plan.
    pub ptx_hash: String,
    /// Of its machine code, where ptxas made it.
    pub sass_hash: Option<String>,
    /// A thread's registers.
    pub registers: Option<u32>,
    /// Bytes that a thread spills.
    pub spill_bytes: Option<u32>,
    /// Bytes of shared memory of a CTA.
    pub shared_bytes: Option<u32>,
    /// What bounds it, as the time model says: a niche's coordinate.
    pub bound: Option<String>,
    /// Rows × keys of its tile: the other coordinate.
    pub tile: Option<String>,
}

/// What someone expects of something, before it is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Of which candidate; of none where a person forecasts an idea.
    pub candidate: Option<CandidateId>,
    /// The idea in words; empty for a candidate's own time.
    pub hypothesis: String,
    /// Who: `model`, `model:recalibrated`, or a person's name.
    pub author: String,
    /// On which device: of a candidate its own.
    pub device: String,
    /// Of which problem: of a candidate its own.
    pub problem: Option<Shape>,
    /// Lower end of what is expected, µs.
    pub low_us: f64,
    /// What is expected, µs.
    pub us: f64,
    /// Upper end, µs.
    pub high_us: f64,
}

/// How an idea's forecast came out; of a candidate's forecast its measurements say it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForecastOutcome {
    /// The forecast's number.
    pub forecast: i64,
    /// What was measured, µs.
    pub us: f64,
    /// Anything to remember.
    pub note: String,
}

/// What judged a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judge {
    /// The gate in the emulator.
    Emulator,
    /// The gate on the device.
    Device,
}

/// A verdict of the gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckFact {
    /// Who judged.
    pub judge: Judge,
    /// The verdict.
    pub verdict: Verdict,
    /// Why the candidate did not pass; of a verdict that was taken over from an earlier run, the candidate it comes from.
    pub reasons: Vec<String>,
    /// Hazards, as `check --json` gives them.
    pub hazards: Value,
    /// Relative Frobenius error of the worst run.
    pub error_rel: Option<f64>,
    /// What it took, s.
    pub seconds: f64,
}

/// What kind of time it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trial {
    /// Short: to rank.
    Microbench,
    /// Against the incumbent, by the law of time.
    Race,
    /// The same on a problem that the search never saw; of a winner, once more on its own.
    HeldOut,
}

/// How the time came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeKind {
    /// On the device.
    Measured,
    /// By the time model, for a device that is not at hand.
    Predicted,
}

/// Times of a candidate, all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasurementFact {
    /// What kind.
    pub trial: Trial,
    /// Measured or predicted.
    pub kind: TimeKind,
    /// On which problem: another than the candidate's own for most of [`Trial::HeldOut`].
    pub problem: Shape,
    /// Every sample, µs a call; none of a time that was taken over from an earlier run.
    pub samples: Vec<f64>,
    /// Median, µs; of a short timing that was taken in turns with the baseline's, that one's own time over the ratio.
    pub us: f64,
    /// Lower end of its interval, µs.
    pub low_us: f64,
    /// Upper end.
    pub high_us: f64,
    /// Of a race: against which candidate, and how it ended.
    pub against: Option<Against>,
}

/// How a race ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    /// The incumbent.
    pub incumbent: CandidateId,
    /// time(incumbent) / time(candidate): above 1, the candidate is faster.
    pub ratio: f64,
    /// Lower end of its 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The noise floor of the race.
    pub noise: f64,
    /// The verdict on the candidate.
    pub verdict: SpeedVerdict,
}

/// Why a candidate died, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rejection {
    /// At which stage of the cascade.
    pub stage: Stage,
    /// In one word, to count: `plan`, `emit`, `launch`, `identical`, `ptxas`, `spills`, `predicted_slow`, `budget`, `failed`, `incomplete`,
    /// `wrong`, `fault`, `hangs`, `crashed`, `slower`, …. A candidate of any other reason than `slower`, or `budget` once it has a time,
    /// is not ranked; what befell it on a held-out problem is no such reason.
    pub reason: String,
    /// In words.
    pub detail: String,
}

/// What was decided, by what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// `promoted`, `refused` (a promotion), `failed` (the run), `continue`, `stop`, `use_a_library`.
    pub what: String,
    /// Of which candidate.
    pub candidate: Option<CandidateId>,
    /// The figures behind it.
    pub why: Value,
}
