//! The data of a search's pages, from the ledger's summaries. The amount of data does not grow with the
//! search.

use std::collections::{HashSet, VecDeque};

use kernels::select::Shape;
use serde_json::{Value, json};

use bench::provenance::iso8601;
use bench::two_modes;
use ledger::{
    Ancestor, Arm, CHANCE, CandidateId, Conclusion, Corner, Cost, Decided, Earnings, Entered, Gain, Ledger,
    LedgerError, MeasurementFact, Niche, Pair, Ranked, Reason, Run, RunEvent, RunId, RunLine, Tally,
    TimeKind, Trial,
};
use ledger::{Candidate, Stage};

/// Number of candidates in a run's ranking.
const TOP: usize = 12;
/// Number of ancestors of the best that are drawn, the nearest ones.
pub const ANCESTORS: usize = 40;
/// Number of newest forecasts that are drawn and scored.
pub const POINTS: usize = 1500;
/// Number of operators in the list.
const OPERATORS: usize = 30;
/// Number of newest decisions in the list.
const DECISIONS: usize = 50;
/// The author of forecasts for candidates.
const MODEL: &str = "model";

/// The stages in their order.
const STAGES: [Stage; 6] =
    [Stage::Propose, Stage::Screen, Stage::Check, Stage::Microbench, Stage::Race, Stage::HeldOut];

/// The data of a run's page.
#[derive(Clone, Debug)]
pub struct RunView {
    pub id: RunId,
    pub run: Run,
    /// Start time, UTC.
    pub begun: String,
    /// Time of the latest fact, UTC.
    pub latest: String,
    pub state: State,
    /// Number of candidates, without baselines and controls.
    pub candidates: i64,
    /// Number of candidates with a time.
    pub timed: i64,
    /// Entered and rejected candidates of each stage, in the cascade's order.
    pub funnel: Vec<Passage>,
    pub problems: Vec<ProblemView>,
    /// Reasons of rejection, the most frequent first.
    pub rejections: Vec<Rejected>,
    /// Results of the operators, the largest gain first.
    pub operators: Vec<Earnings>,
    /// The model's newest forecasts with an outcome.
    pub forecasts: Vec<Pair>,
    pub cost: Cost,
    /// The decisions in order.
    pub decisions: Vec<Decided>,
}

/// The state of a run, by its latest event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Begun or resumed: the run is active, or its process was killed.
    Open,
    Stopped,
    Finished,
}

impl State {
    fn after(event: Option<RunEvent>) -> State {
        match event {
            Some(RunEvent::Finished) => State::Finished,
            Some(RunEvent::Stopped) => State::Stopped,
            Some(RunEvent::Resumed) | None => State::Open,
        }
    }

    /// The name on the page.
    pub const fn name(self) -> &'static str {
        match self {
            State::Open => "open",
            State::Stopped => "stopped",
            State::Finished => "finished",
        }
    }
}

/// A stage of the cascade with its counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    pub stage: Stage,
    /// How often the stage was carried out.
    pub entered: i64,
    /// Number of candidates that the stage rejected.
    pub rejected: i64,
}

/// Candidates that were rejected at one stage for one reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
    pub stage: Stage,
    pub reason: Reason,
    pub count: i64,
    /// The latest such candidate, with the details of its rejection.
    pub example: (CandidateId, String),
}

/// The data of one problem of a run.
#[derive(Clone, Debug)]
pub struct ProblemView {
    pub problem: Shape,
    /// The candidate to beat.
    pub baseline: Option<Ranked>,
    /// The shipped plan, if it was not the baseline.
    pub reference: Option<Ranked>,
    /// The first of the ranking.
    pub best: Option<Ranked>,
    /// The gain of the evolution over random samples, once the run is finished.
    pub chance: Option<Chance>,
    /// The first random sample of the ranking.
    pub drawn: Option<Ranked>,
    /// The best times so far, one curve per arm.
    pub curves: Vec<Curve>,
    /// The best and its ancestors, nearest first: up to one more than are drawn.
    pub lineage: Vec<Ancestor>,
    /// The fastest of each niche.
    pub niches: Vec<Niche>,
    /// The best candidates in the ledger's order: those that raced come first.
    pub top: Vec<Ranked>,
    /// The baseline treated as a new candidate.
    pub control: Option<Ranked>,
    /// The races against the baseline, in the order of the ranking; the control's is the last.
    pub races: Vec<RaceView>,
    /// The noise floor of all races on the problem, as a ratio.
    pub noise_floor: Option<f64>,
    /// Whether a candidate beats the baseline by more than the noise, and the verdict in one sentence.
    pub conclusion: (bool, String),
}

