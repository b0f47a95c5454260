//! Forecasts every rung and many plans of the fused family, then times them on the GPU:
//! `forecast ROWS.jsonl`. Prints one line per kernel, and at the end the quality of the forecasts for the
//! test plans and the rungs. A build of `cargo xtask evidence` also appends one row per kernel to the file.
//! `forecast --model MACHINE` forecasts without a GPU.
//!
//! A kernel that fails may break the GPU's context. Another process of this program therefore measures. If
//! that process ends early, the next one continues after the kernel that ended it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use bench::provenance::Provenance;
use bench::{median, problem_json};
use check::forecast::{Fit, RECORDED, trials};
use check::gate::contents;
use check::launchfile::Bound;
use check::study::{forecast_steps, record};
use climb::rungs;
use driver::{DriverError, Gpu};
use host::store::append_line;
use kernels::{Arch, Plan};
use predict::Prediction;
use predict::machine::MACHINES;
use predict::resources::{Ptxas, ResourceSource, Resources, estimate};
use problem::{DType, Problem};
use ptx::Machine;
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::{Outcome, Usage, with};

/// Approximate time between two events, µs; `ROUNDS` is the number of samples.
const SPAN: f64 = 2000.0;
const ROUNDS: usize = 7;

type Failure = Box<dyn std::error::Error>;

pub fn main(args: &[String]) -> Outcome {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["--model", machine] => model_only(machine)?,
        ["--measure", rows, from] if from.parse::<usize>().is_ok() => {
            measure(Path::new(rows), from.parse().unwrap_or(0))?
        }
        [rows] if !rows.starts_with('-') => run(rows)?,
        _ => return Err(Usage.into()),
    }
    Ok(true)
}

/// The group of a kernel in the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    Rung,
    Calibration,
    Test,
}

/// A kernel to forecast and to time.
struct Subject {
    part: Part,
    name: String,
    problem: Problem,
    plan: Value,
    head: Bound,
    whole: Bound,
}

/// The rungs with 8 heads, and the trials.
fn subjects(arch: &Arch) -> Result<Vec<Subject>, Failure> {
    let problem = Problem::new(1, 8, 512, 64, DType::F16);
    let mut subjects = Vec::new();
    for rung in rungs(&problem, arch)? {
        let plan = json!({ "family": "ladder", "rung": rung.name });
        let problem = Problem { dtypes: rung.dtypes(&problem), ..problem.clone() };
        let (name, head, whole) = (rung.name, rung.head, rung.whole);
        subjects.push(Subject { part: Part::Rung, name, problem, plan, head, whole });
    }
    for trial in trials(arch) {
        let p = &trial.problem;
        let mask = if p.band.is_causal() { format!(" {}", p.band) } else { String::new() };
        let shape = format!("B{} H{} S{} D{}{mask}", p.batch, p.heads_q, p.seq_q, p.head_dim);
        let [head, whole] = trial.kernels(arch)?;
        subjects.push(Subject {
            part: if trial.calibration { Part::Calibration } else { Part::Test },
            name: format!("{shape}, {}", trial.name),
            plan: json!(Plan::Mma(trial.plan)),
            problem: trial.problem,
            head,
            whole,
        });
    }
    Ok(subjects)
}

/// Forecasts from a few recorded CTAs of one head, all kernels in parallel.
fn forecasts(
    subjects: &[Subject],
    resources: &[Option<Resources>],
    gpu: &predict::Gpu,
) -> Vec<Option<Prediction>> {
    subjects
        .par_iter()
        .zip(resources)
        .map(|(s, resources)| {
            let recorded = record(&s.head, RECORDED).ok()?;
            let resources = std::slice::from_ref(resources.as_ref()?);
            Prediction::in_a_row(&forecast_steps(&s.head, &s.whole, &recorded, resources, gpu).ok()?)
        })
        .collect()
}

