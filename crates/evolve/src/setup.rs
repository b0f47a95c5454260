//! Begins and resumes runs: turns a user's request and the ledger's content into a configuration. The command
//! and the Python package share this module.

use std::time::Duration;

use kernels::select::Shape;
use kernels::{Arch, Family, KernelError};
use predict::{Gpu, machine};
use problem::{PassKind, Tensor};

use super::config::{Case, Config, Configuration, EarlierWin};
use super::error::EvolveError;
use super::seeding::{self, Wishes};
use super::space;
use super::task::Target;
use super::workers::evaluation_memory;
use bench::{CpuPeaks, LoadMeter};
use ledger::Candidate;
use ledger::{Environment, Ledger, LedgerError, RunEvent, RunId};

/// Number of wins of other runs that a search uses.
const WINS: usize = 50;
/// Maximum number of random samples from which the time model picks. There is one for every
/// `CANDIDATES_A_DRAW` candidates of the budget.
const DRAWS: usize = 8;
const CANDIDATES_A_DRAW: usize = 16;
/// How long the load of the processor is measured before a run on it.
const OBSERVED: Duration = Duration::from_millis(500);
/// The default budget, s.
const SECONDS: f64 = 120.0;

/// A user's request for a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The problems. Duplicates are ignored.
    pub problems: Vec<Shape>,
    /// Held-out problems; the neighbours of each problem if `None`.
    pub held_out: Option<Vec<Shape>>,
    /// The only seed, which is also the baseline.
    pub only: Option<Candidate>,
    /// Maximum number of candidates.
    pub candidates: Option<usize>,
    /// Maximum duration, minutes. If neither limit is given, two minutes.
    pub minutes: Option<f64>,
    /// The random seed.
    pub seed: u64,
    pub configuration: Configuration,
    /// The fraction of candidates that are random samples.
    pub random_share: f64,
    /// Families to draw from; all families if empty.
    pub families: Vec<String>,
    /// The command line of a program that proposes candidates.
    pub proposer: Option<String>,
    /// Whether the run may end before its budget.
    pub early_stop: bool,
    /// The time of the best library on the first problem, µs.
    pub peer_us: Option<f64>,
}

/// Why a run cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// No kernel supports a problem.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("invalid value '{value}' for {argument}: expected {accepted}")]
    Argument { argument: &'static str, value: String, accepted: String },
    #[error(
        "invalid value '{problem}' for {argument}: expected tensors of at most {most:.1} GB on this machine; these \
         take {needed:.1} GB, and an evaluation holds them {times} times"
    )]
    Memory {
        argument: &'static str,
        problem: String,
        /// Size of its tensors, GB.
        needed: f64,
        /// Number of copies of the tensors that an evaluation holds.
        times: u64,
        /// Maximum size, GB.
        most: f64,
    },
    /// The environment differs from the one in which the run was begun.
    #[error(
        "run {run} cannot be resumed here: {what}; all figures of a run must come from one program, \
        device and driver. Resume the run in its original environment, or begin a new run"
    )]
    Changed {
        run: i64,
        /// The differences in words.
        what: String,
    },
}

/// Number of copies of a problem's tensors that an evaluation holds: drawn, rounded, staged for a race, in
/// the oracle, and for cached problems. A prediction holds them in the emulator and in its inputs.
const COPIES: u64 = 16;
const COPIES_EMULATED: u64 = 6;