/// The gain of the evolution over random samples.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Chance {
    /// `None` if the two did not race.
    pub gain: Option<Gain>,
    pub says: String,
}

/// A race against the baseline.
#[derive(Clone, Debug)]
pub struct RaceView {
    pub ranked: Ranked,
    /// Every sample of the candidate, µs per call.
    pub samples: Vec<f64>,
    /// The two modes of the samples and the share of the slower one, if they have two.
    pub modes: Option<[f64; 3]>,
}

/// The best times so far of one arm.
#[derive(Clone, Debug)]
pub struct Curve {
    pub arm: Arm,
    /// Number of the arm's candidates.
    pub tried: i64,
    /// Each candidate that was faster than all earlier ones of its arm, by one trial.
    pub steps: Vec<Corner>,
}

/// A run in the list of runs.
#[derive(Clone, Debug)]
pub struct RunRow {
    /// The run's number, device and counts.
    pub line: RunLine,
    /// Start time, UTC.
    pub begun: String,
    pub state: State,
    pub problems: Vec<Shape>,
    /// The baseline of its first problem.
    pub baseline: Option<Ranked>,
    /// The best candidate of its first problem.
    pub best: Option<Ranked>,
    /// The verdict on its first problem.
    pub conclusion: String,
}

/// Whether the forecast's interval contains the measured time.
pub fn within(pair: &Pair) -> bool {
    (pair.low_us..=pair.high_us).contains(&pair.measured_us)
}

