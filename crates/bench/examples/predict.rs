//! Predicts the default plan of every problem of a suite for a machine that need not be available: `predict
//! ROWS.jsonl MACHINE SUITE`. Prints one line per problem. A build of `cargo xtask evidence` also appends one
//! row per problem with the mode `predicted`. Tables show these rows next to measurements of other machines.

use std::path::Path;
use std::process::ExitCode;

use check::forecast::of_plan;
use flashcore_bench::problem_json;
use flashcore_bench::provenance::Provenance;
use flashcore_bench::suites::Suite;
use host::store::append_line;
use kernels::{Arch, Plan};
use predict::Gpu;
use predict::resources::Ptxas;
use problem::Problem;
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let [rows, machine, suite] = words[..] else {
        eprintln!("usage: predict ROWS.jsonl MACHINE SUITE");
        return ExitCode::from(3);
    };
    match run(Path::new(rows), machine, suite) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn run(rows: &Path, machine: &str, suite: &str) -> Result<(), Failure> {
    let gpu = Gpu::named(machine).ok_or_else(|| format!("no machine is called {machine}"))?;
    let arch = Arch::of(gpu.sm).ok_or_else(|| format!("sm_{} is not a target of the kernels", gpu.sm))?;
    let known = Suite::named(suite).ok_or_else(|| format!("no suite is called {suite}"))?;
    let here = Provenance::of_cpu(Path::new("."), 1);
    let driver = "none: predicted".into();
    let provenance = Provenance { device: gpu.name.into(), driver, clocks_mhz: gpu.clock_mhz, ..here };
    for p in known.problems() {
        let mut row = predicted(&p, known, gpu, &arch)?;
        let (shape, mask) =
            (format!("B{} H{} S{} D{}", p.batch, p.heads_q, p.seq_q, p.head_dim), p.band.to_string());
        println!(
            "{shape:20} mask {mask:6} {:10.1} µs {:6.1} TFLOP/s",
            float(&row["us_median"]),
            float(&row["tflops"])
        );
        if let (Value::Object(row), Value::Object(part)) = (&mut row, json!(provenance)) {
            row.extend(part);
        }
        if provenance.commit.is_some() {
            append_line(rows, &row.to_string())?;
        }
    }
    Ok(())
}

fn float(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

/// The row of a problem with its default plan.
fn predicted(problem: &Problem, suite: Suite, gpu: &Gpu, arch: &Arch) -> Result<Value, Failure> {
    let plan = Plan::default_for(problem, arch)?;
    let ptxas = Ptxas::find().ok();
    let p = of_plan(&plan, problem, gpu, arch, ptxas.as_ref())?;
    Ok(json!({
        "suite": suite.name(), "impl": "flashcore", "mode": "predicted", "plan": plan, "problem": problem_json(problem),
        "us_median": p.us, "us_low": p.us_low, "us_high": p.us_high, "bound": p.bound,
        "tflops": problem.flops() / p.us / 1e6, "resources": if ptxas.is_some() { "ptxas" } else { "estimate" },
    }))
}
