//! Prepares a run: its configuration, from the command line or from the ledger, and its evaluators.

use std::path::Path;

use bench::provenance::{Provenance, program};
use evolve::evaluate::cpu::CpuEvaluator;
use evolve::evaluate::model::Model;
use evolve::proposer::{self, Proposer, Sandbox};
use evolve::setup::{self, Wanted};
use evolve::workers::{Worker, WorkerPool, WorkerProgram};
use evolve::{Candidate, Case, Config, Configuration, Evaluator, Evolution, Limits, Target};
use host::store;
use kernels::select::Shape;
use kernels::{Arch, Family};
use ledger::{Environment, Ledger, LedgerError};
use problem::Problem;

use crate::args::Evolve;
use crate::error::CliError;
use crate::terminal::tell;
use crate::{choice, plan};

/// A device, and what the run needs to use it.
struct Device {
    target: Target,
    environment: Environment,
    arch: Option<Arch>,
    pool: WorkerPool,
    limits: Limits,
}

/// Begins a run. The ledger is opened or created last, after all arguments are known to be valid.
pub fn begin(args: &Evolve) -> Result<(Evolution, WorkerPool), CliError> {
    check(args)?;
    findable(args)?;
    let target = target(&args.device, args.emulator)?;
    promotable(args, &target)?;
    keeps(args, &target)?;
    family_applies(args, &target)?;
    let mut wanted = wanted(args)?;
    let sandbox = sandbox(args)?;
    sandbox.as_ref().map_or(Ok(()), can_be_had)?;
    wanted.only = args.seed_plan.as_deref().map(|file| seed(file, &target)).transpose()?;
    let past = match Ledger::read(&args.ledger.path) {
        Err(LedgerError::Missing { .. } | LedgerError::Empty { .. }) => None,
        other => Some(other?),
    };
    past.as_ref().map_or(Ok(()), Ledger::require_sound)?;
    let device = open(target, args, wanted.proposer.is_some())?;
    keepable(args, &device.environment, &device.target)?;
    let (has_seed, name) = (wanted.only.is_some(), &device.environment.device);
    let mut config = setup::config(past.as_ref(), device.target, name, device.arch, wanted)?;
    config.program = program();
    config.sandbox = sandbox;
    config.no_keep = args.no_keep;
    if let Some(words) = config.load.and_then(|load| load.words()) {
        tell(format_args!("this machine is busy: {words}; times will be unreliable"));
    }
    for case in config.cases.iter().filter(|_| has_seed) {
        fits(case, device.arch.as_ref())?;
    }
    let ledger = Ledger::open(&args.ledger.path)?;
    let evolution = Evolution::begin(ledger, config, device.environment, args.price, device.limits)?;
    Ok((evolution, device.pool))
}

/// Resumes a run on the device on which it was begun.
pub fn resume(number: Option<i64>, args: &Evolve) -> Result<(Evolution, WorkerPool), CliError> {
    check(args)?;
    let ledger = Ledger::open_existing(&args.ledger.path)?;
    ledger.require_sound()?;
    let run = match setup::which(&ledger, number)? {
        Some(run) => run,
        None => return Err(no_run(&ledger, number)?),
    };
    let config = setup::kept(&ledger, run)?;
    // The problems come from the ledger, so the error names no option.
    setup::affordable(&config).map_err(CliError::Setup)?;
    config.sandbox.as_ref().map_or(Ok(()), can_be_had)?;
    promotable(args, &config.target)?;
    // Whether the run has a proposer is read from the ledger, because the command line does not repeat the
    // option.
    let device = open(config.target, args, config.proposer.is_some())?;
    keepable(args, &ledger.run(run)?.environment, &device.target)?;
    let begun_on = config.device;
    if device.environment.device != begun_on {
        return Err(CliError::Argument {
            argument: "--resume",
            value: run.0.to_string(),
            accepted: format!("a run of {}; this one was begun on {begun_on}", device.environment.device),
        });
    }
    setup::same(&ledger, run, &device.environment, program().as_deref())?;
    let evolution = Evolution::resume(ledger, run, device.limits)?;
    Ok((evolution, device.pool))
}

/// The error for a run that cannot be resumed: the number that was asked for, and the runs that exist.
fn no_run(ledger: &Ledger, number: Option<i64>) -> Result<CliError, CliError> {
    let ledger_path = ledger.path().to_path_buf();
    let Some(number) = number else { return Ok(CliError::NoRun { ledger: ledger_path }) };
    let mut runs: Vec<i64> = ledger.runs()?.iter().map(|line| line.id.0).collect();
    runs.sort_unstable();
    let accepted = match runs.as_slice() {
        [] => "none: it has no run yet".to_owned(),
        [only] => only.to_string(),
        [first, .., last] => format!("{first} to {last}"),
    };
    let accepted = format!("a run of {}, {accepted}", ledger_path.display());
    Ok(CliError::Argument { argument: "--resume", value: number.to_string(), accepted })
}