/// A candidate in a few words: the family and its tile, or the language and the hash.
pub fn in_words(candidate: &Candidate) -> String {
    let genes = match candidate {
        Candidate::Gpu(plan) => json!(plan),
        Candidate::Cpu(plan) => json!(plan),
        Candidate::Kernel(source) => {
            return format!("{} kernel {}", source.language.name(), &candidate.hash()[..8]);
        }
    };
    let word = |gene: &str| genes.get(gene).map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
    let pair = |a: &str, b: &str| Some(format!("{}×{}", word(a)?, word(b)?));
    let count = |gene: &str, one: &str| {
        let n = word(gene).filter(|n| n != "null")?;
        Some(if n == "1" { format!("1 {one}") } else { format!("{n} {one}s") })
    };
    let parts = [
        word("family").or_else(|| word("isa")),
        pair("block_m", "block_n").or_else(|| pair("block_q", "block_kv")).or_else(|| word("rung")),
        count("warps", "warp")
            .or_else(|| count("warpgroups", "warpgroup"))
            .or_else(|| count("threads", "thread")),
        count("stages", "stage"),
    ];
    let (kind, rest) = parts.split_at(2);
    let kind = kind.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(" ");
    std::iter::once(&kind).chain(rest.iter().flatten()).map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// The genes in which a plan differs from another one of its family, with their values; `None` for other
/// families and for kernels.
pub(super) fn differing(from: &Candidate, to: &Candidate) -> Option<String> {
    let genes = |candidate: &Candidate| match candidate {
        Candidate::Gpu(plan) => json!(plan).as_object().cloned(),
        Candidate::Cpu(plan) => json!(plan).as_object().cloned(),
        Candidate::Kernel(_) => None,
    };
    let (from, to) = (genes(from)?, genes(to)?);
    let kind = |genes: &serde_json::Map<String, Value>| genes.get("family").or(genes.get("rung")).cloned();
    if kind(&from) != kind(&to) {
        return None;
    }
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let differing = to.iter().filter(|(gene, value)| from.get(*gene) != Some(value));
    let words: Vec<String> = differing.map(|(gene, value)| format!("{gene} {}", plain(value))).collect();
    Some(if words.is_empty() { "as the baseline".to_owned() } else { words.join(", ") })
}

/// Formats milliseconds since 1970 as UTC.
pub fn moment(at: i64) -> String {
    let iso = iso8601(u64::try_from(at).unwrap_or(0) / 1000);
    format!("{} UTC", iso.trim_end_matches('Z').replacen('T', " ", 1))
}

impl RunView {
    /// The view of a run in the ledger.
    ///
    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn of(ledger: &Ledger, id: RunId) -> Result<RunView, LedgerError> {
        let (run, tallies) = (ledger.run(id)?, ledger.tallies(id)?);
        let (begun, latest) = ledger.span(id)?;
        let shapes = searched(&tallies);
        let curves = |shape: &Shape| -> Vec<(Arm, i64)> {
            tallies.iter().filter(|t| t.problem == *shape).map(|t| (t.arm, t.candidates)).collect()
        };
        let counted = || tallies.iter().filter(|t| is_candidate(t.arm));
        let problems = shapes.iter().map(|shape| ProblemView::of(ledger, id, shape, &curves(shape)));
        let cost = ledger.cost(id)?;
        let rejections = reasons(ledger, id)?;
        let candidates = counted().map(|t| t.candidates).sum();
        Ok(RunView {
            id,
            begun: moment(begun),
            latest: moment(latest),
            state: State::after(ledger.events(id)?.last().map(|(_, event)| *event)),
            candidates,
            timed: counted().map(|t| t.timed).sum(),
            funnel: funnel(candidates, &ledger.entered(id)?, &rejections),
            problems: problems.collect::<Result<_, _>>()?,
            operators: ledger.operators(id)?.into_iter().take(OPERATORS).collect(),
            forecasts: ledger.pairs_of_run(id, MODEL, POINTS)?,
            run,
            rejections,
            cost,
            decisions: ledger.latest_decisions(id, DECISIONS)?,
        })
    }

    /// Whether times are measured or predicted; `None` while the run has no time.
    pub fn kind(&self) -> Option<TimeKind> {
        self.problems.iter().find_map(|p| p.best.as_ref().or(p.baseline.as_ref())).map(|ranked| ranked.kind)
    }
}

/// Whether an arm's members are candidates: baselines and controls are not.
fn is_candidate(arm: Arm) -> bool {
    matches!(arm, Arm::Evolution | Arm::Random)
}

fn reasons(ledger: &Ledger, run: RunId) -> Result<Vec<Rejected>, LedgerError> {
    let mut reasons: Vec<Rejected> = Vec::new();
    for found in ledger.rejections_by_reason(run)?.into_iter().filter(|found| is_candidate(found.arm)) {
        let example = (found.latest, found.detail);
        match reasons.iter_mut().find(|r| r.stage == found.stage && r.reason == found.reason) {
            Some(reason) => {
                reason.count += found.candidates;
                if example.0 > reason.example.0 {
                    reason.example = example;
                }
            }
            None => reasons.push(Rejected {
                stage: found.stage,
                reason: found.reason,
                count: found.candidates,
                example,
            }),
        }
    }
    reasons.sort_by_key(|r| std::cmp::Reverse(r.count));
    Ok(reasons)
}

fn funnel(candidates: i64, entered: &[Entered], rejections: &[Rejected]) -> Vec<Passage> {
    // The candidates that no earlier stage rejected.
    let mut left = candidates;
    let passage = |stage: Stage| {
        let of_stage = || rejections.iter().filter(|d| d.stage == stage);
        let rejected = of_stage().map(|d| d.count).sum();
        let outcomes = entered.iter().filter(|e| e.stage == stage && is_candidate(e.arm));
        let outcomes: i64 = outcomes.map(|e| e.count).sum();
        // Candidates that a stage had no time for have no outcome there, apart from those that were screened
        // and then waited for the rest of their draw.
        let late: i64 = of_stage().filter(|d| d.reason == Reason::Budget).map(|d| d.count).sum();
        let entered = (outcomes + late).min(left).max(outcomes).max(rejected);
        left -= rejected;
        Passage { stage, entered, rejected }
    };
    // Runs without a proposer do not show its stage.
    STAGES.into_iter().map(passage).filter(|p| p.stage != Stage::Propose || p.entered > 0).collect()
}

impl ProblemView {
    fn of(
        ledger: &Ledger,
        run: RunId,
        shape: &Shape,
        tried: &[(Arm, i64)],
    ) -> Result<ProblemView, LedgerError> {
        let corners = ledger.progress(run, shape)?;
        let leader = |arm| leader(ledger, &corners, arm);
        let curve = |&(arm, tried): &(Arm, i64)| {
            // A curve shows a single trial: the one that all candidates pass.
            let of = |trial: Trial| corners.iter().filter(move |c| c.arm == arm && c.trial == trial);
            let trial = if of(Trial::Microbench).next().is_some() { Trial::Microbench } else { Trial::Race };
            Curve { arm, tried, steps: of(trial).cloned().collect() }
        };
        let control = leader(Arm::Control)?;
        let drawn = ledger.best_of_arm(run, shape, Arm::Random)?;
        let baseline = baseline(ledger, run, shape)?;
        let of_baseline = |r: &Ranked| baseline.as_ref().is_some_and(|b| b.candidate == r.candidate);
        let reference = leader(Arm::Baseline)?.filter(|r| !of_baseline(r));
        let top = ledger.best_of_run(run, shape, TOP)?;
        let best = top.first().cloned();
        let noise_floor = ledger.noise_floor(run, shape)?;
        let decisions = ledger.latest_decisions(run, DECISIONS)?;
        let raced = top.iter().chain(&reference).chain(&control).filter(|r| r.against.is_some());
        let races = raced.map(|ranked| race(ledger, ranked)).collect::<Result<Vec<_>, _>>()?;
        Ok(ProblemView {
            races: races.into_iter().flatten().collect(),
            conclusion: conclusion(&decisions, &top, noise_floor),
            chance: chance(&decisions, &top),
            noise_floor,
            problem: *shape,
            curves: tried.iter().map(curve).collect(),
            lineage: best.as_ref().map_or(Ok(Vec::new()), |best| lineage(ledger, best.candidate))?,
            niches: ledger.niches(run, shape)?,
            baseline,
            reference,
            best,
            drawn,
            top,
            control,
        })
    }

    /// Whether the times are predicted.
    pub(super) fn is_predicted(&self) -> bool {
        self.best.as_ref().or(self.baseline.as_ref()).is_some_and(|r| r.kind == TimeKind::Predicted)
    }

    pub fn curve(&self, arm: Arm) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.arm == arm)
    }

    /// The time of a candidate from its race, µs, if the candidate is in the ranking and raced.
    pub fn raced_us(&self, candidate: CandidateId) -> Option<f64> {
        let race = self.races.iter().find(|race| race.ranked.candidate == candidate);
        race.map(|race| race.ranked.us)
    }

    /// The baseline's time in the race against the best candidate, to which the best time refers. When the
    /// baseline was timed alone, the state of the machine may have differed.
    pub fn beside_best(&self) -> Option<f64> {
        let (baseline, best) = (self.baseline.as_ref()?, self.best.as_ref()?);
        best.against.filter(|race| race.incumbent == baseline.candidate)?;
        best.incumbent_us
    }

    /// time(baseline) / time(best): from a race of the two with its interval, else the ratio of their times.
    pub fn speedup(&self) -> Option<(f64, Option<(f64, f64)>)> {
        speedup(self.baseline.as_ref(), self.best.as_ref())
    }
}

