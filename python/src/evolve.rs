//! Runs the evolution for programs that distribute its evaluations over processes and machines. Tasks and
//! outcomes are JSON.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bench::provenance::Provenance;
use bench::suites;
use evolve::evaluate::cpu::CpuEvaluator;
use evolve::evaluate::model::Model;
use evolve::evaluate::{Cuda, Evaluators, GpuCard};
use evolve::setup;
use evolve::{Ask, Configuration, Evaluator, Finding, Limits, Outcome, Target, Task};
use kernels::select::Shape;
use kernels::{Arch, Family};
use ledger::{Environment, Ledger, LedgerError, Reason, Rejection};
use predict::Gpu;
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Error;

/// The configuration of a run, as Python passes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    ledger: PathBuf,
    device: String,
    /// The GPU to measure on, as [`describe_card`] describes it.
    card: Option<Card>,
    problems: Vec<String>,
    held_out: Option<Vec<String>>,
    candidates: Option<usize>,
    minutes: Option<f64>,
    seed: u64,
    configuration: String,
    random_share: f64,
    families: Vec<String>,
    early_stop: bool,
    price_per_hour: Option<f64>,
    /// Parallel evaluations that need no device, then those that need one.
    workers: usize,
    devices: usize,
    /// The number of a run to resume; 0 for the latest unfinished run.
    resume: Option<i64>,
}

/// A GPU of some machine in a cluster.
#[derive(Clone, Deserialize, Serialize)]
struct Card {
    environment: Environment,
    sm: u32,
    multiprocessors: u32,
}

/// The device of a run.
struct Place {
    target: Target,
    environment: Environment,
    arch: Option<Arch>,
    limits: Limits,
    /// Where a GPU's candidates are screened and checked: on any CPU, with the time model of the same GPU.
    host: Option<Target>,
}

/// A run: :meth:`ask` returns what to evaluate, :meth:`tell` takes in the outcome.
#[pyclass(frozen)]
pub struct Evolution {
    evolution: Mutex<evolve::Evolution>,
    host: Option<Target>,
    began: Instant,
}

#[pymethods]
impl Evolution {
    /// Begins or resumes a run.
    #[new]
    fn new(py: Python<'_>, wanted: &str) -> Result<Evolution, Error> {
        let wanted: Wanted = serde_json::from_str(wanted).map_err(|e| Error::Argument(e.to_string()))?;
        py.detach(|| begin(&wanted))
    }

    /// The next step: `{"task": …, "device": bool}`, `"wait"` or `"done"`.
    fn ask(&self, py: Python<'_>) -> Result<String, Error> {
        py.detach(|| {
            let ask = self.engine().ask(self.began.elapsed().as_secs_f64())?;
            let said = match ask {
                Ask::Task(task) => {
                    let device = task.stage.is_of_device();
                    let host = self.host.clone().filter(|_| !device);
                    let measured_here = host.is_none() && matches!(task.target, Target::Cuda { .. });
                    let task = Task { target: host.unwrap_or_else(|| task.target.clone()), ..*task };
                    json!({ "task": task, "device": device || measured_here })
                }
                Ask::Propose(question) => {
                    let detail = "a run on a cluster asks no proposer".to_owned();
                    let rejection =
                        Rejection { stage: evolve::Stage::Propose, reason: Reason::Proposer, detail };
                    self.engine().answer(&question, Err(rejection))?;
                    json!("wait")
                }
                Ask::Wait => json!("wait"),
                Ask::Done => json!("done"),
            };
            Ok(said.to_string())
        })
    }

    /// Records an outcome. A repeated outcome counts once.
    fn tell(&self, py: Python<'_>, outcome: &str) -> Result<(), Error> {
        let outcome: Outcome = serde_json::from_str(outcome).map_err(|e| Error::Argument(e.to_string()))?;
        py.detach(|| {
            let mut engine = self.engine();
            engine.at(self.began.elapsed().as_secs_f64());
            Ok(engine.tell(&outcome)?)
        })
    }

    /// Stops handing out new tasks. The run can be resumed.
    fn stop(&self, py: Python<'_>) -> Result<(), Error> {
        py.detach(|| Ok(self.engine().stop()?))
    }

    /// The report of the run, as JSON.
    fn report(&self, py: Python<'_>) -> String {
        py.detach(|| serde_json::json!(self.engine().report()).to_string())
    }

    /// The state of the run, as JSON: candidates, rejected, under_way, best and random (time in µs, and speed
    /// relative to the baseline), budget.
    fn progress(&self, py: Python<'_>) -> String {
        py.detach(|| {
            let p = self.engine().progress();
            json!({
                "candidates": p.candidates, "rejected": p.rejected, "under_way": p.under_way,
                "best": p.best, "random": p.random, "budget": p.budget,
            })
            .to_string()
        })
    }

