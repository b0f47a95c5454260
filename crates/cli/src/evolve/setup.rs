//! What a run needs: its configuration from the command line, or from the ledger, and who evaluates.

use std::path::Path;

use emu::model::{Gpu, machine};
use kernels::select::Shape;
use kernels::{Arch, Family};
use lab::evolve::evaluate::cpu::CpuEvaluator;
use lab::evolve::evaluate::model::Model;
use lab::evolve::seeding::{self, Wishes};
use lab::evolve::workers::{Crew, Program, Worker};
use lab::evolve::{Candidate, Case, Config, Configuration, Evaluator, Evolution, Limits, Target};
use lab::ledger::{Environment, Ledger, RunId};
use lab::provenance::Provenance;
use problem::Problem;

use crate::args::Evolve;
use crate::choice;
use crate::error::CliError;

/// Wins of other runs that a search is told of.
const WINS: usize = 50;
/// Blind draws that the time model picks from, at most, and in proportion to the candidates.
const DRAWS: usize = 8;
const CANDIDATES_A_DRAW: usize = 16;

/// A device with all that is asked of it.
struct Device {
    target: Target,
    environment: Environment,
    arch: Option<Arch>,
    crew: Crew,
    limits: Limits,
}

/// Begins a run.
pub fn begin(ledger: Ledger, args: &Evolve) -> Result<(Evolution, Crew), CliError> {
    let problems = problems(&args.problem, &[Problem::mission()])?;
    let held_out = if args.held_out.is_empty() { None } else { Some(problems_of(&args.held_out)?) };
    check(args)?;
    let device = open(target(&args.device, args.emulator)?, args)?;
    let name = device.environment.device.clone();
    let only = args.seed_plan.as_deref().map(|file| plan(file, &device.target)).transpose()?;
    let known = ledger.best_of_problems(&name).unwrap_or_default();
    let share = args.candidates.map_or(DRAWS, |all| all / problems.len() / CANDIDATES_A_DRAW);
    let wishes = Wishes {
        only,
        known: known.into_iter().map(|ranked| (ranked.problem, ranked.subject)).collect(),
        held_out,
        draws: share.min(DRAWS),
    };
    let cases = problems.iter().map(|problem| case(problem, &name, device.arch.as_ref(), &wishes));
    let cases: Vec<Case> = cases.collect::<Result<_, _>>()?;
    for case in cases.iter().filter(|_| wishes.only.is_some()) {
        fits(case, device.arch.as_ref())?;
    }
    let mut config = Config::new(device.target, &name, device.arch, cases);
    config.configuration = configuration(&args.configuration)?;
    (config.seed, config.candidates) = (args.seed, args.candidates);
    config.seconds = args.minutes.map(|minutes| minutes * 60.0);
    if config.seconds.is_none() && config.candidates.is_none() {
        config.seconds = Some(120.0);
    }
    config.random_share = args.random_share;
    (config.families, config.proposer) = (args.family.clone(), args.proposer.clone());
    (config.early_stop, config.peer_us) = (!args.no_early_stop, args.peer_us);
    if config.cases.iter().all(|case| case.shipped.is_none()) {
        config.wins = wins(&ledger)?;
    }
    let evolution = Evolution::begin(ledger, config, device.environment, args.price, device.limits)?;
    Ok((evolution, device.crew))
}

/// Goes on with a run on the device that it was begun for.
pub fn resume(ledger: Ledger, run: RunId, args: &Evolve) -> Result<(Evolution, Crew), CliError> {
    let config = ledger.run(run)?.config;
    let config: Config = serde_json::from_value(config)
        .map_err(|error| lab::evolve::EvolveError::Config { run: run.0, error })?;
    let device = open(config.target, args)?;
    let begun_on = config.device;
    if device.environment.device != begun_on {
        return Err(CliError::Argument {
            argument: "--resume",
            value: run.0.to_string(),
            accepted: format!("a run of {}; this one was begun on {begun_on}", device.environment.device),
        });
    }
    let evolution = Evolution::resume(ledger, run, device.limits)?;
    Ok((evolution, device.crew))
}