/// The verdict of a search by its ranking, the first places of it. The reason of a refusal is in the run's
/// decisions.
fn conclusion(decisions: &[Decided], top: &[Ranked], floor: Option<f64>) -> (bool, String) {
    let is_of_best = |id: CandidateId| top.iter().any(|ranked| ranked.candidate == id);
    let refusal = decisions
        .iter()
        .rev()
        .find(|d| d.decision.what == "refused" && d.decision.candidate.is_some_and(is_of_best));
    let promoted = top.iter().find(|ranked| ranked.promoted);
    let best = top.first();
    let conclusion = Conclusion {
        kind: best.map(|best| best.kind),
        best: best.map(|best| (best.candidate, best.against)),
        promoted: promoted.and_then(|winner| Some((winner.candidate, winner.against?))),
        refused: refusal.and_then(|d| d.decision.why["why"].as_str()),
        floor,
    };
    (conclusion.is_gain(), conclusion.words())
}

/// The gain of the evolution over random samples, from the decision about the best candidate.
fn chance(decisions: &[Decided], top: &[Ranked]) -> Option<Chance> {
    let best = top.first()?.candidate;
    let decided = decisions
        .iter()
        .rev()
        .find(|d| d.decision.candidate == Some(best) && !d.decision.why[CHANCE].is_null())?;
    serde_json::from_value(decided.decision.why[CHANCE].clone()).ok()
}

