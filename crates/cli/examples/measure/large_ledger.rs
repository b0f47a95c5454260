//! Measures the speed of a large ledger. Fills one as a search would (seeded, so that it is reproducible),
//! then times every query of the commands and every page of `flashcore serve`, each page twice and each time
//! in its own connection, as in the server: `large_ledger [FILE [CANDIDATES]]`. An existing FILE is only
//! queried. The exit code is 1 if a query or a page took 300 ms or more.

use std::cell::Cell;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bench::SpeedVerdict;
use bench::suites::words;
use check::gate::Verdict;
use kernels::forward::mma::MmaPlan;
use kernels::select::Shape;
use kernels::{Arch, Plan};
use ledger::*;
use ledger::{Candidate, Finding, Outcome, Reason, Stage};
use problem::{DType, Problem};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use report::evolution::pages;
use serde_json::json;

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Time limit of a page or a query, ms.
const LIMIT_MS: f64 = 300.0;
/// Candidates per transaction while filling. A search commits each candidate separately.
const BATCH: usize = 5_000;
/// The first run's part of the candidates. The other runs share the rest.
const LARGEST_RUN: f64 = 0.6;
const RUNS: usize = 25;
const DEVICE: &str = "NVIDIA H200";

pub fn main(args: &[String]) -> crate::Outcome {
    let mut args = args.iter();
    let folder = host::store::Scratch::new()?;
    let path = args.next().map_or_else(|| folder.path("large.ledger"), PathBuf::from);
    let candidates: usize = args.next().map_or(Ok(1_000_000), |n| n.parse())?;
    if !path.exists() {
        fill(&path, candidates)?;
    }
    // Pages come first: a server that has just started has not read the file yet.
    let pages = show(&path)?;
    let opened = Instant::now();
    let ledger = Ledger::read(&path)?;
    let reading = milliseconds(opened);
    let opened = Instant::now();
    Ledger::open(&path)?;
    let writing = milliseconds(opened);
    println!("{reading:8.1} ms  open to read");
    println!("{writing:8.1} ms  open to write");
    let queries = ask(&ledger)?.max(reading).max(writing);
    println!("worst of queries: {queries:.1} ms; worst of pages: {pages:.1} ms; limit: {LIMIT_MS} ms");
    Ok(queries.max(pages) < LIMIT_MS)
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Shows every page of `flashcore serve` except kernels, which do not depend on the ledger: for the largest
/// and the latest run, and for candidates with and without a time. Returns the longest time, ms.
fn show(path: &Path) -> Fallible<f64> {
    type Shown<'a> = (&'a str, &'a dyn Fn(&Ledger) -> Result<usize, LedgerError>);
    let (first, last) = (RunId(1), RunId(RUNS as i64));
    let (problem, best) = (words(&shapes()[2].problem()), Cell::new(CandidateId(1)));
    let shown: [Shown<'_>; 13] = [
        ("/run/1", &|l| pages::run(l, first).map(|run| run.page.len())),
        ("/", &|l| pages::runs(l, None).map(|page| page.len())),
        ("/run/25, the latest", &|l| pages::run(l, last).map(|run| run.page.len())),
        ("/api/run/1", &|l| pages::run(l, first).map(|run| run.news.to_string().len())),
        ("/run/1/part/…", &|l| pages::run(l, first).map(|run| run.parts.values().map(String::len).sum())),
        ("/run/1/candidates", &|l| pages::candidates(l, first, None).map(|page| page.len())),
        ("/run/1/candidates?before=300000", &|l| {
            pages::candidates(l, first, Some(CandidateId(300_000))).map(|page| page.len())
        }),
        ("/topk", &|l| pages::top(l, None, None).map(|page| page.map_or(0, |page| page.len()))),
        ("/topk?problem=…&device=…", &|l| {
            let best_of = l.topk(&shapes()[2], DEVICE, 1)?;
            best.set(best_of.first().map_or(best.get(), |best| best.candidate));
            pages::top(l, Some(&problem), Some(DEVICE)).map(|page| page.map_or(0, |page| page.len()))
        }),
        ("/candidate/1", &|l| pages::candidate(l, CandidateId(1)).map(|page| page.len())),
        ("/candidate/…, the best", &|l| pages::candidate(l, best.get()).map(|page| page.len())),
        ("/diff", &|l| pages::pair(l, CandidateId(1), best.get()).map(|page| page.len())),
        ("/forecasts", &|l| pages::forecasts(l).map(|page| page.len())),
    ];
    let mut worst: f64 = 0.0;
    println!("   first    second view");
    for (name, page) in shown {
        let view = || -> Fallible<(f64, usize)> {
            let begun = Instant::now();
            let ledger = Ledger::read(path)?;
            // The server uses this state to see whether a page is out of date.
            ledger.state()?;
            let bytes = page(&ledger)?;
            Ok((milliseconds(begun), bytes))
        };
        let ((first, bytes), (second, _)) = (view()?, view()?);
        worst = worst.max(first).max(second);
        println!("{first:8.1} {second:8.1} ms  {name}: {} kB", bytes.div_ceil(1000));
    }
    Ok(worst)
}

fn shapes() -> Vec<Shape> {
    [512, 1024, 2048, 4096, 8192].map(|seq| Shape::of(&Problem::new(1, 8, seq, 64, DType::F16))).to_vec()
}

fn fill(path: &Path, candidates: usize) -> Fallible<()> {
    let begun = Instant::now();
    let ledger = Ledger::open(path)?;
    let mut rng = SmallRng::seed_from_u64(5);
    let mut left = candidates;
    for run in 0..RUNS {
        let count = match run {
            0 => (candidates as f64 * LARGEST_RUN) as usize,
            _ => left / (RUNS - run),
        };
        left -= count;
        let environment = Environment { device: DEVICE.into(), ..Environment::default() };
        let config = json!({ "seed": run });
        let id = ledger.begin_run(&Run {
            device: DEVICE.into(),
            config,
            environment,
            price_per_hour: Some(3.5),
        })?;
        let mut search = Search { run: id, rng: &mut rng, known: Vec::new() };
        for first in (0..count).step_by(BATCH) {
            let batch: Result<(), Box<dyn Error>> = ledger.together(|ledger| {
                (first..count.min(first + BATCH)).try_for_each(|_| search.candidate(ledger))
            });
            batch?;
        }
        ledger.event(id, RunEvent::Finished)?;
    }
    let (seconds, bytes) = (begun.elapsed().as_secs_f64(), std::fs::metadata(path)?.len());
    let rate = candidates as f64 / seconds;
    println!("{candidates} candidates in {seconds:.0} s ({rate:.0}/s), {} MiB", bytes >> 20);
    Ok(())
}

/// A simulated search.
struct Search<'a> {
    run: RunId,
    rng: &'a mut SmallRng,
    /// Candidates with a time.
    known: Vec<CandidateId>,
}

