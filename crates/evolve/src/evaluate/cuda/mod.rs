//! Evaluates candidates on a GPU: the driver compiles them, the gate checks their outputs, and they are timed
//! and raced as graphs.
//!
//! The GPU is behind the trait [`Card`]. The driver's GPUs ([`GpuCard`]) implement it, and so does the
//! emulator ([`EmulatedCard`]), so that everything except the driver's behaviour is tested without a GPU.
//!
//! A kernel that hangs or breaks its context makes the GPU unusable for the process. The evaluator reports
//! this (`hangs`, `crashed`) and cannot continue. It therefore runs in a [worker](crate::workers) process,
//! which is restarted.

mod card;
mod emulated;
mod gate;
mod watched;

use std::time::{Duration, Instant};

use kernels::select::Shape;
use predict::Gpu;
use predict::machine::{L4, MACHINES};
use predict::resources::{ResourceSource, Resources};
use problem::Problem;
use serde_json::json;

use super::kernel::{self, Bench};
use super::subject::{TaskFault, bound};
use super::{Evaluator, Look, time_of, word_of};
use crate::{Finding, Stage, Task};
use bench::{Race, RaceInputs};
pub use card::{Built, Card, GpuCard};
use check::gate::Verdict;
use check::launchfile::Bound;
pub use emulated::EmulatedCard;
use gate::Gate;
use ledger::{
    Against, CandidateId, CheckFact, Environment, Judge, MeasurementFact, Reason, Rejection, TimeKind, Trial,
};

/// A callback that receives the time limit of the next piece of work. After that time, the supervisor may
/// kill the process.
pub type Allow = Box<dyn FnMut(Duration) + Send>;

/// Time limit for host work that always ends: compiling, drawing inputs, computing references.
const HOST_WORK: Duration = Duration::from_secs(120);
/// Time limit of a check. The emulator has its own limits; a kernel from another source is checked on the
/// whole problem.
const CHECK: Duration = Duration::from_secs(900);
/// A single piece of work that takes longer counts as hanging.
const HANGS: Duration = Duration::from_secs(8);
/// Minimum rate at which the host fills, copies and checks a kernel's buffers, bytes per second.
const BYTES_A_SECOND: f64 = 16e6;
/// Number of problems whose drawn inputs are kept: the run's problem and held-out problems.
const DECKS: usize = 4;

/// An evaluator for one card.
pub struct Cuda<C> {
    card: C,
    /// Host-side work: building, predicting and checking.
    bench: Bench,
    /// Whether the time model describes this very device, and not only another one of the same architecture.
    predicts: bool,
    gate: Gate,
    drawn: Vec<(Problem, RaceInputs)>,
    allow: Allow,
}

impl<C: Card> Cuda<C> {
    /// An evaluator on a card; `model` is the device of the time model that predicts its times.
    pub fn new(card: C, model: Option<&'static Gpu>) -> Cuda<C> {
        let arch = card.arch();
        let alike = MACHINES.into_iter().find(|gpu| gpu.sm == arch.sm).unwrap_or(&L4);
        let bench = Bench { gpu: model.unwrap_or(alike), arch, ptxas: None };
        let (gate, drawn) = (Gate::default(), Vec::new());
        Cuda { card, bench, predicts: model.is_some(), gate, drawn, allow: Box::new(|_| {}) }
    }

    /// Calls `allow` with the time limit before each piece of work.
    #[must_use]
    pub fn watched(self, allow: Allow) -> Cuda<C> {
        Cuda { allow, ..self }
    }

    fn screen(&mut self, task: &Task) -> Result<Finding, Rejection> {
        let problem = task.problem.problem();
        let bound = self.bench.bound(&task.subject, &problem)?;
        (self.allow)(HOST_WORK);
        let built = self.build(&bound).map_err(|fault| fault.at(Stage::Screen))?;
        let driver = self.card.environment().driver;
        let resources = built.iter().map(|built| Resources {
            registers: built.registers,
            spill_stores: built.local_bytes,
            spill_loads: built.local_bytes,
            stack: built.local_bytes,
            shared: built.static_shared,
            source: ResourceSource::Ptxas(driver.clone()),
        });
        let resources = resources.collect();
        // The kernels are entries of one module, so the code of one kernel is the code of all.
        let code = built.into_iter().next().and_then(|built| built.code);
        let sass_hash = code.map(|code| kernel::identity(&bound, &code));
        let built = kernel::Built { text: bound.kernel.module.to_string(), bound, resources, sass_hash };
        Ok(match self.bench.describe(&task.subject, &problem, &built)? {
            // The predicted bottleneck determines the niche even for another device of the architecture. The
            // predicted time would be wrong there.
            Finding::Screened { screening, findings, .. } if !self.predicts => {
                Finding::Screened { screening, predicted_us: None, findings }
            }
            found => found,
        })
    }

    /// Compiles all kernels of a program.
    fn build(&mut self, bound: &Bound) -> Result<Vec<Built>, TaskFault> {
        bound.steps().map(|kernel| self.card.build(kernel)).collect()
    }