/// The last race of a candidate, with its samples.
fn race(ledger: &Ledger, ranked: &Ranked) -> Result<Option<RaceView>, LedgerError> {
    let measurements = ledger.candidate(ranked.candidate)?.measurements;
    let is_race = |m: &MeasurementFact| m.trial != Trial::Microbench && m.problem == ranked.problem;
    let race = measurements.into_iter().rfind(|m| is_race(m) && !m.samples.is_empty());
    Ok(race.map(|race| {
        let modes = two_modes(&race.samples);
        RaceView { ranked: ranked.clone(), samples: race.samples, modes }
    }))
}

/// time(baseline) / time(best), with its interval if the two raced.
pub(super) fn speedup(baseline: Option<&Ranked>, best: Option<&Ranked>) -> Option<(f64, Option<(f64, f64)>)> {
    let (baseline, best) = (baseline?, best?);
    let race = best.against.filter(|race| race.incumbent == baseline.candidate);
    Some(match race {
        Some(race) => (race.ratio, Some((race.low, race.high))),
        None => (baseline.us / best.us, None),
    })
}

/// The problems that a run searches. Held-out problems have only baselines.
fn searched(tallies: &[Tally]) -> Vec<Shape> {
    let mut shapes: Vec<Shape> = Vec::new();
    for tally in tallies.iter().filter(|t| t.arm != Arm::Baseline) {
        if !shapes.contains(&tally.problem) {
            shapes.push(tally.problem);
        }
    }
    // The run has just begun.
    if shapes.is_empty() {
        shapes.extend(tallies.first().map(|t| t.problem));
    }
    shapes
}

/// The baseline, if it has a time.
fn baseline(ledger: &Ledger, run: RunId, shape: &Shape) -> Result<Option<Ranked>, LedgerError> {
    match ledger.baseline(run, shape)? {
        Some(id) => ledger.standing(id),
        None => Ok(None),
    }
}

/// The fastest candidate of an arm, by races if there are any.
fn leader(ledger: &Ledger, corners: &[Corner], arm: Arm) -> Result<Option<Ranked>, LedgerError> {
    let last = |trial| corners.iter().rfind(|c| c.arm == arm && c.trial == trial);
    match last(Trial::Race).or_else(|| last(Trial::Microbench)) {
        Some(corner) => ledger.standing(corner.candidate),
        None => Ok(None),
    }
}

/// A candidate and its ancestors, nearest first: the line of first parents, then the second parents' lines.
fn lineage(ledger: &Ledger, candidate: CandidateId) -> Result<Vec<Ancestor>, LedgerError> {
    let (mut found, mut seen): (Vec<Ancestor>, HashSet<CandidateId>) = (Vec::new(), HashSet::new());
    let mut next = VecDeque::from([candidate]);
    while let Some(from) = next.pop_front() {
        for ancestor in ledger.lineage(from, ANCESTORS + 1)? {
            if found.len() > ANCESTORS {
                return Ok(found);
            }
            if seen.insert(ancestor.candidate) {
                next.extend(ancestor.parents.iter().skip(1).filter(|parent| !seen.contains(parent)));
                found.push(ancestor);
            }
        }
    }
    Ok(found)
}

