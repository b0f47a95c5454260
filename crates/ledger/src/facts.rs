//! The facts of the ledger. A fact is written once and never changed. Each type is a row of one table.

use kernels::select::Shape;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stage::Stage;
use crate::{Candidate, MadeBy, Reason};
use bench::SpeedVerdict;
use check::gate::Verdict;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub i64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CandidateId(pub i64);

/// A search with its configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The device for which times are optimised: the name given by its driver, or its name in the time
    /// model's table.
    pub device: String,
    /// The whole configuration of the search, so that the run can be resumed.
    pub config: Value,
    /// Driver (or model), compiler and commit.
    pub environment: Environment,
    /// Price of one hour of device time, in any currency.
    pub price_per_hour: Option<f64>,
}

/// The software and hardware that produced the results of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    pub device: String,
    pub driver: String,
    pub compiler: String,
    pub commit: Option<String>,
}

/// A change in the state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEvent {
    /// The run continues after a stop or a crash.
    Resumed,
    /// A user stopped the run.
    Stopped,
    Finished,
}

/// The role of a candidate in a run: the search itself, a control group, or the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The candidate that the run tries to beat.
    Baseline,
    /// Made by the search.
    Evolution,
    /// A random sample of the same search space.
    Random,
    /// The baseline again, treated as a new candidate.
    Control,
}

/// A plan or a kernel with its origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewCandidate {
    pub run: RunId,
    /// The problem that it computes.
    pub problem: Shape,
    /// The plan or the source of the kernel.
    pub candidate: Candidate,
    pub arm: Arm,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    /// The parents: none for a seed, one after a mutation, two after a crossover.
    pub parents: Vec<CandidateId>,
    /// The changes from the first parent, gene by gene: `{"block_n": [64, 128]}`.
    pub changes: Value,
}

/// Properties of a candidate's emitted kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Screening {
    /// Hash of the PTX; for a CPU plan, hash of the plan.
    pub ptx_hash: String,
    /// Hash of the machine code, if ptxas assembled it.
    pub sass_hash: Option<String>,
    /// Registers per thread.
    pub registers: Option<u32>,
    /// Spilled bytes per thread.
    pub spill_bytes: Option<u32>,
    /// Shared memory per CTA, bytes.
    pub shared_bytes: Option<u32>,
    /// The bottleneck that the time model predicts, one coordinate of the candidate's niche.
    pub bound: Option<String>,
    /// Rows × keys of the tile, the other coordinate of the niche.
    pub tile: Option<String>,
}

/// A forecast of a time before the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// The candidate; `None` for the forecast of a person's idea.
    pub candidate: Option<CandidateId>,
    /// The idea in words; empty for a candidate's own time.
    pub hypothesis: String,
    /// The author: `model`, `model:recalibrated`, or a person's name.
    pub author: String,
    /// The device. A candidate's forecast has the device of its run.
    pub device: String,
    /// The problem. A candidate's forecast has the candidate's problem.
    pub problem: Option<Shape>,
    /// Lower end of the forecast interval, µs.
    pub low_us: f64,
    /// The forecast time, µs.
    pub us: f64,
    /// Upper end of the forecast interval, µs.
    pub high_us: f64,
}

/// The outcome of an idea's forecast. A candidate's forecast has its measurements as outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForecastOutcome {
    pub forecast: i64,
    /// The measured time, µs.
    pub us: f64,
    pub note: String,
}

/// Where a candidate was checked.
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
    pub judge: Judge,
    pub verdict: Verdict,
    /// Why the verdict is not *passed*. For a verdict taken over from an earlier run, the name of that run.
    pub reasons: Vec<String>,
    /// The hazards in the form of `check --json`.
    pub hazards: Value,
    /// Relative Frobenius error of the worst run.
    pub error_rel: Option<f64>,
    /// Duration of the check, s.
    pub seconds: f64,
}

/// How a time was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trial {
    /// A short timing that ranks candidates.
    Microbench,
    /// A race against the incumbent under the rules of `bench`.
    Race,
    /// A race on a problem that the search never used; for a winner, also a second race on its own problem.
    HeldOut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeKind {
    Measured,
    /// Predicted by the time model for a device that is not available.
    Predicted,
}

/// The times of a candidate in one trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasurementFact {
    pub trial: Trial,
    pub kind: TimeKind,
    /// The problem. Most [`Trial::HeldOut`] trials use a problem other than the candidate's own.
    pub problem: Shape,
    /// Every sample, µs per call. Empty for a time taken over from an earlier run.
    pub samples: Vec<f64>,
    /// The time, µs: for a race on a GPU the median, otherwise the trimmed mean of the logarithms. For a
    /// short timing in turns with the baseline: the baseline's own time divided by the measured speed-up.
    pub us: f64,
    /// Lower end of the interval, µs.
    pub low_us: f64,
    /// Upper end of the interval, µs.
    pub high_us: f64,
    /// The result of a race against the incumbent.
    pub against: Option<Against>,
}

impl MeasurementFact {
    /// The noise floor that this race of a candidate of `arm` shows, as a ratio; `None` for a short timing.
    /// It is the largest of the race's own floor, the possible effect of samples with two modes, and, in the
    /// A/A control, the distance of the ratio from 1.
    pub fn noise_floor(&self, arm: Arm) -> Option<f64> {
        let Against { ratio, noise, .. } = self.against.filter(|_| self.trial != Trial::Microbench)?;
        let control = if arm == Arm::Control { ratio.max(1.0 / ratio) } else { 1.0 };
        // The factor by which the trimmed means may differ if one contestant meets the slower mode more
        // often.
        let modes = bench::two_modes(&self.samples);
        let modes = modes.map_or(1.0, |[fast, slow, share]| (slow / fast).powf(share.min(1.0 - share)));
        Some(noise.max(control).max(modes))
    }
}

/// The result of a race against an incumbent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    pub incumbent: CandidateId,
    /// time(incumbent) / time(candidate): above 1, the candidate is faster.
    pub ratio: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
    pub noise: f64,
    pub verdict: SpeedVerdict,
}

/// The reason and the stage of a candidate's rejection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rejection {
    pub stage: Stage,
    /// A rejected candidate is ranked only if it has a time and its reason is one of [`Reason::RANKED`]. A
    /// rejection on a held-out problem is ignored.
    pub reason: Reason,
    /// The reason in words.
    pub detail: String,
}

/// A decision of a run with its reasons.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// `promoted`, `refused` (a promotion), `failed` (the run), `continue`, `stop` or `use_a_library`.
    pub what: String,
    pub candidate: Option<CandidateId>,
    /// The figures behind the decision.
    pub why: Value,
}
