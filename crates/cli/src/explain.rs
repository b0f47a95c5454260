//! `flashcore explain`.

use std::io::Write;
use std::path::Path;

use check::gate::{Settings, bind};
use check::launchfile::Bound;
use check::study::{Study, analyse};
use host::store;
use predict::resources::{Ptxas, Source};
use predict::{Bound as Unit, Cause, Gpu, Prediction, machine};
use problem::Problem;
use ptx::quote;
use serde_json::{Value, json};

use crate::args::Explain;
use crate::check::watched;
use crate::error::CliError;
use crate::source::Origin;
use crate::terminal::{Out, Tone, detail};
use crate::{Status, choice, source, table, unless_closed};

pub fn explain(args: &Explain) -> Result<Status, CliError> {
    if let Some(problem) = &args.problem {
        return choice::explain(args, problem);
    }
    let gpu = match &args.machine {
        Some(file) => calibrate::machine::read(file)?,
        None => Gpu::named(&args.gpu).ok_or_else(|| CliError::Argument {
            argument: "--gpu",
            value: args.gpu.clone(),
            accepted: machine::MACHINES.map(|g| g.name).join(", "),
        })?,
    };
    let ptxas = Ptxas::find().ok();
    detail(format_args!(
        "ptxas: {}",
        ptxas.as_ref().map_or("none, registers are estimated", |ptxas| ptxas.version())
    ));
    let studied = |bound: Bound, text| -> Result<Study, CliError> {
        let check = watched(&bound, &Settings::quick(), args.timeout)?;
        let launch = bound.kernel.launch;
        Ok(analyse(bound, &launch, text, check, std::slice::from_ref(gpu), ptxas.as_ref()))
    };
    let (study, other) = match (&args.file, &args.launch) {
        (Some(file), Some(launch)) => {
            source::keepable(args.keep_ptx.as_deref(), &[("FILE", file), ("--launch", launch)])?;
            if args.against.is_some() && store::is_standard(launch) {
                return Err(CliError::Argument {
                    argument: "--launch",
                    value: "-".to_owned(),
                    accepted: "a file, since two kernels are launched by it".to_owned(),
                });
            }
            let load = |file: &Path| Origin { file, sm: args.sm, compiling: &args.compiling }.load(launch);
            let (bound, text) = load(file)?;
            let other = args.against.as_deref().map(load).transpose()?;
            let other = other.map(|(bound, text)| studied(bound, Some(text))).transpose()?;
            (studied(bound, Some(text))?, other)
        }
        _ => {
            // The plan that a user of that GPU gets.
            let (problem, device) = (Problem::mission(), choice::model(gpu)?);
            let plan = choice::chosen(&problem, &device)?.plan;
            (studied(bind(&plan, &problem, &device.arch)?, None)?, None)
        }
    };
    if let Some(file) = &args.keep_ptx {
        store::write(file, study.text.as_bytes())?;
    }
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        let mut object = object(&study);
        if let Some(other) = &other {
            object["against"] = self::object(other);
        }
        out.json("explain", &object).map_err(CliError::from)
    } else {
        print(&mut out, &study, args.lines).and_then(|()| match &other {
            Some(other) => compare(&mut out, &study, other),
            None => Ok(()),
        })
    })?;
    Ok(Status::Passed)
}

fn object(study: &Study) -> Value {
    json!({
        "verdict": study.check.verdict, "reasons": study.check.reasons, "prediction": study.prediction(),
        "resources": study.resources, "findings": study.findings, "lines": study.lines,
    })
}

/// The share of the time in which each unit is busy, largest first.
fn busy(p: &Prediction) -> Vec<(Unit, f64)> {
    let u = &p.utilisation;
    let mut units = vec![
        (Unit::Tensor, u.tensor),
        (Unit::Fma, u.fma),
        (Unit::Alu, u.alu),
        (Unit::Half, u.half),
        (Unit::Double, u.double),
        (Unit::Mufu, u.mufu),
        (Unit::Issue, u.issue),
        (Unit::Shared, u.shared),
        (Unit::L1, u.l1),
        (Unit::L2, u.l2),
        (Unit::Dram, u.dram),
    ];
    units.sort_by(|a, b| b.1.total_cmp(&a.1));
    units
}

/// Shares below this are left out of bars and lists.
const SMALL: f64 = 0.02;
/// Width of the bar of a unit that is always busy, characters.
const BAR: f64 = 40.0;

