//! Writes a small ledger for viewing and testing pages: `demo_ledger FILE [CANDIDATES] [--more]`. Plans are
//! real and pass their checks. Times come from a formula, and the ledger says so as the origin of its
//! figures. With `--more` the latest run is continued.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use bench::SpeedVerdict;
use check::gate::Verdict;
use check::genes::with_genes;
use kernels::select::Shape;
use kernels::{Arch, Family, Plan};
use ledger::{
    Against, Arm, CandidateId, CheckFact, Decision, Environment, Forecast, ForecastOutcome, Judge, Ledger,
    LedgerError, MeasurementFact, NewCandidate, Reason, Rejection, Run, RunEvent, RunId, Screening, TimeKind,
    Trial,
};
use ledger::{Candidate, Finding, Outcome, Stage};
use problem::Problem;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

const DEVICE: &str = "H200";

const GENES: [(&str, &[u32]); 5] = [
    ("block_m", &[16, 32, 64, 128]),
    ("block_n", &[32, 48, 64, 128]),
    ("warps", &[1, 2, 4, 8]),
    ("kv_warps", &[1, 2, 4]),
    ("stages", &[1, 2, 3, 4]),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let more = args.iter().any(|a| a == "--more");
    let rest: Vec<&String> = args.iter().filter(|a| *a != "--more").collect();
    let count = rest.get(1).map_or(Ok(120), |n| n.parse());
    let (Some(file), Ok(count)) = (rest.first(), count) else {
        eprintln!("usage: demo_ledger FILE [CANDIDATES] [--more]");
        return ExitCode::from(3);
    };
    match demo(Path::new(file), count, more) {
        Ok(run) => {
            println!("{}", json!({ "run": run.0, "candidates": count }));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn demo(file: &Path, count: usize, more: bool) -> Result<RunId, Box<dyn std::error::Error>> {
    let ledger = Ledger::open(file)?;
    let run = match ledger.latest_run()?.filter(|_| more) {
        Some(run) => run,
        None => begin(&ledger)?,
    };
    let seed = ledger.state()?.unsigned_abs();
    let arch = Arch { multiprocessors: 132, ..Arch::SM_90 };
    let seedling = Family::Mma.default_for(&Problem::mission(), &arch)?;
    let mut search = Search {
        ledger: &ledger,
        run,
        arch,
        shape: Shape::of(&Problem::mission()),
        random: SmallRng::seed_from_u64(seed),
        baseline: None,
        best: None,
        alive: Vec::new(),
        seen: HashSet::from([seedling.clone()]),
    };
    if more {
        let top = ledger.topk(&search.shape, DEVICE, 8)?;
        for ranked in top {
            if let Candidate::Gpu(plan) = ranked.subject {
                search.alive.push((ranked.candidate, plan, ranked.us));
            }
        }
        search.best = search.alive.first().cloned();
        search.baseline = search.best.clone();
    } else {
        search.begin(&seedling)?;
    }
    for number in 0..count {
        search.candidate(&seedling, number)?;
    }
    if !more {
        search.end()?;
    }
    Ok(run)
}

fn begin(ledger: &Ledger) -> Result<RunId, LedgerError> {
    let made_up = || "demonstration, times made up".to_owned();
    let environment = Environment {
        device: DEVICE.into(),
        driver: made_up(),
        compiler: "no compiler".into(),
        commit: None,
    };
    let config = json!({ "seed": 7, "preset": "full" });
    ledger.begin_run(&Run { device: DEVICE.into(), config, environment, price_per_hour: Some(3.5) })
}

/// A simulated search with known results.
struct Search<'a> {
    ledger: &'a Ledger,
    run: RunId,
    arch: Arch,
    shape: Shape,
    random: SmallRng,
    baseline: Option<(CandidateId, Plan, f64)>,
    best: Option<(CandidateId, Plan, f64)>,
    alive: Vec<(CandidateId, Plan, f64)>,
    seen: HashSet<Plan>,
}

impl Search<'_> {
    fn begin(&mut self, seedling: &Plan) -> Result<(), LedgerError> {
        let baseline = self.add(seedling, Arm::Baseline, "seed:shipped", &[], Value::Null)?;
        let us = made_up(seedling);
        self.screen(baseline, seedling, us)?;
        self.time(baseline, Trial::Microbench, us, None)?;
        self.baseline = Some((baseline, seedling.clone(), us));
        self.best = self.baseline.clone();
        self.alive.push((baseline, seedling.clone(), us));
        let control = self.add(seedling, Arm::Control, "control", &[baseline], Value::Null)?;
        self.screen(control, seedling, us)?;
        let control_us = us * 1.002;
        self.time(control, Trial::Microbench, control_us, None)?;
        let against = self.race(baseline, us, control_us);
        self.time(control, Trial::Race, control_us, Some(against))
    }

    fn candidate(&mut self, seedling: &Plan, number: usize) -> Result<(), LedgerError> {
        let blind = number % 5 == 4;
        let (plan, operator, parents, changes) = self.make(seedling, blind);
        let arm = if blind { Arm::Random } else { Arm::Evolution };
        let id = self.add(&plan, arm, &operator, &parents, changes)?;
        let us = made_up(&plan);
        if let Err(error) = plan.check(&self.shape.problem(), &self.arch) {
            return self.reject(id, Stage::Screen, Reason::Plan, &error.to_string());
        }
        let dice: f64 = self.random.random();
        if !self.seen.insert(plan.clone()) {
            return self.reject(
                id,
                Stage::Screen,
                Reason::Identical,
                "its PTX is that of a candidate before it",
            );
        }
        if dice < 0.04 {
            return self.reject(id, Stage::Screen, Reason::Spills, "ptxas spills 96 bytes a thread");
        }
        self.screen(id, &plan, us)?;
        if us > 2.6 * self.best.as_ref().map_or(us, |b| b.2) {
            let detail = "predicted to take more than twice the best's time";
            return self.reject(id, Stage::Check, Reason::PredictedSlow, detail);
        }
        if dice > 0.96 {
            return self.fail(id);
        }
        self.check(id)?;
        self.time(id, Trial::Microbench, us, None)?;
        self.alive.push((id, plan.clone(), us));
        let Some((incumbent, _, best_us)) = self.best.clone() else { return Ok(()) };
        if us > 1.1 * best_us || blind {
            return Ok(());
        }
        let against = self.race(incumbent, best_us, us);
        self.time(id, Trial::Race, us, Some(against))?;
        match against.verdict {
            SpeedVerdict::Faster => {
                let why = json!({ "speed_up": against.ratio, "low": against.low, "noise_floor": against.noise, "held_out_won": 3 });
                let what = "promoted".to_owned();
                self.ledger.decided(self.run, &Decision { what, candidate: Some(id), why })?;
                self.best = Some((id, plan, us));
                Ok(())
            }
            SpeedVerdict::Slower => self.reject(id, Stage::Race, Reason::Slower, "slower than the incumbent"),
            SpeedVerdict::Undecided => self.reject(id, Stage::Race, Reason::Slower, "within the noise floor"),
        }
    }

    /// The plan with some genes drawn anew, and the changes.
    fn drawn(&mut self, plan: &Plan, genes: &[usize]) -> (Plan, Value) {
        let before = json!(plan);
        let mut draw =
            |&gene: &usize| (GENES[gene].0.to_owned(), json!(GENES[gene].1.choose(&mut self.random)));
        let drawn: Map<String, Value> = genes.iter().map(&mut draw).collect();
        let changes: Map<String, Value> =
            drawn.iter().map(|(gene, value)| (gene.clone(), json!([before[gene], value]))).collect();
        (with_genes(plan, &Value::Object(drawn)).unwrap_or_else(|_| plan.clone()), Value::Object(changes))
    }

    fn make(&mut self, seedling: &Plan, blind: bool) -> (Plan, String, Vec<CandidateId>, Value) {
        if blind {
            let (plan, _) = self.drawn(seedling, &[0, 1, 2, 3, 4]);
            return (plan, "random".into(), Vec::new(), Value::Null);
        }
        // Parents come from the faster half.
        self.alive.sort_by(|a, b| a.2.total_cmp(&b.2));
        let half = self.alive.len().div_ceil(2);
        let mut pick = || self.alive[self.random.random_range(0..half)].clone();
        let ((parent, plan, _), (other, second, _)) = (pick(), pick());
        let gene = self.random.random_range(0..GENES.len());
        let name = GENES[gene].0;
        if parent != other && self.random.random_bool(0.25) {
            let (ours, theirs) = (json!(plan)[name].clone(), json!(second)[name].clone());
            let child = with_genes(&plan, &json!({ name: theirs })).unwrap_or(plan);
            return (child, "crossover".into(), vec![parent, other], json!({ name: [ours, theirs] }));
        }
        let (child, changes) = self.drawn(&plan, &[gene]);
        (child, format!("mutate:{name}"), vec![parent], changes)
    }

    fn add(
        &self,
        plan: &Plan,
        arm: Arm,
        operator: &str,
        parents: &[CandidateId],
        changes: Value,
    ) -> Result<CandidateId, LedgerError> {
        self.ledger.add_candidate(&NewCandidate {
            run: self.run,
            problem: self.shape,
            candidate: Candidate::Gpu(plan.clone()),
            arm,
            operator: operator.into(),
            parents: parents.to_vec(),
            changes,
        })
    }

    fn tell(
        &self,
        candidate: CandidateId,
        stage: Stage,
        device_seconds: f64,
        finding: Finding,
    ) -> Result<(), LedgerError> {
        let seconds = device_seconds + 0.05;
        let outcome = Outcome { candidate, stage, problem: self.shape, seconds, device_seconds, finding };
        self.ledger.tell(&outcome).map(|_| ())
    }

    fn screen(&mut self, id: CandidateId, plan: &Plan, us: f64) -> Result<(), LedgerError> {
        let genes = json!(plan);
        let bound = match genes["stages"].as_u64() {
            Some(1) => "latency",
            Some(2) => "issue",
            _ => "tensor",
        };
        let screening = Screening {
            ptx_hash: Candidate::Gpu(plan.clone()).hash(),
            sass_hash: None,
            registers: Some(128),
            spill_bytes: Some(0),
            shared_bytes: Some(49_152),
            bound: Some(bound.into()),
            tile: Some(format!("{}×{}", genes["block_m"], genes["block_n"])),
        };
        let off = us * self.random.random_range(0.86..1.22);
        let findings =
            json!([{ "name": "low occupancy", "evidence": "4 of 64 warps", "expected_gain": 1.3 }]);
        let predicted_us = Some([0.88 * off, off, 1.12 * off]);
        self.tell(id, Stage::Screen, 0.0, Finding::Screened { screening, predicted_us, findings })
    }

    fn check(&self, id: CandidateId) -> Result<(), LedgerError> {
        let check = CheckFact {
            judge: Judge::Emulator,
            verdict: Verdict::Passed,
            reasons: Vec::new(),
            hazards: json!([]),
            error_rel: Some(3.1e-4),
            seconds: 0.4,
        };
        self.tell(id, Stage::Check, 0.0, Finding::Judged(check))
    }

    fn fail(&self, id: CandidateId) -> Result<(), LedgerError> {
        let hazard = json!({ "line": 88, "message": "race: a read that no barrier orders after a write <of another warp>" });
        let check = CheckFact {
            judge: Judge::Emulator,
            verdict: Verdict::Failed,
            reasons: vec!["race on shared memory".into()],
            hazards: json!([hazard]),
            error_rel: None,
            seconds: 0.3,
        };
        self.tell(id, Stage::Check, 0.0, Finding::Judged(check))?;
        let rejection =
            Rejection { stage: Stage::Check, reason: Reason::Failed, detail: "race on shared memory".into() };
        self.ledger.rejected(id, &rejection)
    }

    fn race(&mut self, incumbent: CandidateId, before: f64, us: f64) -> Against {
        let ratio = before / us * self.random.random_range(0.997..1.003);
        let verdict = match ratio {
            r if r > 1.008 => SpeedVerdict::Faster,
            r if r < 0.992 => SpeedVerdict::Slower,
            _ => SpeedVerdict::Undecided,
        };
        Against { incumbent, ratio, low: ratio - 0.004, high: ratio + 0.004, noise: 0.005, verdict }
    }

    fn time(
        &mut self,
        id: CandidateId,
        trial: Trial,
        us: f64,
        against: Option<Against>,
    ) -> Result<(), LedgerError> {
        let (stage, seconds, spread) = match trial {
            Trial::Microbench => (Stage::Microbench, 0.3, 0.02),
            Trial::Race | Trial::HeldOut => (Stage::Race, 1.1, 0.006),
        };
        let samples = (0..21).map(|_| us * (1.0 + spread * self.random.random_range(-1.0..1.0))).collect();
        let measurement = MeasurementFact {
            trial,
            kind: TimeKind::Measured,
            problem: self.shape,
            samples,
            us,
            low_us: us * (1.0 - 0.4 * spread),
            high_us: us * (1.0 + 0.4 * spread),
            against,
        };
        self.tell(id, stage, seconds, Finding::Timed { check: None, measurement })
    }

    fn reject(&self, id: CandidateId, stage: Stage, reason: Reason, detail: &str) -> Result<(), LedgerError> {
        let rejection = Rejection { stage, reason, detail: detail.into() };
        match stage {
            // The outcome of the race is stored already.
            Stage::Race => self.ledger.rejected(id, &rejection),
            _ => self.tell(id, stage, 0.0, Finding::Rejected(rejection)),
        }
    }

    fn end(&self) -> Result<(), LedgerError> {
        self.ledger.spent(self.run, 2.5, "warming")?;
        let why = json!({
            "gain_of_the_last_quarter": 1.004, "floor_us": 0.502, "possible_at_most": 3.1, "expected_of_as_much_again": 1.01,
        });
        let candidate = self.best.as_ref().map(|b| b.0);
        self.ledger.decided(self.run, &Decision { what: "stop".into(), candidate, why })?;
        let forecast = Forecast {
            candidate: None,
            hypothesis: "Three stages hide the loads of <64 keys>".into(),
            author: "a demonstrator".into(),
            device: DEVICE.into(),
            problem: Some(self.shape),
            low_us: 8.0,
            us: 9.0,
            high_us: 10.0,
        };
        let forecast = self.ledger.forecast(&forecast)?;
        self.ledger.forecast_outcome(&ForecastOutcome { forecast, us: 9.4, note: "made up, too".into() })?;
        self.ledger.event(self.run, RunEvent::Finished)
    }
}

/// A simulated time with a best plan, other local minima, and noise that no model predicts.
fn made_up(plan: &Plan) -> f64 {
    let genes = json!(plan);
    let gene = |name: &str| genes[name].as_f64().unwrap_or(1.0).max(1.0);
    let away = |name: &str, best: f64, weight: f64| weight * (gene(name) / best).log2().powi(2);
    let hash = Candidate::Gpu(plan.clone()).hash();
    let grain = f64::from(u32::from_str_radix(&hash[..4], 16).unwrap_or(0)) / 65_536.0;
    let far = away("block_m", 64.0, 0.09)
        + away("block_n", 48.0, 0.06)
        + away("warps", 4.0, 0.11)
        + away("kv_warps", 1.0, 0.07)
        + away("stages", 2.0, 0.05);
    7.2 * (1.0 + far) * (1.0 + 0.03 * grain)
}
