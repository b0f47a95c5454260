//! What the pages of a search show: plain data from the ledger's summaries, small however long the search was.

use std::collections::{HashSet, VecDeque};

use kernels::select::Shape;
use serde_json::json;

use crate::evolve::{Candidate, Stage};
use crate::ledger::{
    Ancestor, Arm, CandidateId, Corner, Cost, Decided, Earnings, Entered, Ledger, LedgerError, Niche, Pair,
    Ranked, Run, RunEvent, RunId, RunLine, Tally, TimeKind, Trial,
};
use crate::provenance::iso8601;

/// Candidates of a run's ranking.
const TOP: usize = 12;
/// Of the best and its ancestors, so many are drawn, the nearest.
pub const ANCESTORS: usize = 40;
/// Forecasts that are drawn and scored, the newest.
pub const POINTS: usize = 1500;
/// Operators that are listed.
const OPERATORS: usize = 30;
/// Decisions that are listed, the newest.
const DECISIONS: usize = 50;
/// Who forecasts candidates.
const MODEL: &str = "model";

/// The stages in their order.
const STAGES: [Stage; 6] =
    [Stage::Propose, Stage::Screen, Stage::Check, Stage::Microbench, Stage::Race, Stage::HeldOut];

/// A run, as its page shows it.
#[derive(Clone, Debug)]
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
    pub state: State,
    /// Candidates in all; what they are compared with does not count.
    pub candidates: i64,
    /// Of these, with a time.
    pub timed: i64,
    /// How many candidates entered each stage and how many died of it, in the cascade's order.
    pub funnel: Vec<Passage>,
    /// Problem by problem.
    pub problems: Vec<ProblemView>,
    /// Why candidates died, the most frequent first.
    pub deaths: Vec<Reason>,
    /// What each operator earned, the most first.
    pub operators: Vec<Earnings>,
    /// The model's forecasts with an outcome, the newest.
    pub forecasts: Vec<Pair>,
    /// What it cost.
    pub cost: Cost,
    /// What was decided, in order.
    pub decisions: Vec<Decided>,
}

/// Where a run stands, by its latest event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Begun or resumed: it runs, or it was killed.
    Open,
    /// Someone stopped it.
    Stopped,
    /// It came to its end.
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

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            State::Open => "open",
            State::Stopped => "stopped",
            State::Finished => "finished",
        }
    }
}

/// A stage of the cascade and who passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    /// The stage.
    pub stage: Stage,
    /// How often it was done.
    pub entered: i64,
    /// How many died of it.
    pub died: i64,
}

/// Why candidates died.
#[derive(Clone, Debug, PartialEq)]
pub struct Reason {
    /// At which stage.
    pub stage: Stage,
    /// The reason, in one word.
    pub reason: String,
    /// How many.
    pub count: i64,
    /// The latest of them, and what was said of it.
    pub example: (CandidateId, String),
}

/// A problem of a run.
#[derive(Clone, Debug)]
pub struct ProblemView {
    /// The problem.
    pub problem: Shape,
    /// What was to beat.
    pub baseline: Option<Ranked>,
    /// What else the run compares with: the shipped plan, where that was not its baseline.
    pub reference: Option<Ranked>,
    /// The first of the ranking.
    pub best: Option<Ranked>,
    /// The first blind draw of the ranking.
    pub drawn: Option<Ranked>,
    /// The best so far, arm by arm.
    pub curves: Vec<Curve>,
    /// The best and its ancestors, the nearest first: one more than are drawn, where there are.
    pub lineage: Vec<Ancestor>,
    /// The fastest of each niche.
    pub niches: Vec<Niche>,
    /// The best candidates, in the ledger's order: those that raced before the others.
    pub top: Vec<Ranked>,
    /// The baseline again, as if it were new.
    pub control: Option<Ranked>,
}

/// The best so far of one arm.
#[derive(Clone, Debug)]
pub struct Curve {
    /// The arm.
    pub arm: Arm,
    /// Candidates that it had in all.
    pub tried: i64,
    /// Each candidate that was faster than all before it in its arm, all by the same trial.
    pub steps: Vec<Corner>,
}