/// The configuration of a new run on a device, with results of other runs from the ledger. `past` is `None`
/// when there is no ledger yet.
///
/// # Errors
/// When no kernel supports a problem, this machine cannot hold it, a family or held-out problem is invalid,
/// or the ledger cannot be read.
pub fn config(
    past: Option<&Ledger>,
    target: Target,
    device: &str,
    arch: Option<Arch>,
    wanted: Wanted,
) -> Result<Config, SetupError> {
    check_passes(&target, &wanted)?;
    can_hold(&target, wanted.problems.iter(), wanted.held_out.iter().flatten())?;
    let problems = distinct(wanted.problems);
    check_families(&wanted.families, &problems, arch.as_ref())?;
    for shape in wanted.held_out.iter().flatten() {
        check_held_out(shape, &problems, device, arch.as_ref())?;
    }
    let share = wanted.candidates.map_or(DRAWS, |all| all / problems.len().max(1) / CANDIDATES_A_DRAW);
    let from_others = past.filter(|_| wanted.only.is_none());
    let wishes = Wishes {
        only: wanted.only,
        known: from_others.map_or(Ok(Vec::new()), |ledger| ledger.winners(device))?,
        held_out: wanted.held_out.map(distinct),
        draws: share.min(DRAWS),
    };
    let case = |problem: &Shape| match &arch {
        Some(arch) => seeding::gpu(problem, device, arch, &wishes),
        None => Ok(seeding::cpu(problem, &wishes)),
    };
    let cases: Vec<Case> = problems.iter().map(case).collect::<Result<_, KernelError>>()?;
    let budget = (wanted.candidates, wanted.minutes.map(|minutes| minutes * 60.0));
    let mut config = Config::new(target, device, arch, cases);
    // Default held-out problems are left out when they are too large.
    let most = most(&config.target);
    config.cases.iter_mut().for_each(|case| case.held_out.retain(|(shape, _)| bytes(shape) <= most));
    (config.candidates, config.seconds) = if budget == (None, None) { (None, Some(SECONDS)) } else { budget };
    (config.seed, config.configuration) = (wanted.seed, wanted.configuration);
    (config.random_share, config.families) = (wanted.random_share, wanted.families);
    (config.proposer, config.early_stop, config.peer_us) =
        (wanted.proposer, wanted.early_stop, wanted.peer_us);
    if config.target == Target::Cpu {
        let problems: Vec<_> = problems.iter().map(Shape::problem).collect();
        let meter = LoadMeter::start();
        std::thread::sleep(OBSERVED);
        config.load = meter.read();
        config.peaks = Some(CpuPeaks::measure(&problems));
    }
    let wins = from_others.map_or(Ok(Vec::new()), |ledger| ledger.wins(device, WINS))?;
    let earlier = wins.into_iter().map(|win| EarlierWin {
        family: space::family(&win.subject).to_owned(),
        changes: win.changes,
        gain: win.gain,
    });
    config.wins = earlier.collect();
    Ok(config)
}

/// Checks that a search on the CPU is one of forward passes, whose plans alone have genes there.
fn check_passes(target: &Target, wanted: &Wanted) -> Result<(), SetupError> {
    if *target != Target::Cpu {
        return Ok(());
    }
    let held_out = wanted.held_out.iter().flatten().map(|shape| ("held_out", shape));
    for (argument, shape) in wanted.problems.iter().map(|shape| ("problem", shape)).chain(held_out) {
        if shape.problem().pass.kind() != PassKind::Forward {
            let accepted = "a forward pass with device cpu".to_owned();
            return Err(SetupError::Argument { argument, value: shape.to_string(), accepted });
        }
    }
    Ok(())
}

/// Checks that every named family supports one of the problems, and that every problem is supported by one of
/// them.
fn check_families(families: &[String], problems: &[Shape], arch: Option<&Arch>) -> Result<(), SetupError> {
    let refuse = |value: &str, accepted: String| {
        Err(SetupError::Argument { argument: "family", value: value.to_owned(), accepted })
    };
    let Some(first) = families.first() else { return Ok(()) };
    let Some(arch) = arch else {
        return refuse(first, "none with device cpu, whose plans are of one family".to_owned());
    };
    let computes = |family: &Family, shape: &Shape| family.default_for(&shape.problem(), arch).is_ok();
    let names = |fit: &dyn Fn(&Family) -> bool| -> String {
        let fit: Vec<&str> =
            Family::ALL.iter().filter(|family| fit(family)).map(|family| family.name()).collect();
        if fit.is_empty() { "none here".to_owned() } else { fit.join(", ") }
    };
    for name in families {
        let is_of_use = |family: &Family| problems.iter().any(|shape| computes(family, shape));
        if !Family::named(name).is_some_and(|family| is_of_use(&family)) {
            return refuse(name, names(&is_of_use));
        }
    }
    let named = |family: &Family| families.iter().any(|name| name == family.name());
    for shape in problems {
        if !Family::ALL.iter().any(|family| named(family) && computes(family, shape)) {
            let fit = names(&|family| computes(family, shape));
            return refuse(&families.join(", "), format!("for {shape}: {fit}"));
        }
    }
    Ok(())
}