/// Numbers that no run can have.
fn check(args: &Evolve) -> Result<(), CliError> {
    let refuse = |argument: &'static str, value: String, accepted: &str| {
        Err(CliError::Argument { argument, value, accepted: accepted.to_owned() })
    };
    if let Some(minutes) = args.minutes.filter(|m| !(m.is_finite() && *m > 0.0)) {
        return refuse("--minutes", minutes.to_string(), "a number above 0");
    }
    if args.candidates == Some(0) {
        return refuse("--candidates", "0".into(), "1 and more");
    }
    if !(0.0..=0.9).contains(&args.random_share) {
        return refuse("--random-share", args.random_share.to_string(), "0 to 0.9");
    }
    if let Some(us) = args.peer_us.filter(|us| !(us.is_finite() && *us > 0.0)) {
        return refuse("--library-us", us.to_string(), "a number above 0");
    }
    if args.jobs == Some(0) {
        return refuse("--jobs", "0".into(), "1 and more");
    }
    if let Some(name) = args.family.iter().find(|name| Family::named(name).is_none()) {
        return refuse("--family", name.clone(), &Family::ALL.map(Family::name).join(", "));
    }
    Ok(())
}

fn configuration(name: &str) -> Result<Configuration, CliError> {
    Configuration::named(name).ok_or_else(|| CliError::Argument {
        argument: "--configuration",
        value: name.to_owned(),
        accepted: Configuration::ALL.map(Configuration::name).join(", "),
    })
}

fn problems(words: &[String], default: &[Problem]) -> Result<Vec<Shape>, CliError> {
    if words.is_empty() { Ok(default.iter().map(Shape::of).collect()) } else { problems_of(words) }
}

/// Each once.
fn problems_of(words: &[String]) -> Result<Vec<Shape>, CliError> {
    let mut found: Vec<Shape> = Vec::new();
    for word in words {
        let shape = Shape::of(&choice::parse(word)?);
        if !found.contains(&shape) {
            found.push(shape);
        }
    }
    Ok(found)
}

/// `--seed-plan`.
fn plan(file: &Path, target: &Target) -> Result<Candidate, CliError> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| CliError::Read { path: file.to_path_buf(), source })?;
    let plan = match target {
        Target::Cpu => serde_json::from_str(&text).map(Candidate::Cpu),
        Target::Cuda { .. } | Target::Model { .. } => serde_json::from_str(&text).map(Candidate::Gpu),
    };
    plan.map_err(|error| CliError::Argument {
        argument: "--seed-plan",
        value: file.display().to_string(),
        accepted: format!("a file with one plan as JSON, as `explain --problem` prints it ({error})"),
    })
}

/// A seed that cannot compute the problem is no seed.
fn fits(case: &Case, arch: Option<&Arch>) -> Result<(), CliError> {
    let problem = case.problem.problem();
    match (&case.baseline, arch) {
        (Candidate::Gpu(plan), Some(arch)) => {
            plan.check(&problem, arch).map_err(kernels::KernelError::from)?;
        }
        (Candidate::Cpu(plan), _) => plan.check(&problem)?,
        _ => {}
    }
    Ok(())
}

fn case(problem: &Shape, device: &str, arch: Option<&Arch>, wishes: &Wishes) -> Result<Case, CliError> {
    Ok(match arch {
        Some(arch) => seeding::gpu(problem, device, arch, wishes)?,
        None => seeding::cpu(problem, wishes),
    })
}

/// What helped elsewhere in the ledger.
fn wins(ledger: &Ledger) -> Result<Vec<(String, serde_json::Value, f64)>, CliError> {
    let mut found = Vec::new();
    for win in ledger.wins(WINS)? {
        let candidate = ledger.candidate(win.candidate)?.known.new.candidate;
        found.push((lab::evolve::space::family(&candidate).to_owned(), win.changes, win.ratio));
    }
    Ok(found)
}

