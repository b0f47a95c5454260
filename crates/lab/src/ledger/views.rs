//! What pages show of the ledger: plain data, small however long a run was.

use kernels::select::Shape;
use serde::Serialize;
use serde_json::Value;

use super::{
    Against, Arm, CandidateId, Forecast, MeasurementFact, NewCandidate, ProofFact, Rejection, Run, RunId,
    Screening, TimeKind, Trial,
};
use crate::climb::rank_correlation;
use crate::evolve::{Candidate, Stage};

/// Where a run stands, by its latest event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Begun or resumed: it runs, or it was killed.
    Open,
    /// Someone stopped it.
    Stopped,
    /// It came to its end.
    Finished,
}

impl RunState {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            RunState::Open => "open",
            RunState::Stopped => "stopped",
            RunState::Finished => "finished",
        }
    }
}

/// A run in the list of runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunLine {
    /// Its number.
    pub id: RunId,
    /// The device whose times are sought.
    pub device: String,
    /// The problems, in the order in which the run took them up.
    pub problems: Vec<Shape>,
    /// When it was begun, UTC.
    pub begun: String,
    /// Where it stands.
    pub state: RunState,
    /// How many candidates it has.
    pub candidates: u64,
    /// Of its first problem: what was to beat, µs.
    pub baseline_us: Option<f64>,
    /// Of its first problem: the fastest, µs.
    pub best_us: Option<f64>,
    /// Whether these are measured or predicted.
    pub kind: Option<TimeKind>,
}

/// A run, as its page shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunView {
    /// Its number.
    pub id: RunId,
    /// As it was begun.
    pub run: Run,
    /// When, UTC.
    pub begun: String,
    /// When something was last added, UTC.
    pub latest: String,
    /// Where it stands.
    pub state: RunState,
    /// How many candidates entered each stage and how many of them left it alive, in the cascade's order.
    pub funnel: Vec<Passage>,
    /// Problem by problem.
    pub problems: Vec<ProblemView>,
    /// Why candidates died, the most frequent first.
    pub deaths: Vec<Death>,
    /// What each operator earned, the largest first.
    pub operators: Vec<Earnings>,
    /// Forecasts and what came of them.
    pub forecasts: Forecasts,
    /// What the device was held for: s and what for.
    pub spent: Vec<(String, f64)>,
    /// What was decided, in order.
    pub decisions: Vec<Decided>,
}

/// A stage of the cascade and who passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Passage {
    /// The stage.
    pub stage: Stage,
    /// How many it was done to.
    pub entered: u64,
    /// How many died of it.
    pub died: u64,
}

/// A problem of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProblemView {
    /// The problem.
    pub problem: Shape,
    /// What was to beat.
    pub baseline: Option<Timed>,
    /// The fastest, the control left out.
    pub best: Option<Timed>,
    /// The best so far, arm by arm.
    pub curves: Vec<Curve>,
    /// The best and its ancestors, each before its parents.
    pub lineage: Vec<Ancestor>,
    /// The fastest of each niche.
    pub niches: Vec<Niche>,
    /// The fastest, in order.
    pub top: Vec<Timed>,
    /// The baseline again, as if it were new.
    pub control: Option<Timed>,
}

/// A candidate with a time on its own problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timed {
    /// Its number.
    pub id: CandidateId,
    /// Why it is in the run.
    pub arm: Arm,
    /// How it was made.
    pub operator: String,
    /// In a few words: the family and the tile, or the language.
    pub name: String,
    /// Median, µs.
    pub us: f64,
    /// Lower end of its interval, µs.
    pub low_us: f64,
    /// Upper end.
    pub high_us: f64,
    /// Measured or predicted.
    pub kind: TimeKind,
    /// By which trial.
    pub trial: Trial,
    /// The race that it was in, where it was in one.
    pub against: Option<Against>,
    /// Whether it was promoted.
    pub promoted: bool,
}

/// The best so far of one arm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// The arm.
    pub arm: Arm,
    /// Candidates that it had in all.
    pub tried: u64,
    /// Each candidate that was faster than all before it in its arm.
    pub steps: Vec<Improvement>,
}

/// A candidate that was faster than all before it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Improvement {
    /// Candidates of the arm up to it.
    pub tried: u64,
    /// Which.
    pub candidate: CandidateId,
    /// Its time, µs.
    pub us: f64,
}

