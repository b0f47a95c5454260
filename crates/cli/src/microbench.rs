//! The command `flashcore lab microbench`: measures the unit costs of a GPU.

use std::io::Write;

use bench::gpu::Workbench;
use bench::provenance::Provenance;
use bench::{Sensors, median};
use calibrate::probes::description::{Description, DeviceProperties, Row, base, empty, row};
use calibrate::probes::{Probe, all};
use check::launchfile::Bound;
use driver::Gpu;
use emu::{Checks, Emulator, Options};
use host::store;
use ptx::{Machine, Target};
use serde_json::json;

use crate::args::Microbench;
use crate::error::CliError;
use crate::progress::Progress;
use crate::terminal::{fault, one_line, tell};
use crate::{Status, source, table, unless_closed};

/// Launches of an empty kernel in one graph. `ROUNDS` is the number of timings of that graph.
const LAUNCHES: u32 = 200;
const ROUNDS: usize = 9;
/// Largest data of a probe on the emulator, bytes. The DRAM probes use more and are left out.
const EMULATED_BYTES: usize = 16 << 20;
/// Number of SMs of the emulated device. The emulator itself has no such number.
const EMULATED_SMS: u32 = 2;

pub fn microbench(args: &Microbench) -> Result<Status, CliError> {
    source::not_beside_json("--out", &args.out, args.json)?;
    store::writable(&args.out)?;
    let (device, rows, failed, launch_us, provenance) =
        if args.emulator { on_emulator(args) } else { on_gpu(args, ordinal(&args.device)?)? };
    if rows.is_empty() && failed == 0 {
        return Err(CliError::Argument {
            argument: "--only",
            value: args.only.clone().unwrap_or_default(),
            accepted: "a word in the name of a probe, such as mma, ldmatrix, cp.async, bar.sync, L2".into(),
        });
    }
    let description = Description::of(&device, &rows, launch_us);
    let object = description.json(&rows, json!(provenance));
    let text = serde_json::to_string_pretty(&object).map_err(std::io::Error::from)?;
    store::write(&args.out, format!("{text}\n").as_bytes())?;
    let mut out = crate::terminal::out();
    unless_closed(if store::is_standard(&args.out) {
        Ok(())
    } else if args.json {
        out.json("microbench", &object).map_err(CliError::from)
    } else {
        print(&mut out, args, &device, &description, &rows)
    })?;
    Ok(if failed == 0 { Status::Passed } else { Status::Failed })
}

/// Device, rows, number of failed probes, time of an empty kernel (µs), and provenance.
type Measured = (DeviceProperties, Vec<Row>, usize, Option<f64>, Provenance);

fn on_gpu(args: &Microbench, ordinal: i32) -> Result<Measured, CliError> {
    let mut gpu = Gpu::open(ordinal)?;
    let info = gpu.info().clone();
    let sensors = Sensors::of(&info.uuid);
    if let Some(why) = sensors.missing() {
        tell(format_args!("the clock is taken from the table: {why}"));
    }
    let mut device = DeviceProperties {
        name: info.name.clone(),
        sm: info.sm(),
        sms: info.sms,
        l2_bytes: info.l2 as u64,
        clock_mhz: None,
    };
    let target = Target::of_device(info.sm());
    let (probes, mut clock_mhz) = (chosen(args, target), None);
    let (rows, failed) = measure(&mut gpu, &probes, &device, target, |gpu| {
        gpu.unload();
        clock_mhz = highest(clock_mhz, sensors.read().clock_mhz.map(f64::from));
    });
    device.clock_mhz = clock_mhz;
    let launch_us = match &args.only {
        None => Some(launch(ordinal, target, info.sms)?),
        Some(_) => None,
    };
    Ok((device, rows, failed, launch_us, Provenance::of_gpu(&info)))
}

