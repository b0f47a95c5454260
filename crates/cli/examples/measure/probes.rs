//! Measures the constants of the time model and compares each with the model's prediction for the same
//! kernel: `probes ROWS.jsonl [WORD]`; WORD selects the probes with this word in their name. Prints one line
//! per probe, and a build of `cargo xtask evidence` appends a row for each. `probes --forecast MACHINE`
//! prints the predictions without a GPU; `probes --ptx FOLDER SM` writes the kernels.

use std::path::Path;

use bench::median;
use bench::provenance::Provenance;
use calibrate::probes::{Figure, Kind, Probe, all};
use driver::Gpu;
use host::store::append_line;
use predict::machine::MACHINES;
use ptx::{Builder, Dim3, Kernel, Launch, Target};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::{Outcome, Usage, with};

/// Launches of an empty kernel between two events; `ROUNDS` is the number of samples.
const LAUNCHES: u32 = 200;
const ROUNDS: usize = 5;

pub fn main(args: &[String]) -> Outcome {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let failed = match words[..] {
        ["--forecast", machine] => forecasts(machine)?,
        ["--ptx", folder, sm] => write_kernels(Path::new(folder), sm)?,
        [rows] if !rows.starts_with('-') => run(Path::new(rows), "")?,
        [rows, word] if !rows.starts_with('-') => run(Path::new(rows), word)?,
        _ => return Err(Usage.into()),
    };
    if failed > 0 {
        eprintln!("{failed} probes failed");
    }
    Ok(failed == 0)
}

/// Prints the model's prediction for every probe.
fn forecasts(machine: &str) -> Result<usize, Box<dyn std::error::Error>> {
    let gpu = predict::Gpu::named(machine).ok_or_else(|| {
        let names = MACHINES.map(|m| m.name).join(", ");
        format!("no machine is called {machine}; known: {names}")
    })?;
    let target = Target::of_device(gpu.sm);
    let probes = all(target);
    let figures: Vec<_> = probes.par_iter().map(|probe| probe.forecast(gpu, target)).collect();
    for (probe, figure) in probes.iter().zip(figures) {
        let figure = figure?;
        println!("{:52} {:9.2} clocks, round {:6.1}", probe.name, figure.clocks, figure.round);
    }
    Ok(0)
}

/// Writes each probe's shorter kernel as text.
fn write_kernels(folder: &Path, sm: &str) -> Result<usize, Box<dyn std::error::Error>> {
    let target = Target::of_device(sm.parse().map_err(|_| format!("{sm} is not a number such as 90"))?);
    for probe in all(target) {
        let name = probe.name.replace([' ', '.', ',', ':'], "_");
        let units = if probe.kind == Kind::Loop { 1 } else { probe.units.min(8) };
        let text = probe.module(target, units)?.to_string();
        host::store::write(&folder.join(format!("{name}.ptx")), text.as_bytes())?;
    }
    Ok(0)
}

/// Runs the probes. Returns the number of failures.
fn run(rows: &Path, word: &str) -> Result<usize, Box<dyn std::error::Error>> {
    let mut gpu = Gpu::open(0)?;
    let provenance = Provenance::of_gpu(gpu.info());
    let (target, sms) = (Target::of_device(gpu.target().sm), gpu.info().sms);
    let known = MACHINES.into_iter().find(|m| gpu.info().name.split(' ').any(|name| name == m.name));
    println!("{}: forecasts {}", gpu.info().name, known.map_or("none", |m| m.name));
    let probes: Vec<Probe> = all(target).into_iter().filter(|p| p.name.contains(word)).collect();
    let forecasts: Vec<Option<Figure>> = probes.par_iter().map(|p| p.forecast(known?, target).ok()).collect();
    let mut failed = 0;
    for (probe, forecast) in probes.iter().zip(forecasts) {
        let figure = match probe.measure(&mut gpu, target, sms) {
            Ok(figure) => figure,
            Err(error) => {
                println!("{:52} failed: {error}", probe.name);
                failed += 1;
                continue;
            }
        };
        println!("{}", line(probe, figure, forecast));
        if provenance.commit.is_some() {
            append_line(rows, &row(probe, figure, forecast, &provenance).to_string())?;
        }
    }
    if word.is_empty() {
        launches(&mut gpu, target, known, rows, &provenance)?;
    }
    Ok(failed)
}

/// Measures the time of an empty kernel over the number of its CTAs.
fn launches(
    gpu: &mut Gpu,
    target: Target,
    known: Option<&predict::Gpu>,
    rows: &Path,
    provenance: &Provenance,
) -> Result<(), Box<dyn std::error::Error>> {
    let module = Builder::kernel("empty").into_verified(target)?;
    for (ctas, threads) in [(1, 32), (132, 128), (132, 1024), (1056, 128), (8448, 128), (67584, 128)] {
        let launch = Launch::new(Dim3(ctas, 1, 1), Dim3(threads, 1, 1));
        let (module, entry) = (module.clone(), "empty".to_owned());
        let kernel =
            Kernel { tensor_maps: Vec::new(), module, entry, launch, buffers: Vec::new(), args: Vec::new() };
        let times: Result<Vec<f64>, _> = (0..ROUNDS).map(|_| gpu.time(&kernel, &mut [], LAUNCHES)).collect();
        let times = times?;
        let (us, forecast) = (median(&times), known.map(|m| m.launch_us));
        println!("empty kernel, {ctas} CTAs of {threads} threads: {us:.2} µs");
        let row = json!({
            "suite": "model", "impl": "flashcore", "probe": "empty kernel", "kind": "launch", "ctas": ctas,
            "threads": threads, "us": us, "all_us": times, "launches": LAUNCHES, "forecast_us": forecast,
            "timer": "events, warm",
        });
        if provenance.commit.is_some() {
            append_line(rows, &with(row, provenance).to_string())?;
        }
    }
    Ok(())
}

fn line(probe: &Probe, figure: Figure, forecast: Option<Figure>) -> String {
    let forecast = forecast.map_or_else(String::new, |f| match probe.kind {
        Kind::Loop => format!("forecast {:.2}", f.clocks),
        Kind::Latency | Kind::Rate => format!("forecast {:.2}, round {:.1}", f.clocks, f.round),
    });
    format!("{:52} {:9.2} clocks, round {:6.1}  {forecast}", probe.name, figure.clocks, figure.round)
}

/// The evidence row: the measurement, and the model's prediction for the same kernel.
fn row(probe: &Probe, figure: Figure, forecast: Option<Figure>, provenance: &Provenance) -> Value {
    let row = json!({
        "suite": "model", "impl": "flashcore", "probe": probe.name, "kind": probe.kind, "warps": probe.warps,
        "clocks": figure.clocks, "round_clocks": figure.round, "timer": "clock64",
        "forecast_clocks": forecast.map(|f| f.clocks), "forecast_round": forecast.map(|f| f.round),
    });
    with(row, provenance)
}