/// A candidate and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ancestor {
    /// Its number.
    pub id: CandidateId,
    /// How it was made.
    pub operator: String,
    /// From what.
    pub parents: Vec<CandidateId>,
    /// What differs from the first parent: `{"block_n": [64, 128]}`.
    pub changes: Value,
    /// Its time, µs, where it got that far.
    pub us: Option<f64>,
}

/// The fastest of a niche.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Niche {
    /// What bounds its kernels.
    pub bound: String,
    /// Their tile.
    pub tile: String,
    /// How many candidates with a time are in it.
    pub count: u64,
    /// The fastest.
    pub best: CandidateId,
    /// Its time, µs.
    pub us: f64,
}

/// Why candidates died.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Death {
    /// At which stage.
    pub stage: Stage,
    /// The reason, in one word.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// One of the latest, and what was said of it.
    pub example: Option<(CandidateId, String)>,
}

/// What an operator earned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Earnings {
    /// The operator.
    pub operator: String,
    /// Candidates it made.
    pub tried: u64,
    /// Of these, with a time.
    pub timed: u64,
    /// Of these, faster than the incumbent in a race.
    pub faster: u64,
    /// Of these, promoted.
    pub promoted: u64,
    /// The product of time before / time after, of those that were faster than all before them in their arm.
    pub gain: f64,
}

/// Forecasts of candidates and what was measured of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Forecasts {
    /// Pairs, at most some thousands of them, evenly over the run.
    pub points: Vec<Foretold>,
    /// How good they were; `None` where nothing was measured.
    pub score: Option<ForecastScore>,
}

/// A forecast and its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Foretold {
    /// Of which candidate; of none where it was an idea.
    pub candidate: Option<CandidateId>,
    /// Lower end, µs.
    pub low_us: f64,
    /// What was expected, µs.
    pub us: f64,
    /// Upper end, µs.
    pub high_us: f64,
    /// What was measured, µs.
    pub outcome_us: f64,
}

/// How good forecasts were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ForecastScore {
    /// Forecasts with an outcome.
    pub count: u64,
    /// exp of the mean of ln(forecast / measured): above 1, the forecaster expects too much time.
    pub bias: f64,
    /// Median of |forecast / measured − 1|.
    pub median_error: f64,
    /// Share of outcomes within the forecast's interval.
    pub coverage: f64,
    /// Spearman's rank correlation.
    pub spearman: f64,
}

impl ForecastScore {
    /// Of forecasts with their outcomes; `None` of none.
    pub fn of(points: &[Foretold]) -> Option<ForecastScore> {
        let n = points.len() as f64;
        let pairs: Vec<(f64, f64)> = points.iter().map(|p| (p.us, p.outcome_us)).collect();
        let errors: Vec<f64> = pairs.iter().map(|(forecast, us)| (forecast / us - 1.0).abs()).collect();
        let within = |p: &&Foretold| (p.low_us..=p.high_us).contains(&p.outcome_us);
        (!points.is_empty()).then(|| ForecastScore {
            count: points.len() as u64,
            bias: (pairs.iter().map(|(forecast, us)| (forecast / us).ln()).sum::<f64>() / n).exp(),
            median_error: crate::bench::median(&errors),
            coverage: points.iter().filter(within).count() as f64 / n,
            spearman: rank_correlation(&pairs),
        })
    }
}

/// A decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decided {
    /// What.
    pub what: String,
    /// Of which candidate.
    pub candidate: Option<CandidateId>,
    /// The figures behind it.
    pub why: Value,
    /// When, UTC.
    pub when: String,
}

/// A candidate in a list of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateLine {
    /// Its number.
    pub id: CandidateId,
    /// Why it is in the run.
    pub arm: Arm,
    /// How it was made.
    pub operator: String,
    /// The last stage that it came to.
    pub stage: Option<Stage>,
    /// Why it went no further.
    pub rejected: Option<String>,
    /// What the model expects, µs.
    pub predicted_us: Option<f64>,
    /// Its time, µs.
    pub us: Option<f64>,
    /// Whether it was promoted.
    pub promoted: bool,
}

/// Everything known of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct CandidateView {
    /// Its number.
    pub id: CandidateId,
    /// As it was added.
    pub new: NewCandidate,
    /// When, UTC.
    pub when: String,
    /// The device of its run.
    pub device: String,
    /// What it is once emitted, with what the diagnosis said.
    pub screening: Option<(Screening, Value)>,
    /// What was expected of it.
    pub forecasts: Vec<Forecast>,
    /// The gate's verdicts.
    pub proofs: Vec<ProofFact>,
    /// Its times.
    pub measurements: Vec<MeasurementFact>,
    /// Why it went no further.
    pub rejections: Vec<Rejection>,
    /// Candidates made from it, the first of them.
    pub children: Vec<CandidateId>,
}