fn wanted(args: &Evolve) -> Result<Wanted, CliError> {
    let shapes = |argument, words: &[String]| -> Result<Vec<Shape>, CliError> {
        words.iter().map(|word| choice::parse_shape(argument, word)).collect()
    };
    let problems = shapes("--problem", &args.problem)?;
    Ok(Wanted {
        problems: if problems.is_empty() { vec![Shape::of(&Problem::mission())] } else { problems },
        held_out: if args.held_out.is_empty() { None } else { Some(shapes("--held-out", &args.held_out)?) },
        only: None,
        candidates: args.candidates,
        minutes: args.minutes,
        seed: args.seed,
        configuration: configuration(&args.configuration)?,
        random_share: args.random_share,
        families: args.family.clone(),
        proposer: args.proposer.clone(),
        early_stop: !args.no_early_stop,
        peer_us: args.peer_us,
    })
}

/// Rejects `--promote` with the CPU: the table of tuned plans holds GPU kernels only.
fn promotable(args: &Evolve, target: &Target) -> Result<(), CliError> {
    match (&args.promote, target) {
        (Some(file), Target::Cpu) => Err(CliError::Argument {
            argument: "--promote",
            value: file.display().to_string(),
            accepted: "no --promote with --device cpu: the table of tuned plans holds GPU kernels only, and the winners of \
                       a CPU search are kept for this user (`flashcore plans`)"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Rejects `--no-keep` for a GPU, whose winners are not kept in the first place.
fn keeps(args: &Evolve, target: &Target) -> Result<(), CliError> {
    match target {
        Target::Cpu => Ok(()),
        _ if args.no_keep => Err(CliError::Needs { argument: "--no-keep", needed: "--device cpu" }),
        _ => Ok(()),
    }
}

/// Rejects `--family` for a CPU, whose plans have no families.
fn family_applies(args: &Evolve, target: &Target) -> Result<(), CliError> {
    match (args.family.first(), target) {
        (Some(family), Target::Cpu) => Err(CliError::Argument {
            argument: "--family",
            value: family.clone(),
            accepted: "no --family with --device cpu: families are those of GPU kernels".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Rejects `--evidence` without a known commit, because a row of evidence names its commit.
fn keepable(args: &Evolve, environment: &Environment, target: &Target) -> Result<(), CliError> {
    match (&args.evidence, &environment.commit, target) {
        (None, ..) | (_, Some(_), _) => Ok(()),
        (Some(_), None, Target::Cuda { .. }) => Err(CliError::Unbuilt),
        (Some(_), None, _) => Err(CliError::Unclean),
    }
}

/// Rejects a proposer whose program does not exist. Whether the program works is only known when it is asked.
fn findable(args: &Evolve) -> Result<(), CliError> {
    let Some(line) = &args.proposer else { return Ok(()) };
    let accepted = match (line.trim().is_empty(), proposer::missing(line)) {
        (true, _) => "a program, such as 'python3 examples/proposer.py'".to_owned(),
        (false, Some(program)) => format!("a program that the shell finds; it finds no {program}"),
        (false, None) => return Ok(()),
    };
    Err(CliError::Argument { argument: "--proposer", value: line.clone(), accepted })
}

/// The paths and environment variables that a proposer in a sandbox may see.
fn sandbox(args: &Evolve) -> Result<Option<Sandbox>, CliError> {
    let Some(line) = args.proposer.as_ref().filter(|_| args.proposer_sandbox) else { return Ok(None) };
    if let Some(path) = args.proposer_read.iter().find(|path| !path.exists()) {
        return Err(CliError::Argument {
            argument: "--proposer-read",
            value: path.display().to_string(),
            accepted: "a file or folder that is there".to_owned(),
        });
    }
    Ok(Some(Sandbox::for_line(line, &args.proposer_env, &args.proposer_read)))
}

/// The proposer of a run, in the sandbox with which the run was begun.
pub fn proposer(config: &Config) -> Result<Option<Proposer>, CliError> {
    let Some(line) = &config.proposer else { return Ok(None) };
    of_line(line, config.sandbox.as_ref()).map(Some)
}

fn of_line(line: &str, sandbox: Option<&Sandbox>) -> Result<Proposer, CliError> {
    let proposer = Proposer::new(line, proposer::LIMITS);
    let Some(sandbox) = sandbox else { return Ok(proposer) };
    let program = std::env::current_exe().map_err(|error| CliError::Sandbox(error.to_string()))?;
    Ok(proposer.sandboxed(program, sandbox.clone()))
}

/// Tries the sandbox before the run begins: without a working sandbox the proposer is never started.
fn can_be_had(sandbox: &Sandbox) -> Result<(), CliError> {
    let said =
        of_line(":", Some(sandbox))?.run(Vec::new()).map_err(|error| CliError::Sandbox(error.to_string()))?;
    if said.status.success() { Ok(()) } else { Err(CliError::Sandbox(said.stderr)) }
}

/// Largest value of `--jobs`: more than any machine can use, and few enough to start on any machine.
const MOST_JOBS: usize = 256;

/// Rejects numbers that are out of range.
fn check(args: &Evolve) -> Result<(), CliError> {
    let refuse = |argument: &'static str, value: String, accepted: &str| {
        Err(CliError::Argument { argument, value, accepted: accepted.to_owned() })
    };
    if let Some(minutes) = args.minutes.filter(|m| !(m.is_finite() && *m > 0.0)) {
        return refuse("--minutes", minutes.to_string(), "a number above 0");
    }
    if !(args.random_share > 0.0 && args.random_share <= 0.9) {
        return refuse("--random-share", args.random_share.to_string(), "above 0, at most 0.9");
    }
    if let Some(us) = args.peer_us.filter(|us| !(us.is_finite() && *us > 0.0)) {
        return refuse("--library-us", us.to_string(), "a number above 0");
    }
    if let Some(price) = args.price.filter(|price| !(price.is_finite() && *price >= 0.0)) {
        return refuse("--price", price.to_string(), "a number of at least 0");
    }
    if let Some(jobs) = args.jobs.filter(|jobs| !(1..=MOST_JOBS).contains(jobs)) {
        return refuse("--jobs", jobs.to_string(), &format!("1 to {MOST_JOBS}"));
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

/// Reads `--seed-plan`.
fn seed(file: &Path, target: &Target) -> Result<Candidate, CliError> {
    let text = store::read_text(file)?;
    let (argument, name) = ("--seed-plan", file.display().to_string());
    match target {
        Target::Cpu => plan::native(argument, &name, &text).map(Candidate::Cpu),
        Target::Cuda { .. } | Target::Model { .. } => plan::gpu(argument, &name, &text).map(Candidate::Gpu),
    }
}

/// Rejects a seed plan that cannot compute the problem.
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

/// Reads `--device`.
fn target(name: &str, emulator: bool) -> Result<Target, CliError> {
    let ordinal = match name {
        "cpu" => return Ok(Target::Cpu),
        "cuda" => Some(0),
        _ if emulator => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|n| n.parse::<u16>().ok()),
    };
    if let Some(ordinal) = ordinal {
        return Ok(Target::Cuda { ordinal: ordinal.into() });
    }
    setup::model_named(name).map(|(target, _)| target).ok_or_else(|| CliError::Argument {
        argument: "--device",
        value: name.to_owned(),
        accepted: format!("cpu, cuda, cuda:N, {}", setup::models()),
    })
}

/// Opens a device and starts its evaluators. They run in separate processes if kernels may come from a
/// proposer or run on a GPU.
fn open(target: Target, args: &Evolve, has_proposer: bool) -> Result<Device, CliError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cores.saturating_sub(1)).max(1);
    match &target {
        Target::Cpu => {
            // One task at a time: other work on the CPU would disturb a timing.
            crate::bench::tell_of_slow_build();
            let evaluator = CpuEvaluator::new();
            let environment = evaluator.environment();
            let pool = WorkerPool::start(vec![Box::new(evaluator)], vec![Box::new(CpuEvaluator::new())]);
            Ok(Device { target, environment, arch: None, pool, limits: Limits::ALONE })
        }
        Target::Model { machine: name } => {
            let unknown = || CliError::Argument {
                argument: "--device",
                value: name.clone(),
                accepted: setup::models(),
            };
            let (_, gpu) = setup::model_named(name).ok_or_else(unknown)?;
            let models = || (0..jobs).map(|_| Model::of(gpu)).collect::<Option<Vec<_>>>().ok_or_else(unknown);
            let (host, beside) = (models()?, Model::of(gpu).ok_or_else(unknown)?);
            let (environment, arch) = (beside.environment(), Some(beside.bench().arch));
            // A kernel from a proposer may crash the process that evaluates it.
            let boxed = |model| match has_proposer {
                true => worker(&[], &environment),
                false => Ok(Box::new(model) as Box<dyn Evaluator>),
            };
            let host = host.into_iter().map(boxed).collect::<Result<_, _>>()?;
            let pool = WorkerPool::start(host, vec![boxed(beside)?]);
            Ok(Device { target, environment, arch, pool, limits: Limits::beside_device(jobs) })
        }
        Target::Cuda { ordinal } => {
            let (environment, arch) = card(*ordinal, args.emulator)?;
            let extra: &[&str] = if args.emulator { &["--emulator"] } else { &[] };
            let host = (0..jobs).map(|_| worker(extra, &environment)).collect::<Result<_, _>>()?;
            let pool = WorkerPool::start(host, vec![worker(extra, &environment)?]);
            Ok(Device { target, environment, arch: Some(arch), pool, limits: Limits::beside_device(jobs) })
        }
    }
}

/// An evaluator that runs as a separate process of this program.
fn worker(args: &[&str], environment: &Environment) -> Result<Box<dyn Evaluator>, CliError> {
    Ok(Box::new(Worker::new(WorkerProgram::of_this(args)?, environment.clone())))
}

/// The environment and architecture of a GPU. The GPU is opened here once; each worker opens it again.
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