/// The higher of two clocks. The clock falls between kernels, so the highest reading counts.
fn highest(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

fn on_emulator(args: &Microbench) -> Measured {
    let checks = Checks { races: false, uninitialised: false, unwritten: false };
    let mut emulator = Emulator::new(Options { checks, ..Options::default() });
    let name = "emulator, sm_90".to_owned();
    let device = DeviceProperties { name, sm: 90, sms: EMULATED_SMS, l2_bytes: 0, clock_mhz: None };
    let target = Target::of_device(90);
    let mut probes = chosen(args, target);
    probes.retain(|probe| probe.data <= EMULATED_BYTES);
    let (rows, failed) = measure(&mut emulator, &probes, &device, target, |_| {});
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    (device, rows, failed, None, Provenance::of_cpu(std::path::Path::new("."), threads))
}

fn chosen(args: &Microbench, target: Target) -> Vec<Probe> {
    let word = args.only.as_deref().unwrap_or_default();
    all(target).into_iter().filter(|probe| probe.name.contains(word)).collect()
}

/// Runs the probes one after the other. A probe that fails is reported, and the next one runs.
fn measure<M: Machine>(
    machine: &mut M,
    probes: &[Probe],
    device: &DeviceProperties,
    target: Target,
    mut after: impl FnMut(&mut M),
) -> (Vec<Row>, usize) {
    let base = base(&device.name, device.sm);
    let (mut rows, mut failed) = (Vec::new(), 0);
    let bar = Progress::new(Some(probes.len() as u64));
    for (index, probe) in probes.iter().enumerate() {
        bar.at(index as u64, &format!("probe {} of {}: {}", index + 1, probes.len(), probe.name));
        match probe.measure(machine, target, device.sms) {
            Ok(figure) => rows.push(row(probe, figure, probe.forecast(base, target).ok())),
            Err(error) => {
                fault(format_args!("{}: {error}", probe.name));
                failed += 1;
            }
        }
        after(machine);
    }
    (rows, failed)
}

/// The time of an empty kernel in a graph of many launches, µs.
fn launch(ordinal: i32, target: Target, sms: u32) -> Result<f64, CliError> {
    let mut bench = Workbench::open(ordinal)?;
    bench.prepare(&Bound::of_kernel(empty(target, sms)?, Vec::new(), None), &[])?;
    let times = (0..ROUNDS).map(|_| bench.time(0, LAUNCHES)).collect::<Result<Vec<f64>, _>>()?;
    Ok(median(&times))
}

fn ordinal(text: &str) -> Result<i32, CliError> {
    match text.parse()? {
        crate::device::Device::Cuda(ordinal) => Ok(ordinal),
        _ => Err(CliError::Argument {
            argument: "--device",
            value: text.to_owned(),
            accepted: "cuda, cuda:N".into(),
        }),
    }
}

fn print(
    out: &mut impl Write,
    args: &Microbench,
    device: &DeviceProperties,
    description: &Description,
    rows: &[Row],
) -> Result<(), CliError> {
    let base = description.base;
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
    let ratio = |a: Option<f64>, b: f64| number(a.map(|a| a / b));
    writeln!(out, "{} (sm_{}, {} SMs), beside the table's {base}\n", device.name, device.sm, device.sms)?;
    let constants: Vec<Vec<String>> = description
        .constants
        .iter()
        .map(|c| {
            vec![
                c.name.into(),
                number(c.measured),
                number(Some(c.table)),
                ratio(c.measured, c.table),
                c.what.into(),
            ]
        })
        .collect();
    table::print(out, &["constant", "measured", "table", "ratio", ""], &constants)?;
    let probes: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let forecast =
                row.forecast.map_or_else(|| "–".to_owned(), |f| number((f > 0.0).then(|| row.clocks / f)));
            vec![row.probe.clone(), number(Some(row.clocks)), number(row.forecast), forecast]
        })
        .collect();
    writeln!(out)?;
    table::print(out, &["probe, clocks", "measured", "by the model", "ratio"], &probes)?;
    let file = one_line(&args.out.to_string_lossy()).into_owned();
    writeln!(out, "\n{file} describes the machine: explain --machine {file}")?;
    Ok(())
}
