//! The command `flashcore plans`: manages the plans of the CPU kernels that are kept in the user's
//! configuration folder.

use std::path::{Path, PathBuf};

use bench::provenance::iso8601_now;
use bench::{BenchError, Comparison, LoadMeter, RaceInputs, SpeedVerdict, race_plans};
use cpu::CpuPlan;
use cpu::kept::{KeptPlan, KeptPlans, Line, processor};
use host::store;
use serde_json::{Value, json};

use crate::args::{PlansAdd, PlansCheck, PlansClear, PlansCommand, PlansList};
use crate::error::CliError;
use crate::terminal::{self, fault, tell};
use crate::{Status, choice, plan, table, unless_closed};

pub fn plans(command: &PlansCommand) -> Result<Status, CliError> {
    match command {
        PlansCommand::List(args) => list(args),
        PlansCommand::Add(args) => add(args),
        PlansCommand::Check(args) => check(args),
        PlansCommand::Clear(args) => clear(args),
    }
}

/// The file of saved plans.
fn file() -> Result<PathBuf, CliError> {
    KeptPlans::file().ok_or(CliError::NoConfigFolder)
}

fn read(file: &Path) -> Result<KeptPlans, CliError> {
    KeptPlans::read(file).map_err(|source| CliError::Read { path: file.to_path_buf(), source })
}

fn write(file: &Path, plans: &KeptPlans) -> Result<(), CliError> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let failed = |source| CliError::Write { path: folder.to_path_buf(), source };
    std::fs::create_dir_all(folder).map_err(failed)?;
    Ok(store::write(file, plans.text().as_bytes())?)
}

/// Adds a plan to the file, and returns the file.
pub fn keep(plan: KeptPlan) -> Result<PathBuf, CliError> {
    let file = file()?;
    let mut plans = read(&file)?;
    plans.put(plan).map_err(|why| CliError::Argument {
        argument: "plan",
        value: "the promoted one".to_owned(),
        accepted: why,
    })?;
    write(&file, &plans)?;
    Ok(file)
}

/// Whether calls on this machine use a line's plan, and if not, why.
fn use_of(line: &Line) -> String {
    match &line.plan {
        Err(why) => format!("no: line {} of the file: {why}", line.number),
        Ok(kept) if kept.processor != processor() => "no: another processor".to_owned(),
        Ok(kept) => match kept.plan.check(&kept.problem.problem()) {
            Err(why) => format!("no: {why}"),
            Ok(()) if kept.threads != cpu::threads() => {
                format!("with {} threads; calls have {} here", kept.threads, cpu::threads())
            }
            Ok(()) => "yes".to_owned(),
        },
    }
}

fn list(args: &PlansList) -> Result<Status, CliError> {
    let file = file()?;
    let plans = read(&file)?;
    let mut out = terminal::out();
    if args.json {
        let row = |line: &Line| {
            let mut row = line.plan.as_ref().map_or(json!({}), |kept| json!(kept));
            row["used"] = json!(use_of(line));
            row
        };
        let rows: Vec<Value> = plans.lines().iter().map(row).collect();
        let object =
            json!({ "file": file, "processor": processor(), "threads": cpu::threads(), "rows": rows });
        unless_closed(out.json("plans", &object).map_err(CliError::from))?;
        return Ok(Status::Passed);
    }
    let rows: Vec<Vec<String>> = plans.lines().iter().map(cells).collect();
    if rows.is_empty() {
        tell(format_args!("no plans are kept in {}", file.display()));
        return Ok(Status::Passed);
    }
    let header = ["problem", "threads", "speed-up", "used here", "from", "processor", "plan"];
    unless_closed(table::print(&mut out, &header, &rows).map_err(CliError::from))?;
    tell(format_args!("from {}", file.display()));
    Ok(Status::Passed)
}

fn cells(line: &Line) -> Vec<String> {
    let dash = || "–".to_owned();
    let used = use_of(line);
    let Ok(kept) = &line.plan else { return vec![dash(), dash(), dash(), used, dash(), dash(), dash()] };
    vec![
        kept.problem.to_string(),
        kept.threads.to_string(),
        kept.speedup.map_or_else(dash, |ratio| format!("{ratio:.3}×")),
        used,
        format!("{}, {}", kept.source, kept.when),
        kept.processor.clone(),
        json!(kept.plan).to_string(),
    ]
}

fn add(args: &PlansAdd) -> Result<Status, CliError> {
    let problem = choice::parse_shape("--problem", &args.problem)?;
    choice::forward("--problem", &args.problem, &problem.problem())?;
    let value = args.plan.display().to_string();
    let plan = plan::native("--plan", &value, &store::read_text(&args.plan)?)?;
    plan.check(&problem.problem())?;
    let threads = args.threads.unwrap_or_else(cpu::threads);
    let kept = KeptPlan {
        processor: processor().to_owned(),
        threads,
        problem,
        plan,
        speedup: None,
        source: "by hand".to_owned(),
        when: iso8601_now(),
    };
    let file = file()?;
    let mut plans = read(&file)?;
    let before = plans.lines().len();
    plans.put(kept).map_err(|why| CliError::Argument {
        argument: "--plan",
        value,
        accepted: format!("a plan that can be kept ({why})"),
    })?;
    write(&file, &plans)?;
    let replaced = before + 1 - plans.lines().len();
    changed(args.json, &file, &plans, json!({ "added": 1, "replaced": replaced, "removed": 0 }))
}