/// Someone's forecast of an idea.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Its number.
    pub id: i64,
    /// The forecast.
    pub forecast: Forecast,
    /// What came of it, µs, and the note.
    pub outcome: Option<(f64, String)>,
}

impl CandidateView {
    /// The best-founded time on its own problem: of a race, else of the microbench; the latest of these.
    pub fn time(&self) -> Option<&MeasurementFact> {
        let of = |trial| self.measurements.iter().rev().find(move |m| m.trial == trial);
        of(Trial::Race).or_else(|| of(Trial::Microbench))
    }
}

/// A candidate in a few words: the family and its tile, or the language and the hash.
pub fn in_words(candidate: &Candidate) -> String {
    let genes = match candidate {
        Candidate::Gpu(plan) => serde_json::json!(plan),
        Candidate::Cpu(plan) => serde_json::json!(plan),
        Candidate::Kernel(source) => {
            return format!("{} kernel {}", source.language.name(), &candidate.hash()[..8]);
        }
    };
    let word = |gene: &str| genes.get(gene).map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
    let pair = |a: &str, b: &str| Some(format!("{}×{}", word(a)?, word(b)?));
    let kind = word("family").or_else(|| word("isa")).unwrap_or_default();
    let count = |gene: &str, one: &str| {
        let n = word(gene).filter(|n| n != "null")?;
        Some(if n == "1" { format!("1 {one}") } else { format!("{n} {one}s") })
    };
    let parts = [
        Some(kind),
        pair("block_m", "block_n").or_else(|| pair("block_q", "block_kv")).or_else(|| word("rung")),
        count("warps", "warp")
            .or_else(|| count("warpgroups", "warpgroup"))
            .or_else(|| count("threads", "thread")),
        count("stages", "stage"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

impl RunView {
    /// Whether its times are the time model's: of a run with none yet, that is not known.
    pub fn kind(&self) -> Option<TimeKind> {
        self.problems.iter().find_map(|p| p.best.as_ref().or(p.baseline.as_ref())).map(|timed| timed.kind)
    }

    /// Seconds that the device was held.
    pub fn device_seconds(&self) -> f64 {
        self.spent.iter().map(|(_, seconds)| seconds).sum()
    }

    /// What that cost, where an hour's price is known.
    pub fn cost(&self) -> Option<f64> {
        Some(self.run.price_per_hour? * self.device_seconds() / 3600.0)
    }
}

impl ProblemView {
    /// The curve of an arm.
    pub fn curve(&self, arm: Arm) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.arm == arm)
    }

    /// time(baseline) / time(best): a race of the two where there was one, with its interval, else the quotient of their times.
    pub fn speedup(&self) -> Option<(f64, Option<(f64, f64)>)> {
        let (baseline, best) = (self.baseline.as_ref()?, self.best.as_ref()?);
        let race = best.against.filter(|race| race.incumbent == baseline.id);
        Some(match race {
            Some(race) => (race.ratio, Some((race.low, race.high))),
            None => (baseline.us / best.us, None),
        })
    }
}

impl Curve {
    /// The last and best.
    pub fn best_us(&self) -> Option<f64> {
        self.steps.last().map(|step| step.us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forecasts_are_scored() {
        let point = |us: f64, outcome_us: f64| Foretold {
            candidate: None,
            low_us: 0.9 * us,
            us,
            high_us: 1.1 * us,
            outcome_us,
        };
        assert_eq!(ForecastScore::of(&[]), None);
        let score = ForecastScore::of(&[point(1.0, 1.0), point(2.0, 1.0), point(4.0, 4.1)]).unwrap();
        assert_eq!((score.count, score.coverage), (3, 2.0 / 3.0));
        assert!((score.bias - (2.0f64 * 4.0 / 4.1).cbrt()).abs() < 1e-12, "{score:?}");
        assert!((score.median_error - (1.0 - 4.0 / 4.1)).abs() < 1e-12);
        // Ranks 0, 1, 2 against ½, ½, 2.
        assert!((score.spearman - 0.866).abs() < 1e-3);
    }
}
