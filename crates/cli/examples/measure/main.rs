//! Measures FlashCore itself, for its developers: `cargo xtask measure PROGRAM …`. Without a program it lists
//! the programs, and the top of each file here says what it measures. `cargo xtask evidence` builds it for a
//! GPU machine. Rows are appended only by a build that knows its commit.

mod approx;
mod check_time;
mod emulate;
mod exhaustive;
mod forecast;
mod hopper;
mod host_side;
mod ideas;
mod large_ledger;
mod plans;
mod probes;
mod retrospect;
mod rungs;
mod tensor_cores;
mod tune;

use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};

/// Whether everything that was measured is right.
type Outcome = Result<bool, Box<dyn std::error::Error>>;

/// A program: its name, its arguments, what it measures, and its function.
type Program = (&'static str, &'static str, &'static str, fn(&[String]) -> Outcome);

const PROGRAMS: [Program; 15] = [
    ("approx", "FOLDER [SAMPLES]", "a GPU's approximate instructions", approx::main),
    (
        "check_time",
        "mma|wgmma B,H,S,D | FILE.ptx FILE.toml [quick|runs=N]",
        "a whole check",
        check_time::main,
    ),
    ("emulate", "", "the emulator on the persistent kernel", emulate::main),
    ("exhaustive", "[SECONDS [PROBLEM…]]", "every CPU plan of a bounded space", exhaustive::main),
    ("forecast", "ROWS.jsonl | --model MACHINE", "the time model on rungs and plans", forecast::main),
    (
        "hopper",
        "ROWS.jsonl [--limit SECONDS] PLAN PROBLEM … [PLAN PROBLEM …]",
        "kernels on a GPU",
        hopper::main,
    ),
    ("host", "ROWS.jsonl [PROGRAM …]", "the host's side of a call on a GPU", host_side::main),
    ("ideas", "ROWS.jsonl [--seconds S] [--gene NAME …] PROBLEM …", "the worth of each gene", ideas::main),
    ("large_ledger", "[FILE [CANDIDATES]]", "queries and pages of a large ledger", large_ledger::main),
    (
        "plans",
        "add TABLE.jsonl [ROWS.jsonl …] | regret [--evidence FILE] [ROWS.jsonl …] | factors",
        "plans of random problems",
        plans::main,
    ),
    (
        "probes",
        "ROWS.jsonl [WORD] | --forecast MACHINE | --ptx FOLDER SM",
        "the time model's constants",
        probes::main,
    ),
    ("retrospect", "ROWS.jsonl MACHINE", "forecasts of plans that were timed", retrospect::main),
    ("rungs", "ROWS.jsonl [HEADS …]", "every rung of the ladder", rungs::main),
    (
        "tensor_cores",
        "FRAGMENTS ROWS.jsonl [--widths] [--only NAME] [FIRST]",
        "products, bit for bit",
        tensor_cores::main,
    ),
    (
        "tune",
        "FOLDER [--family NAME …] [--near [--gene NAME …]] [--sweep|--sweep-wide] [--plans FILE] [--limit SECONDS] \
         [--from N] SUITE|PROBLEM|random:SEED:COUNT …",
        "the fastest plans of a GPU",
        tune::main,
    ),
];

/// The arguments are none that the program takes.
#[derive(Debug, thiserror::Error)]
#[error("invalid arguments")]
struct Usage;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let asked = args.first().and_then(|name| PROGRAMS.iter().find(|program| program.0 == name));
    let Some((name, usage, _, main)) = asked else {
        println!("usage: measure PROGRAM …\n");
        for (name, args, what, _) in PROGRAMS {
            println!("{what}:\n    measure {name} {args}");
        }
        let is_asked = args.first().is_some_and(|first| first == "--help");
        return if is_asked { ExitCode::SUCCESS } else { ExitCode::from(3) };
    };
    match main(&args[1..]) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) if error.is::<Usage>() => {
            eprintln!("usage: measure {name} {usage}");
            ExitCode::from(3)
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

/// A row with the fields of another part, such as the provenance.
fn with(mut row: Value, part: &impl Serialize) -> Value {
    if let (Value::Object(row), Value::Object(part)) = (&mut row, json!(part)) {
        row.extend(part);
    }
    row
}