/// Checks that a held-out problem has a shipped plan and is not searched by the run itself.
fn check_held_out(
    shape: &Shape,
    problems: &[Shape],
    device: &str,
    arch: Option<&Arch>,
) -> Result<(), SetupError> {
    let refuse = |accepted: String| {
        Err(SetupError::Argument { argument: "held_out", value: shape.to_string(), accepted })
    };
    if problems.contains(shape) {
        return refuse("a problem that the run does not search itself".to_owned());
    }
    match arch.map(|arch| seeding::ships(shape, device, arch)) {
        Some(Err(why)) => refuse(format!("a problem that a shipped plan supports ({why})")),
        Some(Ok(_)) | None => Ok(()),
    }
}

/// Checks that this machine can hold the problems of a run. A failed allocation would end the process.
///
/// # Errors
/// [`SetupError::Memory`] for the first problem that is too large.
pub fn affordable(config: &Config) -> Result<(), SetupError> {
    let held_out = config.cases.iter().flat_map(|case| case.held_out.iter().map(|(shape, _)| shape));
    can_hold(&config.target, config.cases.iter().map(|case| &case.problem), held_out)
}

fn can_hold<'a>(
    target: &Target,
    problems: impl Iterator<Item = &'a Shape>,
    held_out: impl Iterator<Item = &'a Shape>,
) -> Result<(), SetupError> {
    let most = most(target);
    let problems = problems.map(|shape| ("problem", shape));
    let mut shapes = problems.chain(held_out.map(|shape| ("held_out", shape)));
    shapes.find(|(_, shape)| bytes(shape) > most).map_or(Ok(()), |(argument, shape)| {
        let [needed, most] = [bytes(shape), most].map(|bytes| bytes as f64 / 1e9);
        Err(SetupError::Memory { argument, problem: shape.to_string(), needed, times: copies(target), most })
    })
}

const fn copies(target: &Target) -> u64 {
    match target {
        Target::Cpu | Target::Cuda { .. } => COPIES,
        Target::Model { .. } => COPIES_EMULATED,
    }
}

/// Maximum size of a problem's tensors, bytes: the memory that an evaluation may hold divided by the number
/// of copies.
fn most(target: &Target) -> u64 {
    evaluation_memory() / copies(target)
}

/// Size of a problem's tensors, bytes.
fn bytes(shape: &Shape) -> u64 {
    let problem = shape.problem();
    let bytes = |tensor| {
        let element = problem.dtypes.of(tensor).bytes() as u64;
        problem.extents(tensor).iter().fold(element, |all, &n| all.saturating_mul(n as u64))
    };
    Tensor::FORWARD.into_iter().fold(0u64, |all, tensor| all.saturating_add(bytes(tensor)))
}

/// The shapes without duplicates, in order.
fn distinct(shapes: Vec<Shape>) -> Vec<Shape> {
    let mut found = Vec::new();
    for shape in shapes {
        if !found.contains(&shape) {
            found.push(shape);
        }
    }
    found
}

/// The run to resume: the one with this number, or the latest unfinished one. `None` when there is none.
///
/// # Errors
/// When the ledger cannot be read.
pub fn which(ledger: &Ledger, number: Option<i64>) -> Result<Option<RunId>, LedgerError> {
    let mut runs = ledger.runs()?.into_iter();
    let found = runs.find(|line| match number {
        Some(number) => line.id.0 == number,
        None => !matches!(line.last, Some((_, RunEvent::Finished))),
    });
    Ok(found.map(|line| line.id))
}

/// The configuration of a stored run.
///
/// # Errors
/// When there is no such run, or its configuration cannot be read.
pub fn kept(ledger: &Ledger, run: RunId) -> Result<Config, EvolveError> {
    serde_json::from_value(ledger.run(run)?.config).map_err(|error| EvolveError::Config { run: run.0, error })
}

