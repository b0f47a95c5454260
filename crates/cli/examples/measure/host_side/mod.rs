//! Measures the host's side on a GPU machine: `host ROWS.jsonl`. It times the creation of the context, the
//! first result with a cold and a warm cache of cubins, loading a kernel of each family, and a call. It
//! checks results, streams, graphs, memory, threads, the cache and the behaviour after a kernel's fault. Each
//! part runs in its own process with a time limit, so that nothing is warm that should be cold, and a failing
//! part does not affect the others. One line per check and a table are printed, everything goes to
//! `ROWS.log`, and a build of `cargo xtask evidence` appends a row for each measurement.

mod checks;
mod cost;
mod loads;
mod parts;
mod streams;
mod tensors;

use std::error::Error;
use std::path::Path;

use bench::problem_json;
use bench::provenance::Provenance;
use host::store::append_line;
use problem::Problem;
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
        println!("{}", line(measure));
        if provenance.commit.is_some() {
            append_line(rows, &row(measure, &provenance).to_string())?;
        }
    }
    let failed = found.failed.len();
    println!("{} checks passed, {failed} failed; details in {}", found.passed, log.display());
    if provenance.commit.is_some() {
        let checks = json!({
            "measure": "checks", "passed": found.passed, "failed": found.failed.len(), "failures": found.failed,
        });
        append_line(rows, &row(&checks, &provenance).to_string())?;
    }
    Ok(found.failed.is_empty())
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
fn row(measure: &Value, provenance: &Provenance) -> Value {
    let row = json!({ "suite": "host", "impl": "flashcore", "problem": problem_json(&Problem::mission()) });
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