impl Search<'_> {
    /// Adds a candidate and its outcomes. Of a hundred, about sixty are rejected in the screening and fifteen
    /// are timed.
    fn candidate(&mut self, ledger: &Ledger) -> Fallible<()> {
        let problem = shapes()[self.rng.random_range(0..5)];
        let parents = self.parents();
        let arm = match self.rng.random_range(0..10) {
            0 => Arm::Control,
            1..3 => Arm::Random,
            _ => Arm::Evolution,
        };
        let gene = ["block_m", "block_n", "stages", "warps", "order"][self.rng.random_range(0..5)];
        let operator = match parents.len() {
            0 => Operator::Random.into(),
            1 => Operator::Mutate.with(gene),
            _ => Operator::Cross.into(),
        };
        let changes = json!({ gene: [self.rng.random_range(1..9), self.rng.random_range(1..9)] });
        let candidate = Candidate::Gpu(self.plan(&problem));
        let new = NewCandidate { run: self.run, problem, candidate, arm, operator, parents, changes };
        let id = ledger.add_candidate(&new)?;
        let us =
            100.0 / (1.0 + self.rng.random::<f64>().powi(4) * 9.0) * (1.0 - self.known.len() as f64 * 1e-7);
        let told = |stage, finding| Outcome {
            candidate: id,
            stage,
            problem,
            seconds: 0.02,
            device_seconds: if stage >= Stage::Microbench { 0.01 } else { 0.0 },
            finding,
        };
        let die = |stage, reason: Reason| {
            Finding::Rejected(Rejection { stage, reason, detail: "as the stage found".into() })
        };
        let fate = self.rng.random_range(0..100);
        if fate < 40 {
            let reason =
                [Reason::Plan, Reason::Identical, Reason::Spills, Reason::Emit][self.rng.random_range(0..4)];
            ledger.tell(&told(Stage::Screen, die(Stage::Screen, reason)))?;
            return Ok(());
        }
        ledger.tell(&told(Stage::Screen, self.screened(us)))?;
        if fate < 85 {
            let (stage, reason) =
                [(Stage::Check, Reason::Failed), (Stage::Screen, Reason::PredictedSlow)][fate % 2];
            ledger.tell(&told(stage, die(stage, reason)))?;
            return Ok(());
        }
        let check = CheckFact {
            judge: Judge::Emulator,
            verdict: Verdict::Passed,
            reasons: vec![],
            hazards: json!([]),
            error_rel: Some(3e-4),
            seconds: 0.4,
        };
        ledger.tell(&told(Stage::Check, Finding::Judged(check)))?;
        ledger.tell(&told(Stage::Microbench, self.timed(Trial::Microbench, problem, us, None)))?;
        if fate == 99
            && let Some(incumbent) = self.known.last().copied()
        {
            let verdict =
                [SpeedVerdict::Faster, SpeedVerdict::Slower, SpeedVerdict::Undecided][self.known.len() % 3];
            let against = Against { incumbent, ratio: 1.01, low: 1.0, high: 1.02, noise: 0.005, verdict };
            ledger.tell(&told(Stage::Race, self.timed(Trial::Race, problem, us, Some(against))))?;
            let decision = Decision { what: "promoted".into(), candidate: Some(id), why: json!({}) };
            ledger.decided(self.run, &decision)?;
        }
        self.known.push(id);
        Ok(())
    }

    /// No parent (rarely), or one or two of the last thousand.
    fn parents(&mut self) -> Vec<CandidateId> {
        let count = match self.rng.random_range(0..100) {
            0 => 0,
            1..70 => 1,
            _ => 2,
        };
        let count = if self.known.is_empty() { 0 } else { count };
        let recent = self.known.len().saturating_sub(1000)..self.known.len();
        let mut parents: Vec<CandidateId> =
            (0..count).map(|_| self.known[self.rng.random_range(recent.clone())]).collect();
        parents.dedup();
        parents
    }

    fn plan(&mut self, shape: &Shape) -> Plan {
        let mut plan = MmaPlan::default_for(&shape.problem(), &Arch::SM_90);
        plan.block_m = 16 * self.rng.random_range(1..64);
        plan.block_n = 8 * self.rng.random_range(1..64);
        plan.stages = self.rng.random_range(1..9);
        plan.warps = self.rng.random_range(1..33);
        Plan::Mma(plan)
    }

    fn screened(&mut self, us: f64) -> Finding {
        let bound = ["tensor", "memory", "latency", "issue"][self.rng.random_range(0..4)];
        let rows = [16, 32, 64, 128, 192][self.rng.random_range(0..5)];
        let screening = Screening {
            ptx_hash: format!("{:012x}", self.rng.random::<u64>() >> 16),
            sass_hash: Some(format!("{:012x}", self.rng.random::<u64>() >> 16)),
            registers: Some(self.rng.random_range(32..256)),
            spill_bytes: Some(0),
            shared_bytes: Some(49_152),
            bound: Some(bound.into()),
            tile: Some(format!("{rows}x64")),
        };
        let us = us * self.rng.random_range(0.8..1.3);
        Finding::Screened { screening, predicted_us: Some([us * 0.8, us, us * 1.25]), findings: json!([]) }
    }

    fn timed(&mut self, trial: Trial, problem: Shape, us: f64, against: Option<Against>) -> Finding {
        let samples = (0..30).map(|_| us * self.rng.random_range(0.99..1.03)).collect();
        let kind = TimeKind::Measured;
        let (low_us, high_us) = (us * 0.995, us * 1.01);
        Finding::Timed {
            check: None,
            measurement: MeasurementFact { trial, kind, problem, samples, us, low_us, high_us, against },
        }
    }
}

