//! Times every rung on the GPU next to the time model's forecast: `rungs ROWS.jsonl [HEADS …]`, with the
//! reference problem's shape for each number of heads (default 8). Prints one line per rung, and a build of
//! `cargo xtask evidence` appends a row for each.

use std::path::Path;

use bench::provenance::Provenance;
use bench::{median, problem_json};
use check::gate::{Settings, check_kernel, contents};
use check::study::analyse;
use climb::{Rung, rungs};
use driver::Gpu;
use host::store::append_line;
use kernels::Arch;
use predict::Prediction;
use predict::machine::MACHINES;
use problem::{DType, Problem};
use ptx::Machine;
use serde_json::{Value, json};

use crate::{Outcome, Usage, with};

/// Launches between two events: a few milliseconds of the fastest rung.
const LAUNCHES: u32 = 50;
/// Timings of each rung, in turns with the other rungs.
const ROUNDS: usize = 7;

pub fn main(args: &[String]) -> Outcome {
    let heads: Result<Vec<usize>, _> = args.iter().skip(1).map(|n| n.parse()).collect();
    let (Some(rows), Ok(heads)) = (args.first(), heads) else {
        return Err(Usage.into());
    };
    let heads = if heads.is_empty() { vec![8] } else { heads };
    run(Path::new(rows), &heads).map(|()| true)
}

struct Subject {
    rung: Rung,
    buffers: Vec<driver::Buffer>,
    forecast: Option<Prediction>,
    times: Vec<f64>,
}

fn run(rows: &Path, heads: &[usize]) -> Result<(), Box<dyn std::error::Error>> {
    let mut gpu = Gpu::open(0)?;
    let provenance = Provenance::of_gpu(gpu.info());
    let (major, minor) = gpu.info().capability;
    let sm = major * 10 + minor;
    let arch = Arch::of(sm).ok_or_else(|| format!("sm_{sm} is not a target of the kernels"))?;
    let known = MACHINES.into_iter().find(|m| gpu.info().name.split(' ').any(|word| word == m.name));
    println!("{}: forecasts {}", gpu.info().name, known.map_or("none", |m| m.name));
    for &heads in heads {
        let problem = Problem::new(1, heads, 512, 64, DType::F16);
        let mut subjects = Vec::new();
        for rung in rungs(&problem, &arch)? {
            subjects.push(subject(&mut gpu, rung, known)?);
        }
        for _ in 0..ROUNDS {
            for s in &mut subjects {
                let time =
                    gpu.time(&s.rung.whole.kernel, &mut s.buffers.iter_mut().collect::<Vec<_>>(), LAUNCHES)?;
                s.times.push(time);
            }
        }
        for s in &subjects {
            println!("{}", line(s, heads));
            if provenance.commit.is_some() {
                append_line(rows, &row(s, &problem, &provenance).to_string())?;
            }
        }
    }
    Ok(())
}

/// The rung's kernel with its inputs on the device, and the forecast from a check of one head.
fn subject(
    gpu: &mut Gpu,
    rung: Rung,
    known: Option<&predict::Gpu>,
) -> Result<Subject, Box<dyn std::error::Error>> {
    let mut buffers = Vec::new();
    for data in contents(&rung.whole, 1) {
        let mut buffer = gpu.allocate(data.len())?;
        gpu.upload(&mut buffer, &data)?;
        buffers.push(buffer);
    }
    let machines: Vec<predict::Gpu> = known.into_iter().cloned().collect();
    let check = check_kernel(&rung.head, &Settings::quick().first_run())?;
    let study = analyse(rung.head.clone(), Some(&rung.whole), None, check, &machines, None);
    let forecast = study.prediction().cloned();
    Ok(Subject { rung, buffers, forecast, times: Vec::new() })
}

fn line(s: &Subject, heads: usize) -> String {
    let (time, forecast) = (median(&s.times), s.forecast.as_ref().map(|p| p.us));
    let ratio = forecast.map_or_else(String::new, |f| format!("forecast {f:.0} µs, {:.2} of it", f / time));
    format!("{:20} {heads:3} heads {time:9.1} µs  {ratio}", s.rung.name)
}

/// The evidence row: all times, and the forecast that preceded them.
fn row(s: &Subject, problem: &Problem, provenance: &Provenance) -> Value {
    // A rung on 8-bit inputs has element types of its own.
    let problem = Problem { dtypes: s.rung.dtypes(problem), ..problem.clone() };
    let row = json!({
        "suite": "rungs", "impl": "flashcore", "kernel": s.rung.name, "problem": problem_json(&problem),
        "us": median(&s.times), "all_us": s.times, "launches": LAUNCHES, "timer": "events, warm",
        "forecast_us": s.forecast.as_ref().map(|p| [p.us_low, p.us, p.us_high]),
    });
    with(row, provenance)
}