/// `--device`.
fn target(name: &str, emulator: bool) -> Result<Target, CliError> {
    let compact = |name: &str| name.to_lowercase().replace(' ', "");
    let ordinal = match name {
        "cpu" => return Ok(Target::Cpu),
        "cuda" => Some(0),
        _ if emulator => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|n| n.parse::<u16>().ok()),
    };
    if let Some(ordinal) = ordinal {
        return Ok(Target::Cuda { ordinal: ordinal.into() });
    }
    let gpu = machine::MACHINES.into_iter().find(|gpu| compact(gpu.name) == compact(name));
    gpu.map(|gpu| Target::Model { machine: compact(gpu.name) }).ok_or_else(|| CliError::Argument {
        argument: "--device",
        value: name.to_owned(),
        accepted: format!("cpu, cuda, cuda:N, {}", machine::MACHINES.map(|gpu| compact(gpu.name)).join(", ")),
    })
}

/// Opens a device and puts evaluators to work.
fn open(target: Target, args: &Evolve) -> Result<Device, CliError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cores.saturating_sub(1)).max(1);
    match &target {
        Target::Cpu => {
            // Timings have the machine for themselves: one task at a time.
            let evaluator = CpuEvaluator::new();
            let environment = evaluator.environment();
            let crew = Crew::start(vec![Box::new(evaluator)], vec![Box::new(CpuEvaluator::new())]);
            Ok(Device { target, environment, arch: None, crew, limits: Limits::ALONE })
        }
        Target::Model { machine: name } => {
            let compact = |gpu: &&&Gpu| gpu.name.to_lowercase().replace(' ', "") == *name;
            let gpu = machine::MACHINES.iter().find(compact).copied();
            let unknown = || CliError::Argument {
                argument: "--device",
                value: name.clone(),
                accepted: machine::MACHINES.map(|gpu| gpu.name).join(", "),
            };
            let gpu = gpu.ok_or_else(unknown)?;
            let models = || (0..jobs).map(|_| Model::of(gpu)).collect::<Option<Vec<_>>>().ok_or_else(unknown);
            let (host, beside) = (models()?, Model::of(gpu).ok_or_else(unknown)?);
            let (environment, arch) = (beside.environment(), Some(beside.bench().arch));
            // Someone else's kernels may bring down whoever looks at them.
            let boxed = |model| match args.proposer {
                Some(_) => worker(&[], &environment),
                None => Ok(Box::new(model) as Box<dyn Evaluator>),
            };
            let host = host.into_iter().map(boxed).collect::<Result<_, _>>()?;
            let crew = Crew::start(host, vec![boxed(beside)?]);
            Ok(Device { target, environment, arch, crew, limits: Limits::beside_device(jobs) })
        }
        Target::Cuda { ordinal } => {
            let (environment, arch) = card(*ordinal, args.emulator)?;
            let extra: &[&str] = if args.emulator { &["--emulator"] } else { &[] };
            let host = (0..jobs).map(|_| worker(extra, &environment)).collect::<Result<_, _>>()?;
            let crew = Crew::start(host, vec![worker(extra, &environment)?]);
            Ok(Device { target, environment, arch: Some(arch), crew, limits: Limits::beside_device(jobs) })
        }
    }
}

/// This program as an evaluator in a process of its own.
fn worker(args: &[&str], environment: &Environment) -> Result<Box<dyn Evaluator>, CliError> {
    Ok(Box::new(Worker::new(Program::of_this(args)?, environment.clone())))
}

/// What a GPU is. It is opened once, to ask; workers open it for themselves.
fn card(ordinal: i32, emulator: bool) -> Result<(Environment, Arch), CliError> {
    if emulator {
        let device = "emulator, sm_90".to_owned();
        return Ok((Environment { device, ..Environment::default() }, Arch::SM_90));
    }
    let gpu = driver::Gpu::open(ordinal)?;
    let info = gpu.info();
    let (major, minor) = info.capability;
    let arch = Arch::of(major * 10 + minor).ok_or_else(|| CliError::Argument {
        argument: "--device",
        value: info.name.clone(),
        accepted: Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", "),
    })?;
    let Provenance { device, driver, compiler, commit, .. } = Provenance::of_gpu(info);
    let environment = Environment { device, driver, compiler, commit };
    Ok((environment, Arch { multiprocessors: info.sms, ..arch }))
}
