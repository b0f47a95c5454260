//! Measures the host's side on a GPU machine: `host ROWS.jsonl`. It times the creation of the context, the
//! first result with a cold and a warm cache of cubins, loading a kernel of each family, and a call. It
//! checks results, streams, graphs, memory, threads, the cache and the behaviour after a kernel's fault. Each
//! part runs in its own process with a time limit, so that nothing is warm that should be cold, and a failing
//! part does not affect the others. One line per check and a table are printed, everything goes to
//! `ROWS.log`, and a build of `cargo xtask evidence` appends a row for each measurement.
//!
//! `host ROWS.jsonl PROGRAM …` runs a program that calls FlashCore through another interface, such as
//! `crates/capi/examples/overhead.c`, and appends a row for each measurement that the program prints.

mod checks;
mod cost;
mod loads;
mod parts;
mod streams;
mod tensors;

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};

use bench::problem_json;
use bench::provenance::Provenance;
use host::store::append_line;
use problem::{Band, DType, Problem};
use serde_json::{Value, json};

use crate::{Usage, with};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The argument that makes this program a child process.
const CHILD: &str = "--part";
/// Names of the loading parts: `compiled:NAME`, and `cached:NAME` afterwards.
const COMPILED: &str = "compiled";
const CACHED: &str = "cached";

pub fn main(args: &[String]) -> crate::Outcome {
    let outcome = match args {
        [flag, part] if flag == CHILD => child(part),
        [rows] => run(Path::new(rows)),
        [rows, program, args @ ..] => door(Path::new(rows), program, args),
        _ => return Err(Usage.into()),
    };
    outcome.inspect_err(|error| println!("FAIL {error}"))
}

/// Runs one part in this process.
fn child(part: &str) -> Outcome<bool> {
    if let Some((when, family)) = part.split_once(':') {
        loads::load(family, when == CACHED)?;
        return Ok(true);
    }
    match part {
        "first" => cost::first()?,
        "calls" => cost::calls()?,
        "numbers" => checks::numbers()?,
        "interface" => checks::interface()?,
        "refusals" => checks::refusals()?,
        "streams" => streams::all()?,
        "fault" => checks::fault()?,
        other => return Err(format!("no part {other}").into()),
    }
    Ok(true)
}

/// Runs all parts. Returns whether all checks passed.
fn run(rows: &Path) -> Outcome<bool> {
    let devices = driver::devices()?;
    let device = devices.first().ok_or("the driver sees no device")?;
    let provenance = Provenance::of_gpu(device);
    println!("{}, driver {}", device.name, device.compiler());
    let mut found = parts::Found::default();
    let log = rows.with_extension("log");
    parts::all(&mut found, &log)?;
    println!();
    for measure in &found.measures {
        keep(rows, &Problem::mission(), measure, &provenance)?;
    }
    let failed = found.failed.len();
    println!("{} checks passed, {failed} failed; details in {}", found.passed, log.display());
    if provenance.commit.is_some() {
        let checks = json!({
            "measure": "checks", "passed": found.passed, "failed": found.failed.len(), "failures": found.failed,
        });
        append_line(rows, &row(&Problem::mission(), &checks, &provenance).to_string())?;
    }
    Ok(found.failed.is_empty())
}

/// Runs a program that measures calls through another interface, of the smallest problem.
fn door(rows: &Path, program: &str, args: &[String]) -> Outcome<bool> {
    let devices = driver::devices()?;
    let provenance = Provenance::of_gpu(devices.first().ok_or("the driver sees no device")?);
    let problem = Problem::new(1, 8, 1, 64, DType::F16).with_band(Band::CAUSAL);
    let output = Command::new(program).args(args).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8(output.stdout)?;
    for line in text.lines() {
        match line.strip_prefix(parts::MEASURE) {
            Some(measure) => keep(rows, &problem, &serde_json::from_str(measure)?, &provenance)?,
            None => println!("{line}"),
        }
    }
    Ok(output.status.success())
}

/// Prints a measurement, and appends its row if the commit is known.
fn keep(rows: &Path, problem: &Problem, measure: &Value, provenance: &Provenance) -> Outcome {
    println!("{}", line(measure));
    if provenance.commit.is_some() {
        append_line(rows, &row(problem, measure, provenance).to_string())?;
    }
    Ok(())
}

fn line(measure: &Value) -> String {
    let text = |field: &str| measure[field].as_str().unwrap_or("").to_owned();
    let number = |field: &str| measure[field].as_f64().unwrap_or(f64::NAN);
    format!(
        "{:44} median {:9.3} {}  worst {:9.3}",
        text("measure"),
        number("median"),
        text("unit"),
        number("p99")
    )
}

/// The evidence row: the measurement with its provenance.
fn row(problem: &Problem, measure: &Value, provenance: &Provenance) -> Value {
    let row = json!({ "suite": "host", "impl": "flashcore", "problem": problem_json(problem) });
    with(with(row, measure), provenance)
}

/// Prints a check's verdict.
fn tell(name: &str, outcome: Outcome<String>) {
    match outcome {
        Ok(detail) => println!("PASS {name}{}{detail}", if detail.is_empty() { "" } else { ": " }),
        Err(error) => println!("FAIL {name}: {error}"),
    }
}

/// Fails with `words` unless `holds`.
fn ensure(holds: bool, words: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(words().into()) }
}
