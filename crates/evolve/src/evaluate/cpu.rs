//! Evaluates plans of the native kernels on this machine's CPU: checks and timings run on the processor
//! itself.
//!
//! Timings need the whole machine, so timings and checks of this process's workers exclude each other.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use cpu::CpuPlan;
use kernels::select::Shape;
use problem::Problem;
use serde_json::json;

use super::cpu_check::Cases;
use super::cpu_model::CpuModel;
use super::{Evaluator, Look, time_of, word_of};
use crate::space::Domain;
use crate::task::reject;
use crate::{Candidate, Finding, Stage, Task};
use bench::provenance::Provenance;
use bench::{CpuTimer, RaceInputs, interval, race_plans};
use check::gate::Verdict;
use ledger::{
    Against, CandidateId, CheckFact, Environment, Judge, MeasurementFact, Reason, Rejection, Screening,
    TimeKind, Trial,
};

/// Locked for writing during a timing, and for reading during a check or while inputs are drawn.
static MACHINE: RwLock<()> = RwLock::new(());
/// The time models of this process's problems, shared by all of its workers, the newest last.
static MODELS: Mutex<Vec<(Shape, SharedModel)>> = Mutex::new(Vec::new());

type SharedModel = Arc<Mutex<CpuModel>>;

/// Number of problems whose inputs and references are cached: a run's own and the held-out ones.
const REMEMBERED: usize = 4;
/// Minimum number of rounds of a short timing.
const LEAST_ROUNDS: usize = 5;

/// Cached data of a problem.
#[derive(Default)]
struct Known {
    cases: Option<Arc<Cases>>,
    timer: Option<CpuTimer>,
    drawn: Option<RaceInputs>,
}

#[derive(Default)]
pub struct CpuEvaluator {
    known: Vec<(Shape, Known)>,
}

impl CpuEvaluator {
    pub fn new() -> CpuEvaluator {
        CpuEvaluator::default()
    }

    fn known(&mut self, shape: &Shape) -> &mut Known {
        match self.known.iter().position(|(known, _)| known == shape) {
            // The most recently used entry is moved to the end, and the first one is dropped.
            Some(place) => self.known[place..].rotate_left(1),
            None => {
                if self.known.len() == REMEMBERED {
                    self.known.remove(0);
                }
                self.known.push((*shape, Known::default()));
            }
        }
        let last = self.known.len() - 1;
        &mut self.known[last].1
    }