fn model_only(machine: &str) -> Result<(), Failure> {
    let gpu = predict::Gpu::named(machine).ok_or_else(|| format!("no machine is called {machine}"))?;
    let arch = Arch::of(gpu.sm).ok_or_else(|| format!("sm_{} is not a target of the kernels", gpu.sm))?;
    let subjects = subjects(&arch)?;
    let ptxas = Ptxas::find().ok();
    let resources: Vec<Option<Resources>> = subjects
        .par_iter()
        .map(|s| {
            let (module, entry) = (&s.whole.kernel.module, &s.whole.kernel.entry);
            let assembled =
                ptxas.as_ref().map(|p| p.resources(&module.to_string(), &format!("sm_{}", gpu.sm), entry));
            assembled.and_then(Result::ok).or_else(|| estimate(module, entry))
        })
        .collect();
    for (s, p) in subjects.iter().zip(forecasts(&subjects, &resources, gpu)) {
        let p = p.map_or_else(|| "none".to_owned(), |p| format!("{:.1} µs, {:?}", p.us, p.bound));
        println!("{:48} {p}", s.name);
    }
    Ok(())
}

/// The line for one measured kernel, which the measuring process sends to its parent.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Line {
    index: usize,
    part: Part,
    name: String,
    /// Measured time, µs, or why there is none.
    us: Result<f64, String>,
    forecast: Option<f64>,
}

impl Line {
    fn print(&self) {
        match (&self.us, self.forecast) {
            (Ok(us), Some(f)) => {
                println!("{:48} {us:9.1} µs, forecast {f:9.1}, {:.2} of it", self.name, f / us)
            }
            (Ok(us), None) => println!("{:48} {us:9.1} µs, no forecast", self.name),
            (Err(error), _) => println!("{:48} failed: {error}", self.name),
        }
    }
}

/// Has all kernels measured, and scores the forecasts.
fn run(rows: &str) -> Result<(), Failure> {
    let start = Instant::now();
    let mut pairs: Vec<(Part, f64, f64)> = Vec::new();
    let mut next = Some(0);
    while let Some(from) = next {
        let lines = measured_elsewhere(rows, from)?;
        pairs.extend(lines.iter().filter_map(|l| Some((l.part, l.forecast?, *l.us.as_ref().ok()?))));
        // When a kernel ended the process, its line is the last one.
        next = lines.last().filter(|l| l.us.is_err()).map(|l| l.index + 1);
    }
    for (what, parts) in [
        ("test plans", &[Part::Test][..]),
        ("rungs", &[Part::Rung]),
        ("rungs and test plans", &[Part::Rung, Part::Test]),
        ("calibration plans", &[Part::Calibration]),
    ] {
        let chosen: Vec<(f64, f64)> =
            pairs.iter().filter(|p| parts.contains(&p.0)).map(|p| (p.1, p.2)).collect();
        let fit = Fit::of(&chosen);
        let error = 100.0 * fit.median_error;
        println!("{what}: {} kernels, Spearman {:.3}, median error {error:.0} %", fit.count, fit.spearman);
    }
    println!("{:.0} s in all", start.elapsed().as_secs_f64());
    Ok(())
}

/// Starts a process that measures from kernel `from` on, and prints its lines.
fn measured_elsewhere(rows: &str, from: usize) -> Result<Vec<Line>, Failure> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["forecast", "--measure", rows, &from.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = Vec::new();
    for text in BufReader::new(child.stdout.take().ok_or("no pipe")?).lines() {
        let line: Line = serde_json::from_str(&text?)?;
        line.print();
        lines.push(line);
    }
    let status = child.wait()?;
    let ended_by_kernel = lines.last().is_some_and(|l: &Line| l.us.is_err());
    if status.success() || ended_by_kernel { Ok(lines) } else { Err(format!("measuring: {status}").into()) }
}