/// Checks that a run is resumed in the environment in which it was begun: all figures of a run belong to one
/// program on one device with one driver. A finished run measures nothing more, so its report can be made in
/// any environment.
///
/// # Errors
/// When they differ (the error names the differences), or the ledger cannot be read.
pub fn same(
    ledger: &Ledger,
    run: RunId,
    environment: &Environment,
    program: Option<&str>,
) -> Result<(), SetupError> {
    if ledger.events(run)?.last().is_some_and(|(_, event)| *event == RunEvent::Finished) {
        return Ok(());
    }
    let begun = ledger.run(run)?;
    let (then, known) = (&begun.environment, |commit: &Option<String>| {
        commit.clone().unwrap_or_else(|| "unknown".to_owned())
    });
    let parts = [
        ("device", then.device.clone(), environment.device.clone()),
        ("driver", then.driver.clone(), environment.driver.clone()),
        ("compiler", then.compiler.clone(), environment.compiler.clone()),
        ("commit", known(&then.commit), known(&environment.commit)),
    ];
    let differ = parts.into_iter().filter(|(_, then, now)| then != now);
    let mut what: Vec<String> =
        differ.map(|(part, then, now)| format!("its {part} is {then}, and here it is {now}")).collect();
    // Without a program name, the commit alone identifies the program.
    if begun.config["program"].as_str().is_some_and(|begun| program != Some(begun)) {
        what.push("its program is another build".to_owned());
    }
    match what.is_empty() {
        true => Ok(()),
        false => Err(SetupError::Changed { run: run.0, what: what.join(", ") }),
    }
}

/// The target of a device with predicted times; `None` when the time model's table has no such machine.
pub fn model_named(name: &str) -> Option<(Target, &'static Gpu)> {
    let gpu = Gpu::named(name)?;
    Some((Target::Model { machine: plain(gpu) }, gpu))
}

/// The names that [`model_named`] accepts.
pub fn models() -> String {
    machine::MACHINES.map(plain).join(", ")
}

/// A machine's name in targets: `rtx4090`.
fn plain(gpu: &Gpu) -> String {
    gpu.name.to_lowercase().replace(' ', "")
}

#[cfg(test)]
mod tests {
    use problem::Problem;
    use serde_json::json;

    use super::*;
    use crate::workers::WorkerProgram;
    use host::store::Scratch;
    use ledger::Run;

    /// A run must not mix figures of two builds or drivers.
    #[test]
    fn a_run_goes_on_with_what_began_it() {
        let folder = Scratch::new().unwrap();
        let ledger = Ledger::open(&folder.path("ledger")).unwrap();
        let own = Environment {
            device: "L4".into(),
            driver: "570".into(),
            compiler: "ptxas 13".into(),
            commit: Some("a".into()),
        };
        let run = Run {
            device: "L4".into(),
            config: json!({ "program": "this" }),
            environment: own.clone(),
            price_per_hour: None,
        };
        let run = ledger.begin_run(&run).unwrap();
        same(&ledger, run, &own, Some("this")).unwrap();
        let other = Environment { driver: "580".into(), commit: None, ..own.clone() };
        let said = same(&ledger, run, &other, Some("that")).unwrap_err().to_string();
        for words in ["its driver is 570, and here it is 580", "its commit is a, and here it is unknown"] {
            assert!(said.contains(words), "{said}");
        }
        assert!(said.contains("its program is another build"), "{said}");
        ledger.event(run, RunEvent::Finished).unwrap();
        same(&ledger, run, &other, Some("that")).unwrap();
    }

    fn wanted() -> Wanted {
        let mission = Shape::of(&Problem::mission());
        Wanted {
            problems: vec![mission, mission],
            held_out: None,
            only: None,
            candidates: None,
            minutes: None,
            seed: 7,
            configuration: Configuration::Full,
            random_share: 0.25,
            families: Vec::new(),
            proposer: None,
            early_stop: true,
            peer_us: None,
        }
    }

    #[test]
    fn a_problem_counts_once_and_there_is_a_budget() {
        let config = config(None, Target::Cpu, "any", None, wanted()).unwrap();
        assert_eq!((config.cases.len(), config.cases[0].draws), (1, 0));
        assert_eq!((config.seconds, config.candidates, config.seed), (Some(120.0), None, 7));
        let by_number = Wanted { candidates: Some(40), ..wanted() };
        let config = super::config(None, Target::Cpu, "any", None, by_number).unwrap();
        assert_eq!((config.seconds, config.candidates), (None, Some(40)));
    }

