//! `flashcore climb`: analyses the ladder of kernels, from the first slow one to the fused one.

use std::io::Write;

use bench::gpu::{Workbench, WorkbenchError};
use check::gate::Settings;
use climb::{Climb, Climbed, Options, Progress};
use driver::DriverError;
use host::store;
use kernels::Arch;
use predict::resources::Ptxas;
use problem::Problem;

use crate::device::Device;
use crate::error::CliError;
use crate::progress::Progress as Bar;
use crate::terminal::{fault, one_line, tell};
use crate::{Status, args, source, table, unless_closed};

pub fn climb(args: &args::Climb) -> Result<Status, CliError> {
    source::not_beside_json("--out", &args.out, args.json)?;
    store::writable(&args.out)?;
    let problem = Problem::mission();
    let mut card = card(args.device.parse()?)?;
    let info = card.as_ref().map(|card: &Workbench| card.info().clone());
    // Without a GPU the kernels are built for an L4, on which the original kernels were timed.
    let arch =
        info.as_ref().and_then(|info| Some(Arch { multiprocessors: info.sms, ..Arch::of(info.sm())? }));
    if let (Some(info), None) = (&info, arch) {
        tell(format_args!(
            "{} is no target of the kernels (sm_{}): predicted, not measured",
            info.name,
            info.sm()
        ));
        card = None;
    }
    let rungs = climb::rungs(&problem, &arch.unwrap_or(Arch::SM_89))?;
    let ptxas = Ptxas::find().ok();
    let options = Options {
        settings: if args.thorough { Settings::thorough() } else { Settings::quick() },
        ptxas: ptxas.as_ref(),
        cpu_seconds: Some(0.5),
        machines: Options::machines_for(info.as_ref().map(|info| info.name.as_str())),
        problem,
    };
    let all = rungs.len();
    let bar = if args.json { Bar::silent() } else { Bar::new(Some(all as u64)) };
    let mut done = 0;
    let climb = climb::climb(&options, rungs, card.as_mut(), |progress| match progress {
        Progress::Start(name) => bar.at(done, name),
        Progress::Done(rung) => {
            done += 1;
            let us = rung.predicted_us().map_or("–".into(), |us| format!("{us:.0} µs"));
            let verdict = rung.study.check.verdict.name();
            bar.say(&format!("{done:>2} of {all}  {:<14} {verdict:<10} {us}", rung.rung.name));
        }
    })?;
    drop(bar);
    if !climb.cpu.is_empty() {
        crate::bench::tell_of_slow_build();
    }
    store::write(&args.out, report::page(&climb).as_bytes())?;
    let mut out = crate::terminal::out();
    unless_closed(if store::is_standard(&args.out) {
        Ok(())
    } else if args.json {
        out.json("climb", &climb.json()).map_err(CliError::from)
    } else {
        print(&mut out, &climb)
            .and_then(|()| Ok(writeln!(out, "\nreport: {}", one_line(&args.out.to_string_lossy()))?))
    })?;
    let surprises = climb.surprises();
    if surprises.is_empty() {
        Ok(Status::Passed)
    } else {
        fault(format_args!("not as expected: {}", surprises.join(", ")));
        Ok(Status::Failed)
    }
}

/// The GPU to measure on, if there is one and `device` allows it.
fn card(device: Device) -> Result<Option<Workbench>, CliError> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(ordinal) => Ok(Some(Workbench::open(ordinal)?)),
        Device::Auto => match Workbench::open(0) {
            Ok(bench) => Ok(Some(bench)),
            Err(WorkbenchError::Driver(DriverError::NoDriver | DriverError::NoDevice { .. })) => Ok(None),
            Err(error) => {
                tell(format_args!("predicted, not measured: {error}"));
                Ok(None)
            }
        },
    }
}

fn print(out: &mut impl Write, climb: &Climb) -> Result<(), CliError> {
    let first = climb.rungs.first().and_then(Climbed::us);
    let rows: Vec<Vec<String>> = climb.rungs.iter().map(|rung| row(rung, first)).collect();
    let device = climb.machines.first().map_or("", |m| m.name);
    let predicted = format!("{device} predicted µs");
    let header = [
        "version",
        "verdict",
        "max_diff",
        "error / allowed",
        "measured µs",
        &predicted,
        "quoted µs",
        "forecast µs",
        "×",
        "bound",
        "root cause",
    ];
    if climb.card.is_some() {
        table::print(out, &header, &rows)?;
    } else {
        // Without measured times, the column is left out.
        let header: Vec<&str> = header.into_iter().filter(|name| *name != "measured µs").collect();
        let without =
            |row: Vec<String>| row.into_iter().enumerate().filter(|(i, _)| *i != 4).map(|(_, c)| c).collect();
        table::print(out, &header, &rows.into_iter().map(without).collect::<Vec<_>>())?;
    }
    writeln!(out)?;
    if let (Some(card), Some(score)) = (&climb.card, climb.score()) {
        writeln!(
            out,
            "measured on {card}: median error of {} forecasts {:.0} %, rank correlation {:.2}",
            score.rungs,
            100.0 * score.median_error,
            score.spearman
        )?;
    }
    if let Some(record) = climb.record() {
        writeln!(out, "{}", record.summary())?;
    }
    for rung in climb.rungs.iter().filter(|r| !r.study.check.reasons.is_empty()) {
        writeln!(out, "{}: {}", rung.rung.name, rung.study.check.reasons[0])?;
    }
    for race in &climb.cpu {
        let p = &race.problem;
        writeln!(
            out,
            "cpu {}: {:.0} µs measured, {:.1} GFLOP/s",
            p.dtypes,
            race.first().us(),
            p.flops() / race.first().us() * 1e-3
        )?;
    }
    Ok(())
}

fn row(rung: &Climbed, first: Option<f64>) -> Vec<String> {
    let check = &rung.study.check;
    let dash = || "–".to_owned();
    let us = rung.us();
    vec![
        rung.rung.name.clone(),
        check.verdict.name().to_owned(),
        check.error.map_or_else(dash, |e| format!("{:.6}", e.max_diff)),
        check.error.map_or_else(dash, |e| e.brief()),
        rung.measured_us().map_or_else(dash, |us| format!("{us:.1}")),
        rung.predicted_us().map_or_else(dash, |us| format!("{us:.0}")),
        rung.rung.quoted_us().map_or_else(dash, |us| format!("{us:.0}")),
        rung.rung.forecast_us.map_or_else(dash, |(low, high)| format!("{low:.0}–{high:.0}")),
        first.zip(us).map_or_else(dash, |(first, us)| format!("{:.1}", first / us)),
        rung.study.prediction().map_or_else(dash, |p| p.bound.name().to_owned()),
        rung.study.findings.first().map_or_else(dash, |f| f.name.to_string()),
    ]
}