    /// The number of the run in the ledger.
    #[getter]
    fn run(&self) -> i64 {
        self.engine().run().0
    }
}

impl Evolution {
    fn engine(&self) -> MutexGuard<'_, evolve::Evolution> {
        self.evolution.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn begin(wanted: &Wanted) -> Result<Evolution, Error> {
    let began = Instant::now();
    let (evolution, host) = match wanted.resume {
        Some(number) => resumed(wanted, Some(number).filter(|number| *number != 0))?,
        None => begun(wanted)?,
    };
    Ok(Evolution { evolution: Mutex::new(evolution), host, began })
}

/// Begins a run. The ledger is created last, after everything else is known to be valid.
fn begun(wanted: &Wanted) -> Result<(evolve::Evolution, Option<Target>), Error> {
    let past = match Ledger::read(&wanted.ledger) {
        Err(LedgerError::Missing { .. } | LedgerError::Empty { .. }) => None,
        other => Some(other?),
    };
    let configuration = Configuration::named(&wanted.configuration).ok_or_else(|| {
        let names = Configuration::ALL.map(Configuration::name).join(", ");
        Error::invalid("configuration", &wanted.configuration, &names)
    })?;
    if let Some(name) = wanted.families.iter().find(|name| Family::named(name).is_none()) {
        let names = Family::ALL.map(Family::name).join(", ");
        return Err(Error::invalid("families", name, &names));
    }
    let asked = setup::Wanted {
        problems: shapes("problem", &wanted.problems)?,
        held_out: wanted.held_out.as_deref().map(|words| shapes("held_out", words)).transpose()?,
        only: None,
        candidates: wanted.candidates,
        minutes: wanted.minutes,
        seed: wanted.seed,
        configuration,
        random_share: wanted.random_share,
        families: wanted.families.clone(),
        proposer: None,
        early_stop: wanted.early_stop,
        peer_us: None,
    };
    let place = place(wanted)?;
    let device = &place.environment.device;
    let config = setup::config(past.as_ref(), place.target, device, place.arch, asked)?;
    let (ledger, price) = (Ledger::open(&wanted.ledger)?, wanted.price_per_hour);
    let run = evolve::Evolution::begin(ledger, config, place.environment, price, place.limits)?;
    Ok((run, place.host))
}

/// Resumes the run of this number, or the latest unfinished run.
fn resumed(wanted: &Wanted, number: Option<i64>) -> Result<(evolve::Evolution, Option<Target>), Error> {
    let ledger = Ledger::open_existing(&wanted.ledger)?;
    let none = || Error::Argument(format!("{} has no such run to resume", ledger.path().display()));
    let run = setup::which(&ledger, number)?.ok_or_else(none)?;
    let config = setup::kept(&ledger, run)?;
    setup::affordable(&config)?;
    let place = place(wanted)?;
    setup::same(&ledger, run, &place.environment, None)?;
    Ok((evolve::Evolution::resume(ledger, run, place.limits)?, place.host))
}

fn shapes(argument: &str, words: &[String]) -> Result<Vec<Shape>, Error> {
    let shape = |word: &String| {
        suites::parse_shape(word).map_err(|expected| Error::invalid(argument, word, &expected.to_string()))
    };
    words.iter().map(shape).collect()
}

/// Checks that every text describes a problem. Called before a cluster is started.
#[pyfunction]
pub fn check_problems(argument: &str, words: Vec<String>) -> Result<(), Error> {
    shapes(argument, &words).map(|_| ())
}

fn place(wanted: &Wanted) -> Result<Place, Error> {
    let workers = wanted.workers.max(1);
    match (wanted.device.as_str(), &wanted.card) {
        ("cpu", _) => {
            let environment = CpuEvaluator::new().environment();
            // One task at a time: other work on the CPU would disturb a timing.
            Ok(Place { target: Target::Cpu, environment, arch: None, limits: Limits::ALONE, host: None })
        }
        ("cuda", Some(card)) => {
            let arch = Arch::of(card.sm).ok_or_else(|| {
                Error::Unsupported(format!("{}: sm_{} is not supported", card.environment.device, card.sm))
            })?;
            let model = Gpu::of_device(&card.environment.device).and_then(|gpu| setup::model_named(gpu.name));
            let devices = wanted.devices.max(1) + 1;
            Ok(Place {
                target: Target::Cuda { ordinal: 0 },
                environment: card.environment.clone(),
                arch: Some(Arch { multiprocessors: card.multiprocessors, ..arch }),
                limits: Limits {
                    device: devices,
                    together: workers + devices,
                    ..Limits::beside_device(workers)
                },
                host: model.map(|(target, _)| target),
            })
        }
        (name, _) => {
            let named = setup::model_named(name);
            let model = named.and_then(|(target, gpu)| Some((target, Model::of(gpu)?)));
            let (target, model) = model
                .ok_or_else(|| Error::invalid("device", name, &format!("cpu, cuda, {}", setup::models())))?;
            // A prediction can run on any CPU of the cluster.
            let limits =
                Limits { host: workers, device: workers, together: workers + 1, open: 2 * workers + 4 };
            Ok(Place {
                target,
                environment: model.environment(),
                arch: Some(model.bench().arch),
                limits,
                host: None,
            })
        }
    }
}

/// Describes a GPU of this machine for a run on another machine: device, driver, compiler, architecture, as
/// JSON.
#[pyfunction]
pub fn describe_card(py: Python<'_>, ordinal: i32) -> Result<String, Error> {
    py.detach(|| {
        let gpu = driver::Gpu::open(ordinal)?;
        let info = gpu.info();
        let Provenance { device, driver, compiler, commit, .. } = Provenance::of_gpu(info);
        let (major, minor) = info.capability;
        let environment = Environment { device, driver, compiler, commit };
        let card = Card { environment, sm: major * 10 + minor, multiprocessors: info.sms };
        Ok(json!(card).to_string())
    })
}

/// The evaluators that this process has used. The lock admits one evaluation at a time, because other work
/// would disturb a timing.
static EVALUATORS: LazyLock<Mutex<Evaluators>> = LazyLock::new(Mutex::default);

/// Evaluates a task: JSON in, JSON out. A fault of the candidate is an outcome. Only an unusable device is an
/// error.
#[pyfunction]
pub fn evaluate(py: Python<'_>, task: &str) -> Result<String, Error> {
    let task: Task = serde_json::from_str(task).map_err(|e| Error::Argument(e.to_string()))?;
    py.detach(|| {
        let mut evaluators = EVALUATORS.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(json!(evaluators.evaluate(&task, evaluator)?).to_string())
    })
}

fn evaluator(target: &Target) -> Result<Box<dyn Evaluator>, Error> {
    Ok(match target {
        Target::Cpu => Box::new(CpuEvaluator::new()),
        Target::Model { machine } => match Gpu::named(machine).and_then(Model::of) {
            Some(model) => Box::new(model),
            None => return Err(Error::Argument(format!("no machine is called {machine}"))),
        },
        Target::Cuda { ordinal } => {
            let card = GpuCard::open(*ordinal).map_err(|fault| Error::Device(fault.to_string()))?;
            let known = Gpu::of_device(&card.info().name);
            Box::new(Cuda::new(card, known))
        }
    })
}

/// The outcome of a task whose evaluation was lost. `reason` is one word, `detail` is a text.
#[pyfunction]
pub fn lost(task: &str, reason: &str, detail: &str, seconds: f64) -> Result<String, Error> {
    let task: Task = serde_json::from_str(task).map_err(|e| Error::Argument(e.to_string()))?;
    let reason = Reason::named(reason).ok_or_else(|| {
        let accepted = Reason::NAMES.join(", ");
        Error::Argument(format!("invalid value {reason:?} for reason: expected one of {accepted}"))
    })?;
    let rejection = Rejection { stage: task.stage, reason, detail: detail.to_owned() };
    let outcome = Outcome {
        candidate: task.candidate,
        stage: task.stage,
        problem: task.problem,
        seconds,
        device_seconds: if task.stage.is_of_device() { seconds } else { 0.0 },
        finding: Finding::Rejected(rejection),
    };
    Ok(json!(outcome).to_string())
}

/// Adds the functions and the class of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(check_problems, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(lost, module)?)?;
    module.add_function(wrap_pyfunction!(describe_card, module)?)?;
    module.add_function(wrap_pyfunction!(ledger_check, module)?)?;
    module.add_class::<Evolution>()
}

/// Checks a ledger and counts the facts of its tables, for tests and for monitoring.
#[pyfunction]
pub fn ledger_check(py: Python<'_>, path: PathBuf) -> Result<String, Error> {
    py.detach(|| {
        let ledger = Ledger::read(&path)?;
        let found = ledger.check()?;
        let facts: HashMap<&str, i64> = found.facts.iter().copied().collect();
        let runs: Value = json!(ledger.runs()?);
        Ok(json!({ "sound": found.is_sound(), "facts": facts, "found": found, "runs": runs }).to_string())
    })
}