/// A run in the list of runs.
#[derive(Clone, Debug)]
pub struct RunRow {
    /// Its number, device and counts.
    pub line: RunLine,
    /// When it was begun, UTC.
    pub begun: String,
    /// Where it stands.
    pub state: State,
    /// Its problems.
    pub problems: Vec<Shape>,
    /// Of its first problem: what was to beat.
    pub baseline: Option<Ranked>,
    /// Of its first problem: the best.
    pub best: Option<Ranked>,
}

/// Whether a forecast's interval held.
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

/// Milliseconds since 1970 as UTC.
pub fn moment(at: i64) -> String {
    let iso = iso8601(u64::try_from(at).unwrap_or(0) / 1000);
    format!("{} UTC", iso.trim_end_matches('Z').replacen('T', " ", 1))
}

impl RunView {
    /// Of a run of the ledger.
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
        let deaths = reasons(ledger, id)?;
        Ok(RunView {
            id,
            begun: moment(begun),
            latest: moment(latest),
            state: State::after(ledger.events(id)?.last().map(|(_, event)| *event)),
            candidates: counted().map(|t| t.candidates).sum(),
            timed: counted().map(|t| t.timed).sum(),
            funnel: funnel(&ledger.entered(id)?, &deaths),
            problems: problems.collect::<Result<_, _>>()?,
            operators: ledger.operators(id)?.into_iter().take(OPERATORS).collect(),
            forecasts: ledger.pairs_of_run(id, MODEL, POINTS)?,
            run,
            deaths,
            cost,
            decisions: ledger.latest_decisions(id, DECISIONS)?,
        })
    }

    /// Whether its times are the time model's: of a run with none yet, that is not known.
    pub fn kind(&self) -> Option<TimeKind> {
        self.problems.iter().find_map(|p| p.best.as_ref().or(p.baseline.as_ref())).map(|ranked| ranked.kind)
    }
}

/// Whether an arm's are candidates, not what these are compared with.
fn is_candidate(arm: Arm) -> bool {
    matches!(arm, Arm::Evolution | Arm::Random)
}

fn reasons(ledger: &Ledger, run: RunId) -> Result<Vec<Reason>, LedgerError> {
    let mut reasons: Vec<Reason> = Vec::new();
    for death in ledger.deaths(run)?.into_iter().filter(|death| is_candidate(death.arm)) {
        let example = (death.latest, death.detail);
        match reasons.iter_mut().find(|r| r.stage == death.stage && r.reason == death.reason) {
            Some(reason) => {
                reason.count += death.candidates;
                if example.0 > reason.example.0 {
                    reason.example = example;
                }
            }
            None => reasons.push(Reason {
                stage: death.stage,
                reason: death.reason,
                count: death.candidates,
                example,
            }),
        }
    }
    reasons.sort_by_key(|r| std::cmp::Reverse(r.count));
    Ok(reasons)
}

fn funnel(entered: &[Entered], deaths: &[Reason]) -> Vec<Passage> {
    let passage = |stage: Stage| {
        let counted = entered.iter().filter(|e| e.stage == stage && is_candidate(e.arm));
        let died = deaths.iter().filter(|d| d.stage == stage).map(|d| d.count).sum();
        // A rejection may be written without a task's answer, too.
        Passage { stage, entered: counted.map(|e| e.count).sum::<i64>().max(died), died }
    };
    // Runs without a proposer do not have its stage.
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
            // One curve shows one trial: the one that all candidates pass.
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
        Ok(ProblemView {
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

    /// The curve of an arm.
    pub fn curve(&self, arm: Arm) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.arm == arm)
    }

    /// The baseline's time in the race against the best, whose own time is of that race. The machine may have been another one when the
    /// baseline was timed alone.
    pub fn beside_best(&self) -> Option<f64> {
        let (baseline, best) = (self.baseline.as_ref()?, self.best.as_ref()?);
        best.against.filter(|race| race.incumbent == baseline.candidate)?;
        best.incumbent_us
    }

    /// time(baseline) / time(best): a race of the two where there was one, with its interval, else the quotient of their times.
    pub fn speedup(&self) -> Option<(f64, Option<(f64, f64)>)> {
        speedup(self.baseline.as_ref(), self.best.as_ref())
    }
}