    /// The gate on the card, then a short timing.
    fn microbench(&mut self, task: &Task, held: &mut Held) -> Result<Finding, TaskFault> {
        let bound = bound(&task.subject, &task.problem.problem(), &self.card.arch())?;
        (self.allow)(HOST_WORK);
        self.build(&bound)?;
        self.gate.prepare(&bound)?;
        let patience = patience(&bound);
        (self.allow)(patience);
        let began = Instant::now();
        held.since = Some(began);
        let judged = self.gate.judge(&mut self.card, &bound)?;
        let check = CheckFact {
            judge: Judge::Device,
            verdict: Verdict::Passed,
            reasons: Vec::new(),
            hazards: json!([]),
            error_rel: judged.error.map(|error| error.rel),
            seconds: began.elapsed().as_secs_f64(),
        };
        (self.allow)(patience + Duration::from_secs_f64(3.0 * task.seconds.clamp(0.0, 600.0)));
        let samples = self.card.time(&bound, &judged.contents, task.seconds)?;
        let [low_us, us, high_us] = time_of(&samples);
        let measurement = MeasurementFact {
            trial: Trial::Microbench,
            kind: self.card.kind(),
            problem: task.problem,
            us,
            low_us,
            high_us,
            samples,
            against: None,
        };
        Ok(Finding::Timed { check: Some(check), measurement })
    }

    fn race(&mut self, task: &Task, trial: Trial, held: &mut Held) -> Result<Finding, TaskFault> {
        let problem = task.problem.problem();
        let Some((incumbent, rival)) = &task.incumbent else {
            return Err(TaskFault::new(Reason::Crashed, "the task names no incumbent to race against"));
        };
        let arch = self.card.arch();
        let ours = bound(&task.subject, &problem, &arch)?;
        let rival = bound(rival, &problem, &arch).map_err(|fault| {
            TaskFault::new(Reason::Incumbent, format!("the incumbent cannot race: {fault}"))
        })?;
        (self.allow)(HOST_WORK);
        self.build(&ours)?;
        let drawn = self.drawn(&problem)?;
        let (patience, allow) = (patience(&ours), &mut self.allow);
        allow(patience);
        held.since = Some(Instant::now());
        let drawn = &self.drawn[drawn].1;
        let race = self.card.race(drawn, [&ours, &rival], task.seconds, &mut || allow(patience))?;
        outcome(&race, *incumbent, trial, self.card.kind(), task.problem)
    }

    /// The index of the problem's drawn inputs.
    fn drawn(&mut self, problem: &Problem) -> Result<usize, TaskFault> {
        if let Some(known) = self.drawn.iter().position(|(of, _)| of == problem) {
            return Ok(known);
        }
        if self.drawn.len() == DECKS {
            self.drawn.remove(0);
        }
        let drawn = RaceInputs::draw(problem, 1).map_err(|error| TaskFault::new(Reason::Problem, error))?;
        self.drawn.push((problem.clone(), drawn));
        Ok(self.drawn.len() - 1)
    }
}

/// Time limit for one piece of work with a kernel: filling its buffers, running it and judging it.
fn patience(bound: &Bound) -> Duration {
    let bytes: usize = bound.kernel.buffers.iter().map(|buffer| buffer.bytes).sum();
    HANGS + Duration::from_secs_f64(bytes as f64 / BYTES_A_SECOND)
}

/// The time since which the card is held.
#[derive(Default)]
struct Held {
    since: Option<Instant>,
}

/// The race in the ledger's form. The candidate comes first, the incumbent second.
fn outcome(
    race: &Race,
    incumbent: CandidateId,
    trial: Trial,
    kind: TimeKind,
    problem: Shape,
) -> Result<Finding, TaskFault> {
    let [ours, rival] = &race.measurements[..] else {
        return Err(TaskFault::new(Reason::Crashed, "the race had other contestants than two"));
    };
    if let Some(fault) = &ours.fault {
        return Err(TaskFault::new(word_of(fault), fault));
    }
    if let Some(fault) = &rival.fault {
        return Err(TaskFault::new(Reason::Incumbent, format!("the incumbent cannot race: {fault}")));
    }
    let against = rival.comparison.map(|found| Against {
        incumbent,
        ratio: found.ratio,
        low: found.low,
        high: found.high,
        noise: found.noise,
        verdict: found.verdict,
    });
    let samples = ours.times();
    let quantile = |at| bench::quantile(&samples, at);
    let measurement = MeasurementFact {
        trial,
        kind,
        problem,
        us: quantile(0.5),
        low_us: quantile(0.05),
        high_us: quantile(0.95),
        samples,
        against,
    };
    Ok(Finding::Timed { check: None, measurement })
}

impl<C: Card> Evaluator for Cuda<C> {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let mut held = Held::default();
        let found = match task.stage {
            Stage::Propose | Stage::Screen => return self.screen(task).map(Look::without_device),
            Stage::Check => {
                (self.allow)(CHECK);
                let check = self.bench.check(&task.subject, &task.problem.problem())?;
                return Ok(Look::without_device(Finding::Judged(check)));
            }
            Stage::Microbench => self.microbench(task, &mut held),
            Stage::Race => self.race(task, Trial::Race, &mut held),
            Stage::HeldOut => self.race(task, Trial::HeldOut, &mut held),
        };
        // A candidate's device time counts even if the evaluation fails.
        let finding = found.unwrap_or_else(|fault| Finding::Rejected(fault.at(task.stage)));
        Ok(Look { finding, device_seconds: held.since.map_or(0.0, |since| since.elapsed().as_secs_f64()) })
    }

    fn environment(&self) -> Environment {
        self.card.environment()
    }
}