/// Bars of the units (what Nsight Compute calls speed of light), then what the warps wait for.
fn print_prediction(out: &mut Out, p: &Prediction) -> Result<(), CliError> {
    let Prediction { machine, us, us_low, us_high, bound, .. } = p;
    writeln!(
        out,
        "predicted on {machine}: {us:.1} µs ({us_low:.1} to {us_high:.1}), bound by {}",
        bound.name()
    )?;
    writeln!(out, "\nbusy, % of the time from the first instruction to the last:")?;
    let units = busy(p);
    for (unit, share) in units.iter().filter(|(unit, share)| *share >= SMALL || unit == bound) {
        let bar = "█".repeat((share.clamp(0.0, 1.0) * BAR).round() as usize);
        let mark = if unit == bound { "  ← bound" } else { "" };
        writeln!(out, "  {:<20} {:>4.0} %  {bar}{mark}", unit.name(), 100.0 * share)?;
    }
    if !units.iter().any(|(unit, _)| unit == bound) {
        writeln!(out, "  no unit is busy enough to be the bound: {}", bound.name())?;
    }
    writeln!(out, "\nwarps, % of their time:")?;
    for (cause, share) in p.split.iter().filter(|(_, share)| *share >= SMALL) {
        writeln!(out, "  {:<20} {:>4.0} %", cause.name(), 100.0 * share)?;
    }
    Ok(())
}

/// A table of two kernels: times, resources, busy units and waits.
fn compare(out: &mut Out, study: &Study, other: &Study) -> Result<(), CliError> {
    let dash = || "–".to_owned();
    let both = [study, other];
    let mut rows = vec![
        [vec!["verdict".to_owned()], both.map(|s| s.check.verdict.to_string()).to_vec(), vec![dash()]]
            .concat(),
    ];
    let mut row = |name: &str, values: [Option<f64>; 2], digits: usize| {
        let change = match values {
            [Some(a), Some(b)] if b != 0.0 => format!("{:.2}×", a / b),
            _ => dash(),
        };
        let [a, b] = values.map(|v| v.map_or_else(dash, |v| format!("{v:.digits$}")));
        rows.push(vec![name.to_owned(), a, b, change]);
    };
    row("predicted µs", both.map(|s| s.prediction().map(|p| p.us)), 1);
    row("registers", both.map(|s| s.resources.as_ref().map(|r| f64::from(r.registers))), 0);
    row("shared memory, bytes", both.map(|s| Some(s.check.counters.shared_bytes as f64)), 0);
    if let [Some(a), Some(b)] = both.map(Study::prediction) {
        let of = |p: &Prediction, unit| busy(p).iter().find(|(u, _)| *u == unit).map(|(_, s)| 100.0 * s);
        for (unit, _) in busy(a) {
            let values = [a, b].map(|p| of(p, unit));
            if values.iter().flatten().any(|share| *share >= 100.0 * SMALL) {
                row(&format!("busy: {}, %", unit.name()), values, 0);
            }
        }
        for &cause in Cause::ALL {
            let shares = [a, b].map(|p| p.share(cause));
            if shares.iter().any(|share| *share >= SMALL) {
                row(&format!("warps: {}, %", cause.name()), shares.map(|share| Some(100.0 * share)), 0);
            }
        }
    }
    writeln!(out)?;
    let names = both.map(|s| quote::cut(&s.bound.kernel.entry).into_owned());
    table::print(out, &["", &names[0], &format!("against {}", names[1]), "ratio"], &rows)?;
    Ok(())
}

fn print(out: &mut Out, study: &Study, lines: usize) -> Result<(), CliError> {
    write!(out, "{}: ", quote::cut(&study.bound.kernel.entry))?;
    out.paint(study.check.verdict.into(), study.check.verdict)?;
    writeln!(out)?;
    for reason in &study.check.reasons {
        writeln!(out, "  {}", quote::words(reason))?;
    }
    if let Some(r) = &study.resources {
        writeln!(
            out,
            "{} registers, {} bytes of spills, {} bytes of shared memory ({})",
            r.registers,
            r.spill_loads + r.spill_stores,
            study.check.counters.shared_bytes,
            match &r.source {
                Source::Ptxas(version) => format!("ptxas {version}"),
                Source::Estimate => "estimated, without ptxas".to_owned(),
            }
        )?;
    }
    match study.predictions.first() {
        Some(Ok(p)) => print_prediction(out, p)?,
        Some(Err(error)) => writeln!(out, "no prediction: {error}")?,
        None => writeln!(out, "no prediction: nothing was run")?,
    }
    for finding in &study.findings {
        writeln!(out)?;
        out.paint(Tone::Name, finding.name)?;
        writeln!(out, " — potential gain at most {:.2}×", finding.expected_gain)?;
        writeln!(out, "  {}", finding.evidence)?;
        writeln!(out, "  cure: {}", finding.cure)?;
    }
    let text: Vec<&str> = study.text.lines().collect();
    let mut dear = study.lines.clone();
    dear.sort_by_key(|l| std::cmp::Reverse(l.issues));
    let rows: Vec<Vec<String>> = dear
        .iter()
        .take(lines)
        .map(|l| {
            let source = (l.line as usize).checked_sub(1).and_then(|i| text.get(i)).map_or("", |s| s.trim());
            vec![
                l.line.to_string(),
                format!("{:.1}", 100.0 * l.share),
                l.issues.to_string(),
                format!("{:.1}", l.lanes),
                format!("{:.1}", l.conflicts),
                format!("{:.1}", l.sectors),
                quote::cut(source).into_owned(),
            ]
        })
        .collect();
    writeln!(out)?;
    table::print(out, &["line", "% issued", "issues", "lanes", "conflicts", "sectors", "PTX"], &rows)?;
    Ok(())
}