/// time(baseline) / time(best), and its interval where the two were raced.
pub(super) fn speedup(baseline: Option<&Ranked>, best: Option<&Ranked>) -> Option<(f64, Option<(f64, f64)>)> {
    let (baseline, best) = (baseline?, best?);
    let race = best.against.filter(|race| race.incumbent == baseline.candidate);
    Some(match race {
        Some(race) => (race.ratio, Some((race.low, race.high))),
        None => (baseline.us / best.us, None),
    })
}

/// The problems that a run searches. Those it holds out have baselines alone.
fn searched(tallies: &[Tally]) -> Vec<Shape> {
    let mut shapes: Vec<Shape> = Vec::new();
    for tally in tallies.iter().filter(|t| t.arm != Arm::Baseline) {
        if !shapes.contains(&tally.problem) {
            shapes.push(tally.problem);
        }
    }
    // Just begun.
    if shapes.is_empty() {
        shapes.extend(tallies.first().map(|t| t.problem));
    }
    shapes
}

/// What was to beat, where it has a time.
fn baseline(ledger: &Ledger, run: RunId, shape: &Shape) -> Result<Option<Ranked>, LedgerError> {
    match ledger.baseline(run, shape)? {
        Some(id) => ledger.standing(id),
        None => Ok(None),
    }
}

/// The fastest of an arm, by races where there were some.
fn leader(ledger: &Ledger, corners: &[Corner], arm: Arm) -> Result<Option<Ranked>, LedgerError> {
    let last = |trial| corners.iter().rfind(|c| c.arm == arm && c.trial == trial);
    match last(Trial::Race).or_else(|| last(Trial::Microbench)) {
        Some(corner) => ledger.standing(corner.candidate),
        None => Ok(None),
    }
}

/// A candidate and its ancestors, the nearest first: its line, then those of the second parents in it.
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
    /// The last and best.
    pub fn best_us(&self) -> Option<f64> {
        self.steps.last().map(|step| step.us)
    }
}

impl RunRow {
    /// Of a line of the list of runs.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn of(ledger: &Ledger, line: RunLine) -> Result<RunRow, LedgerError> {
        let problems = searched(&ledger.tallies(line.id)?);
        let (mut first_baseline, mut fastest) = (None, None);
        if let Some(first) = problems.first() {
            first_baseline = baseline(ledger, line.id, first)?;
            fastest = ledger.best_of_run(line.id, first, 1)?.pop();
        }
        Ok(RunRow {
            begun: moment(line.at),
            state: State::after(line.last.map(|(_, event)| event)),
            problems,
            baseline: first_baseline,
            best: fastest,
            line,
        })
    }
}

#[cfg(test)]
mod tests {
    use kernels::{Arch, Plan};
    use problem::Problem;

    use super::*;
    use crate::evolve::{Language, Source};

    #[test]
    fn candidates_in_a_few_words() {
        let problem = Problem::mission();
        let plan = Plan::Mma(kernels::forward::mma::MmaPlan::default_for(&problem, &Arch::SM_90));
        let words = in_words(&Candidate::Gpu(plan));
        assert!(words.starts_with("mma ") && words.contains("×") && words.contains(" warps, "), "{words}");
        let native = in_words(&Candidate::Cpu(cpu::CpuPlan::for_problem(&problem)));
        assert!(native.contains("thread") && native.contains("×"), "{native}");
        let source = Source { language: Language::Cuda, text: "x".into(), launch: String::new() };
        assert!(in_words(&Candidate::Kernel(source)).starts_with("CUDA C++ kernel "));
    }
}