/// Measures from kernel `from` on, one JSON line each, until the end or the first kernel that breaks the
/// context.
fn measure(rows: &Path, from: usize) -> Result<(), Failure> {
    let start = Instant::now();
    let mut gpu = Gpu::open(0)?;
    let provenance = Provenance::of_gpu(gpu.info());
    let (major, minor) = gpu.info().capability;
    let arch = Arch::of(major * 10 + minor).ok_or("the device is not a target of the kernels")?;
    let known = MACHINES.into_iter().find(|m| gpu.info().name.split(' ').any(|word| word == m.name));
    let known = known.ok_or_else(|| format!("the model does not know {}", gpu.info().name))?;
    let subjects: Vec<Subject> = subjects(&arch)?.into_iter().skip(from).collect();
    let resources: Vec<Option<Resources>> = subjects.iter().map(|s| loaded(&mut gpu, s).ok()).collect();
    eprintln!("{} kernels compiled after {:.0} s", subjects.len(), start.elapsed().as_secs_f64());
    let forecasts = forecasts(&subjects, &resources, known);
    eprintln!("forecast for {} after {:.0} s", known.name, start.elapsed().as_secs_f64());
    for (i, ((s, p), resources)) in subjects.iter().zip(&forecasts).zip(&resources).enumerate() {
        let times = time(&mut gpu, s);
        let line = Line {
            index: from + i,
            part: s.part,
            name: s.name.clone(),
            us: times.as_ref().map(|t| median(t)).map_err(ToString::to_string),
            forecast: p.as_ref().map(|p| p.us),
        };
        println!("{}", serde_json::to_string(&line)?);
        let times = match times {
            Ok(times) => times,
            Err(error) if matches!(error.downcast_ref(), Some(DriverError::Poisoned { .. })) => break,
            Err(_) => continue,
        };
        if let (Some(p), Some(resources), Some(_)) = (p, resources, &provenance.commit) {
            append_line(rows, &row(s, p, resources, &times, &provenance).to_string())?;
        }
    }
    Ok(())
}

/// The resources of the kernel as the driver compiled it. Local memory beyond the kernel's own arrays is
/// spilled registers, each stored and loaded at least once.
fn loaded(gpu: &mut Gpu, s: &Subject) -> Result<Resources, Failure> {
    let kernel = &s.whole.kernel;
    let own = estimate(&kernel.module, &kernel.entry).ok_or("the kernel has no body")?;
    let arrays = own.stack - own.spill_stores;
    let got = gpu.load(kernel)?;
    let spilled = got.local.saturating_sub(arrays);
    Ok(Resources {
        registers: got.registers,
        spill_stores: spilled,
        spill_loads: spilled,
        stack: got.local,
        shared: got.shared,
        source: ResourceSource::Ptxas("driver".to_owned()),
    })
}

/// Mean times of a launch, µs, warm, repeated several times.
fn time(gpu: &mut Gpu, s: &Subject) -> Result<Vec<f64>, Failure> {
    let mut buffers = Vec::new();
    for data in contents(&s.whole, 1) {
        let mut buffer = gpu.allocate(data.len())?;
        gpu.upload(&mut buffer, &data)?;
        buffers.push(buffer);
    }
    let mut handles: Vec<&mut driver::Buffer> = buffers.iter_mut().collect();
    let mut time = |launches: u32| -> Result<f64, Failure> {
        s.whole.steps().map(|kernel| Ok(gpu.time(kernel, &mut handles, launches)?)).sum()
    };
    let once = time(3)?;
    let launches = (SPAN / once.max(1.0)).clamp(3.0, 200.0) as u32;
    (0..ROUNDS).map(|_| time(launches)).collect()
}

/// The evidence row: all times, and the forecast that preceded them.
fn row(s: &Subject, p: &Prediction, resources: &Resources, times: &[f64], provenance: &Provenance) -> Value {
    let row = json!({
        "suite": "model", "impl": "flashcore", "kernel": s.name, "part": s.part, "plan": s.plan,
        "problem": problem_json(&s.problem), "us": median(times), "all_us": times, "timer": "events, warm",
        "forecast_us": [p.us_low, p.us, p.us_high], "bound": p.bound,
        "registers": resources.registers, "local_bytes": resources.stack,
    });
    with(row, provenance)
}