    fn check(&mut self, plan: &CpuPlan, shape: &Shape) -> Result<CheckFact, Rejection> {
        let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let failed = |error: &dyn ToString| reject(Stage::Check, Reason::Crashed, error.to_string());
        let known = self.known(shape);
        let cases = match &known.cases {
            Some(cases) => cases.clone(),
            None => {
                let cases = Cases::of(&shape.problem()).map_err(|error| failed(&error))?;
                known.cases.insert(Arc::new(cases)).clone()
            }
        };
        let (reasons, error_rel) = cases.judge(plan).map_err(|error| failed(&error))?;
        Ok(CheckFact {
            judge: Judge::Device,
            verdict: if reasons.is_empty() { Verdict::Passed } else { Verdict::Failed },
            reasons,
            hazards: json!([]),
            error_rel: Some(error_rel),
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    /// A short timing, in turns with the incumbent if there is one.
    fn microbench(&mut self, plan: &CpuPlan, task: &Task) -> Result<Look, Rejection> {
        let incumbent = incumbent(task)?;
        let known = self.known(&task.problem);
        let timer = known.timer.get_or_insert_with(|| {
            let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
            CpuTimer::new(&task.problem.problem())
        });
        let failed = |error| reject(Stage::Microbench, Reason::Crashed, error);
        let theirs_failed = |error| reject(Stage::Microbench, Reason::Incumbent, error);
        let alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let (mut ours, mut logs) = (Vec::new(), Vec::new());
        while ours.len() < LEAST_ROUNDS || began.elapsed().as_secs_f64() < task.seconds {
            let mut theirs = None;
            // The order of a race: A B, B A.
            let first = ours.len() % 2 == 0;
            if let Some((_, incumbent)) = incumbent.filter(|_| !first) {
                theirs = Some(timer.time(&incumbent).map_err(theirs_failed)?);
            }
            let us = timer.time(plan).map_err(failed)?;
            if let Some((_, incumbent)) = incumbent.filter(|_| first) {
                theirs = Some(timer.time(&incumbent).map_err(theirs_failed)?);
            }
            ours.push(us);
            logs.extend(theirs.map(|theirs| (theirs / us).ln()));
        }
        let against = incumbent.map(|(id, _)| {
            let found = interval(&logs);
            // Without a copy of a contestant there is no noise floor, and therefore no verdict.
            let verdict = bench::SpeedVerdict::Undecided;
            let (ratio, low, high) = (found.middle.exp(), found.low.exp(), found.high.exp());
            Against { incumbent: id, ratio, low, high, noise: (found.high - found.low).exp(), verdict }
        });
        let seconds = began.elapsed().as_secs_f64();
        drop(alone);
        let model = model_of(&task.problem);
        let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
        match (incumbent, against) {
            (Some((_, theirs)), Some(against)) => model.learn_against(plan, &theirs, 1.0 / against.ratio),
            _ => model.set_reference(plan, time_of(&ours)[1]),
        }
        Ok(timed(Trial::Microbench, task, ours, against, seconds))
    }

    /// Races the plan against the incumbent under the rules of `bench`.
    fn race(&mut self, plan: &CpuPlan, task: &Task, trial: Trial) -> Result<Look, Rejection> {
        let (id, incumbent) = incumbent(task)?.ok_or_else(|| {
            reject(
                task.stage,
                Reason::Crashed,
                "invalid value 'none' for task.incumbent: expected the plan to race against",
            )
        })?;
        let failed = |error: &dyn ToString| reject(task.stage, Reason::Crashed, error.to_string());
        let known = self.known(&task.problem);
        if known.drawn.is_none() {
            let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
            known.drawn = Some(RaceInputs::draw(&task.problem.problem(), 1).map_err(|error| failed(&error))?);
        }
        let Some(drawn) = &known.drawn else { return Err(failed(&"no inputs")) };
        let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let race = race_plans(drawn, &[*plan, incumbent], task.seconds).map_err(|error| failed(&error))?;
        let [ours, theirs] = &race.measurements[..] else { return Err(failed(&"not a race of two")) };
        if let Some(fault) = &ours.fault {
            return Err(reject(task.stage, word_of(fault), fault));
        }
        let Some(comparison) = theirs.comparison else {
            let why = theirs.fault.as_ref().map_or("no comparison".to_owned(), ToString::to_string);
            return Err(reject(task.stage, Reason::Incumbent, format!("the incumbent cannot race: {why}")));
        };
        let against = Against {
            incumbent: id,
            ratio: comparison.ratio,
            low: comparison.low,
            high: comparison.high,
            noise: comparison.noise,
            verdict: comparison.verdict,
        };
        Ok(timed(trial, task, ours.times(), Some(against), began.elapsed().as_secs_f64()))
    }
}

fn incumbent(task: &Task) -> Result<Option<(CandidateId, CpuPlan)>, Rejection> {
    match &task.incumbent {
        None => Ok(None),
        Some((id, Candidate::Cpu(plan))) => Ok(Some((*id, *plan))),
        Some(_) => Err(reject(
            task.stage,
            Reason::Crashed,
            "invalid incumbent, a kernel for a GPU: expected a plan of the CPU",
        )),
    }
}

fn timed(trial: Trial, task: &Task, samples: Vec<f64>, against: Option<Against>, seconds: f64) -> Look {
    let [low_us, us, high_us] = time_of(&samples);
    let (kind, problem) = (TimeKind::Measured, task.problem);
    let measurement = MeasurementFact { trial, kind, problem, samples, us, low_us, high_us, against };
    Look { finding: Finding::Timed { check: None, measurement }, device_seconds: seconds }
}

/// The properties of a plan and its predicted time.
fn screen(plan: &CpuPlan, problem: &Problem) -> Finding {
    let canonical = plan.canonical(problem);
    let cost = canonical.cost(problem);
    let model = model_of(&Shape::of(problem));
    let predicted_us = model.lock().unwrap_or_else(PoisonError::into_inner).predict(&canonical);
    let screening = Screening {
        ptx_hash: Candidate::Cpu(canonical).hash(),
        sass_hash: None,
        registers: None,
        spill_bytes: None,
        shared_bytes: None,
        bound: Some(cost.bound.name().to_owned()),
        tile: Some(format!("{}x{}", canonical.panel_rows(), canonical.block_kv)),
    };
    Finding::Screened { screening, predicted_us: Some(predicted_us), findings: json!([]) }
}

/// The time model of a problem. The first call calibrates it.
fn model_of(shape: &Shape) -> SharedModel {
    let known = |models: &[(Shape, SharedModel)]| {
        models.iter().find(|(known, _)| known == shape).map(|(_, model)| model.clone())
    };
    if let Some(model) = known(&MODELS.lock().unwrap_or_else(PoisonError::into_inner)) {
        return model;
    }
    let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
    let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(model) = known(&models) {
        return model;
    }
    let model = Arc::new(Mutex::new(CpuModel::calibrate(&shape.problem())));
    models.push((*shape, model.clone()));
    if models.len() > REMEMBERED {
        models.remove(0);
    }
    model
}

impl Evaluator for CpuEvaluator {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let problem = task.problem.problem();
        Domain::Cpu(problem.clone())
            .check(&task.subject)
            .map_err(|why| reject(task.stage, Reason::Plan, why))?;
        let Candidate::Cpu(plan) = &task.subject else {
            return Err(reject(
                task.stage,
                Reason::Plan,
                "invalid candidate, a kernel for a GPU: expected a plan of the CPU",
            ));
        };
        match task.stage {
            Stage::Propose => {
                Err(reject(Stage::Propose, Reason::Proposer, "the native kernels have plans only"))
            }
            Stage::Screen => Ok(Look::without_device(screen(plan, &problem))),
            Stage::Check => {
                self.check(plan, &task.problem).map(|fact| Look::without_device(Finding::Judged(fact)))
            }
            Stage::Microbench => self.microbench(plan, task),
            Stage::Race => self.race(plan, task, Trial::Race),
            Stage::HeldOut => self.race(plan, task, Trial::HeldOut),
        }
    }

    fn environment(&self) -> Environment {
        let Provenance { device, driver, compiler, commit, .. } =
            Provenance::of_cpu(Path::new("."), rayon::current_num_threads());
        Environment { device, driver, compiler, commit }
    }
}

#[cfg(test)]
mod tests {
    use cpu::{Isa, Lanes};
    use problem::DType;

    use super::*;
    use crate::Target;

    fn task(stage: Stage, problem: &Problem, plan: CpuPlan, incumbent: Option<CpuPlan>) -> Task {
        Task {
            candidate: CandidateId(3),
            stage,
            target: Target::Cpu,
            problem: Shape::of(problem),
            subject: Candidate::Cpu(plan),
            incumbent: incumbent.map(|plan| (CandidateId(1), Candidate::Cpu(plan))),
            seconds: 0.0,
        }
    }

    #[test]
    fn a_plan_goes_through_every_stage() {
        let mut evaluator = CpuEvaluator::new();
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let plan = CpuPlan::for_problem(&problem);
        let screened = evaluator.evaluate(&task(Stage::Screen, &problem, plan, None));
        let Finding::Screened { screening, predicted_us: Some([low, us, high]), .. } = screened.finding
        else {
            panic!("{:?}", screened.finding)
        };
        assert!(0.0 < low && low < us && us < high && screening.tile.is_some());
        // A change without effect gives the same kernel hash.
        let same = CpuPlan { block_kv: 4096, ..plan };
        let Finding::Screened { screening: again, .. } =
            evaluator.evaluate(&task(Stage::Screen, &problem, same, None)).finding
        else {
            panic!("screened")
        };
        assert_eq!(again.ptx_hash, screening.ptx_hash);
        let check = evaluator.evaluate(&task(Stage::Check, &problem, plan, None)).finding;
        assert!(matches!(&check, Finding::Judged(p) if p.verdict == Verdict::Passed), "{check:?}");
        let other = CpuPlan { threads: 1, block_q: 16, ..plan };
        for (stage, trial) in [
            (Stage::Microbench, Trial::Microbench),
            (Stage::Race, Trial::Race),
            (Stage::HeldOut, Trial::HeldOut),
        ] {
            let outcome = evaluator.evaluate(&task(stage, &problem, plan, Some(other)));
            let Finding::Timed { measurement, check: None } = outcome.finding else {
                panic!("{:?}", outcome.finding)
            };
            let against = measurement.against.unwrap();
            assert_eq!(
                (measurement.trial, measurement.kind, against.incumbent),
                (trial, TimeKind::Measured, CandidateId(1))
            );
            assert!(measurement.low_us <= measurement.us && measurement.us <= measurement.high_us);
            assert!(
                against.low <= against.ratio && against.ratio <= against.high && outcome.device_seconds > 0.0
            );
        }
        let alone = evaluator.evaluate(&task(Stage::Microbench, &problem, plan, None)).finding;
        assert!(matches!(alone, Finding::Timed { measurement, .. } if measurement.against.is_none()));
        assert!(!evaluator.environment().device.is_empty());
    }

    /// The stored time is the statistic of its interval, not the median.
    #[test]
    fn a_time_has_its_own_interval() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let task = task(Stage::Race, &problem, CpuPlan::for_problem(&problem), None);
        let samples = [vec![1.0; 5], vec![2.0; 4]].concat();
        let Finding::Timed { measurement, .. } =
            timed(Trial::Race, &task, samples.clone(), None, 0.0).finding
        else {
            panic!("no time")
        };
        let logs: Vec<f64> = samples.iter().map(|us| us.ln()).collect();
        assert_eq!(measurement.us, interval(&logs).middle.exp());
        assert!(1.1 < measurement.us && measurement.low_us < measurement.us);
        assert!(measurement.us < measurement.high_us && measurement.high_us <= 2.0);
    }

    #[test]
    fn what_is_no_plan_for_this_machine_says_why() {
        let mut evaluator = CpuEvaluator::new();
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let plan = CpuPlan::for_problem(&problem);
        let mut why = |task: &Task| match evaluator.evaluate(task).finding {
            Finding::Rejected(rejection) => (rejection.reason, rejection.detail),
            other => panic!("{other:?}"),
        };
        let bad = CpuPlan { splits: 1000, ..plan };
        let (reason, detail) = why(&task(Stage::Screen, &problem, bad, None));
        assert!(
            reason == Reason::Plan && detail.contains("invalid value '1000' for plan.splits"),
            "{detail}"
        );
        let integers = CpuPlan { isa: Isa::Avx512Vnni, lanes: Lanes::Dims, ..plan };
        assert_eq!(
            why(&task(Stage::Screen, &problem, CpuPlan { vectors: 1, tile_rows: 1, ..integers }, None)).0,
            Reason::Plan
        );
        let (_, detail) = why(&task(Stage::Race, &problem, plan, None));
        assert!(detail.contains("task.incumbent"), "{detail}");
        assert_eq!(why(&task(Stage::Propose, &problem, plan, None)).0, Reason::Proposer);
    }
}