fn clear(args: &PlansClear) -> Result<Status, CliError> {
    let problem = args.problem.as_deref().map(|text| choice::parse_shape("--problem", text)).transpose()?;
    let file = file()?;
    let mut plans = read(&file)?;
    let removed = plans.remove(|line| match (problem, &line.plan) {
        (None, _) => true,
        (Some(problem), Ok(kept)) => kept.problem == problem && kept.processor == processor(),
        (Some(_), Err(_)) => false,
    });
    if removed > 0 {
        write(&file, &plans)?;
    }
    changed(args.json, &file, &plans, json!({ "added": 0, "replaced": 0, "removed": removed }))
}

fn changed(json: bool, file: &Path, plans: &KeptPlans, mut told: Value) -> Result<Status, CliError> {
    let kept = plans.lines().len();
    if json {
        (told["file"], told["kept"]) = (json!(file), json!(kept));
        unless_closed(terminal::out().json("plans-change", &told).map_err(CliError::from))?;
    } else {
        let count = |key: &str| told[key].as_u64().unwrap_or(0);
        let change = match (count("added"), count("replaced"), count("removed")) {
            (0, _, removed) => format!("{removed} removed"),
            (_, 0, _) => "1 added".to_owned(),
            (_, replaced, _) => format!("{replaced} replaced"),
        };
        tell(format_args!("{change}; {} keeps {kept}", file.display()));
    }
    Ok(Status::Passed)
}

/// Races each plan that calls on this machine use against the built-in choice. A race on a busy machine
/// decides nothing.
fn check(args: &PlansCheck) -> Result<Status, CliError> {
    let file = file()?;
    let plans = read(&file)?;
    let used = plans.lines().iter().filter(|line| use_of(line) == "yes");
    let mut rows = Vec::new();
    for kept in used.filter_map(|line| line.plan.as_ref().ok()) {
        let meter = LoadMeter::start();
        let mut race = race(kept, args.seconds)?;
        let words = kept.problem.to_string();
        let busy = meter.read().and_then(|load| load.words());
        if let Some(busy) = &busy {
            race.verdict = SpeedVerdict::Undecided;
            fault(format_args!("{words} is undecided, because this machine was busy: {busy}"));
        }
        rows.push(json!({ "problem": kept.problem, "words": words, "race": race, "busy": busy }));
    }
    let is_slower = |row: &Value| row["race"]["verdict"] == json!(SpeedVerdict::Slower);
    let status = if rows.iter().any(is_slower) { Status::Failed } else { Status::Passed };
    let mut out = terminal::out();
    if args.json {
        unless_closed(out.json("plans-check", &json!({ "rows": rows })).map_err(CliError::from))?;
        return Ok(status);
    }
    let cells = |row: &Value| {
        let figure = |key: &str| row["race"][key].as_f64().unwrap_or(f64::NAN);
        let [ratio, low, high, noise] = ["ratio", "low", "high", "noise"].map(figure);
        vec![
            row["words"].as_str().unwrap_or_default().to_owned(),
            format!("{ratio:.3}×"),
            format!("{low:.3} … {high:.3}"),
            format!("{noise:.3}×"),
            row["race"]["verdict"].as_str().unwrap_or_default().to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    if rows.is_empty() {
        tell(format_args!("{} has no plan that is used on this machine", file.display()));
        return Ok(status);
    }
    let header = ["problem", "over the built-in choice", "interval", "noise", "verdict"];
    unless_closed(table::print(&mut out, &header, &rows).map_err(CliError::from))?;
    Ok(status)
}

/// The race of a saved plan against the built-in choice.
fn race(kept: &KeptPlan, seconds: f64) -> Result<Comparison, CliError> {
    let problem = kept.problem.problem();
    let inputs = RaceInputs::draw(&problem, 1).map_err(BenchError::from)?;
    let built_in = CpuPlan::for_threads(&problem, kept.threads);
    let race = race_plans(&inputs, &[kept.plan, built_in], seconds)?;
    let out = |index: usize| {
        let entrant = race.measurements.get(index)?;
        Some(BenchError::Out { name: entrant.name.clone(), fault: entrant.fault.clone()? })
    };
    match race.measurements.get(1).and_then(|theirs| theirs.comparison) {
        Some(comparison) => Ok(comparison),
        None => Err(out(0).or_else(|| out(1)).unwrap_or(BenchError::Nobody).into()),
    }
}