    #[test]
    fn what_cannot_be_had_is_refused_before_the_run() {
        let shape = |seq, dim| Shape::of(&Problem::new(1, 1, seq, dim, problem::DType::F16));
        let on = |name: &str, wanted: Wanted| {
            let (target, gpu) = model_named(name).unwrap();
            let arch = if name == "l4" { Arch::SM_89 } else { Arch::SM_90 };
            config(None, target, gpu.name, Some(arch), wanted).map_err(|error| error.to_string())
        };
        let odd = Wanted { held_out: Some(vec![shape(64, 600)]), ..wanted() };
        let said = on("h200", odd).unwrap_err();
        assert!(said.contains("'1,1,64,600,f16' for held_out: expected a problem"), "{said}");
        let searched = Wanted { held_out: Some(vec![Shape::of(&Problem::mission())]), ..wanted() };
        assert!(on("h200", searched).unwrap_err().contains("does not search itself"));
        let other = Wanted { held_out: Some(vec![shape(64, 64)]), ..wanted() };
        assert_eq!(on("h200", other).unwrap().cases[0].held_out.len(), 1);
        let family = |name: &str| Wanted { families: vec![name.to_owned()], ..wanted() };
        let said = on("l4", family("wgmma")).unwrap_err();
        assert_eq!(said, "invalid value 'wgmma' for family: expected mma");
        assert!(on("h200", family("wgmma")).is_ok() && on("l4", family("mma")).is_ok());
        let said = config(None, Target::Cpu, "any", None, family("mma")).unwrap_err().to_string();
        assert!(said.contains("'mma' for family") && said.contains("none with device cpu"), "{said}");
    }

    #[test]
    fn a_problem_that_this_machine_cannot_hold_is_no_run() {
        let of = |seq| Shape::of(&Problem::new(1, 8, seq, 64, problem::DType::F16));
        let begin = |problems, held_out| {
            config(None, Target::Cpu, "any", None, Wanted { problems, held_out, ..wanted() })
        };
        let (huge, small) = (of(1 << 40), of(64));
        for (problems, held_out, argument) in
            [(vec![huge], None, "problem"), (vec![small], Some(vec![huge]), "held_out")]
        {
            let refused = begin(problems, held_out).unwrap_err();
            assert!(matches!(refused, SetupError::Memory { .. }), "{refused}");
            let words = format!("invalid value '1,8,1099511627776,64,f16' for {argument}: expected tensors");
            assert!(refused.to_string().starts_with(&words), "{refused}");
        }
        // The largest problem that fits; its neighbour of twice the length does not.
        let (target, gpu) = model_named("h200").unwrap();
        let longest = (most(&target) / bytes(&of(1))) as usize;
        let wanted = Wanted { problems: vec![of(longest)], ..wanted() };
        let mut kept = config(None, target, gpu.name, Some(Arch::SM_90), wanted).unwrap();
        assert_eq!(kept.cases[0].held_out.len(), 1);
        affordable(&kept).unwrap();
        kept.cases[0].problem = of(longest + 1);
        assert!(matches!(affordable(&kept), Err(SetupError::Memory { .. })));
    }

    /// A problem that the setup accepts must not end its worker.
    #[test]
    fn a_worker_may_hold_what_the_setup_accepts() {
        let limit = WorkerProgram::of_this(&[]).unwrap().memory;
        for target in [Target::Cpu, Target::Cuda { ordinal: 0 }, model_named("h200").unwrap().0] {
            let needed = most(&target) * copies(&target);
            assert!(needed <= limit, "{target:?}: {needed} > {limit}");
        }
    }

    #[test]
    fn the_latest_run_that_did_not_end_goes_on() {
        let folder = Scratch::new().unwrap();
        let ledger = Ledger::open(&folder.path("flashcore.ledger")).unwrap();
        assert_eq!(which(&ledger, None).unwrap(), None);
        let begin = || {
            let run = Run {
                device: "any".into(),
                config: json!({}),
                environment: Environment::default(),
                price_per_hour: None,
            };
            ledger.begin_run(&run).unwrap()
        };
        let (first, second) = (begin(), begin());
        assert_eq!(which(&ledger, None).unwrap(), Some(second));
        ledger.event(second, RunEvent::Finished).unwrap();
        assert_eq!(which(&ledger, None).unwrap(), Some(first));
        assert_eq!(which(&ledger, Some(second.0)).unwrap(), Some(second));
        assert_eq!(which(&ledger, Some(9)).unwrap(), None);
        assert!(matches!(kept(&ledger, first), Err(EvolveError::Config { run: 1, .. })));
    }

    #[test]
    fn machines_have_names_without_spaces() {
        let (target, gpu) = model_named("RTX 4090").unwrap();
        assert_eq!((target, gpu.name), (Target::Model { machine: "rtx4090".into() }, "RTX 4090"));
        assert!(model_named("h300").is_none() && models().starts_with("h200, "));
    }
}