impl Curve {
    /// The best time, which is the last one.
    pub fn best_us(&self) -> Option<f64> {
        self.steps.last().map(|step| step.us)
    }
}

impl RunRow {
    /// The row for an entry of the list of runs.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn of(ledger: &Ledger, line: RunLine) -> Result<RunRow, LedgerError> {
        let problems = searched(&ledger.tallies(line.id)?);
        let (mut first_baseline, mut top, mut verdict) = (None, Vec::new(), String::new());
        if let Some(first) = problems.first() {
            first_baseline = baseline(ledger, line.id, first)?;
            top = ledger.best_of_run(line.id, first, TOP)?;
            let decisions = ledger.latest_decisions(line.id, DECISIONS)?;
            verdict = conclusion(&decisions, &top, ledger.noise_floor(line.id, first)?).1;
        }
        Ok(RunRow {
            begun: moment(line.at),
            state: State::after(line.last.map(|(_, event)| event)),
            problems,
            baseline: first_baseline,
            best: top.into_iter().next(),
            conclusion: verdict,
            line,
        })
    }
}

#[cfg(test)]
mod tests {
    use kernels::{Arch, Plan};
    use problem::Problem;

    use super::*;
    use ledger::{KernelText, Language};

    /// The candidates that lacked the time for a stage count beside those that went through it.
    #[test]
    fn stages_count_who_had_no_time_for_them() {
        let entered = [(Stage::Screen, 9), (Stage::Check, 6), (Stage::Microbench, 6), (Stage::Race, 2)];
        let entered = entered.map(|(stage, count)| Entered { arm: Arm::Evolution, stage, count });
        let rejected = |stage, reason, count| Rejected {
            stage,
            reason,
            count,
            example: (CandidateId(1), String::new()),
        };
        // Two of the ten candidates ended with the budget at the first stage: one was not screened, the other
        // waited for its draw.
        let rejections = [
            rejected(Stage::Screen, Reason::Budget, 2),
            rejected(Stage::Screen, Reason::Plan, 2),
            rejected(Stage::Race, Reason::Budget, 3),
            rejected(Stage::Race, Reason::Slower, 1),
        ];
        let counts: Vec<_> =
            funnel(10, &entered, &rejections).iter().map(|p| (p.stage, p.entered, p.rejected)).collect();
        assert_eq!(
            counts,
            [
                (Stage::Screen, 10, 4),
                (Stage::Check, 6, 0),
                (Stage::Microbench, 6, 0),
                (Stage::Race, 5, 4),
                (Stage::HeldOut, 0, 0)
            ]
        );
    }

    #[test]
    fn candidates_in_a_few_words() {
        let problem = Problem::mission();
        let plan = Plan::Mma(kernels::forward::mma::MmaPlan::default_for(&problem, &Arch::SM_90));
        let words = in_words(&Candidate::Gpu(plan));
        assert!(words.starts_with("mma ") && words.contains("×") && words.contains(" warps, "), "{words}");
        let native = in_words(&Candidate::Cpu(cpu::CpuPlan::for_problem(&problem)));
        assert!(native.contains("thread") && native.contains("×"), "{native}");
        let base = cpu::CpuPlan::for_problem(&problem);
        let wider = Candidate::Cpu(cpu::CpuPlan { block_kv: 7, splits: 3, ..base });
        let base = Candidate::Cpu(base);
        assert_eq!(differing(&base, &wider).as_deref(), Some("block_kv 7, splits 3"));
        assert_eq!(differing(&base, &base).as_deref(), Some("as the baseline"));
        let source = KernelText { language: Language::Cuda, text: "x".into(), launch: String::new() };
        assert!(in_words(&Candidate::Kernel(source)).starts_with("CUDA C++ kernel "));
    }
}