/// Runs every query on the largest run. Returns the longest time, ms.
fn ask(ledger: &Ledger) -> Fallible<f64> {
    let (run, problem) = (RunId(1), shapes()[0]);
    let best = ledger.topk(&problem, "h200", 1)?.first().map_or(CandidateId(1), |best| best.candidate);
    let youngest = ledger.wins(DEVICE, 1)?.first().map_or(best, |win| win.candidate);
    let mut worst: f64 = 0.0;
    let mut time = |name: &str, query: &dyn Fn() -> Result<usize, LedgerError>| -> Fallible<()> {
        let begun = Instant::now();
        let rows = query()?;
        let ms = milliseconds(begun);
        worst = worst.max(ms);
        println!("{ms:8.1} ms  {name}: {rows}");
        Ok(())
    };
    time("runs", &|| ledger.runs().map(|r| r.len()))?;
    time("top 20 of a problem", &|| ledger.topk(&problem, "h200", 20).map(|r| r.len()))?;
    time("best of every problem", &|| ledger.best_of_problems("h200").map(|r| r.len()))?;
    time("best 50 of a run", &|| ledger.best_of_run(run, &problem, 50).map(|r| r.len()))?;
    time("tallies", &|| ledger.tallies(run).map(|r| r.len()))?;
    time("rejections", &|| ledger.rejections_by_reason(run).map(|r| r.len()))?;
    time("operators", &|| ledger.operators(run).map(|r| r.len()))?;
    time("progress", &|| ledger.progress(run, &problem).map(|r| r.len()))?;
    time("niches", &|| ledger.niches(run, &problem).map(|r| r.len()))?;
    time("cost", &|| ledger.cost(run).map(|r| r.items.len()))?;
    time("decisions", &|| ledger.decisions(run).map(|r| r.len()))?;
    time("wins", &|| ledger.wins(DEVICE, 100).map(|r| r.len()))?;
    time("winners", &|| ledger.winners(DEVICE).map(|r| r.len()))?;
    time("lineage", &|| ledger.lineage(youngest, 60).map(|r| r.len()))?;
    time("a candidate", &|| ledger.candidate(best).map(|r| r.measurements.len()))?;
    time("newest 2000 pairs of a run", &|| ledger.pairs_of_run(run, "model", 2000).map(|r| r.len()))?;
    time("newest 2000 pairs of a device", &|| ledger.pairs("model", DEVICE, 2000).map(|r| r.len()))?;
    time("1000 candidates of a run", &|| {
        ledger.candidates(run, CandidateId(300_000), 1000).map(|r| r.len())
    })?;
    time("1000 outcomes of a run", &|| ledger.outcomes(run, 500_000, 1000).map(|r| r.len()))?;
    time("scores", &|| ledger.scores().map(|r| r.len()))?;
    time("forecasts by hand", &|| ledger.by_hand(100).map(|r| r.len()))?;
    time("state", &|| ledger.state().map(|_| 1))?;
    Ok(worst)
}
