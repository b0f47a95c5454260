//! `flashcore explain`.

use std::io::Write;

use emu::model::{Gpu, machine};
use emu::resources::{Ptxas, Source};
use lab::gate::{Settings, bind};
use lab::study::{Study, analyse};
use problem::Problem;
use ptx::quote;
use serde_json::json;

use crate::Status;
use crate::args::Explain;
use crate::check::watched;
use crate::error::CliError;
use crate::terminal::{Out, Tone, detail};
use crate::{choice, source, table};

pub fn explain(args: &Explain) -> Result<Status, CliError> {
    if let Some(problem) = &args.problem {
        return choice::explain(args, problem);
    }
    let gpu = match &args.machine {
        Some(file) => lab::machine::read(file)?,
        None => Gpu::named(&args.gpu).ok_or_else(|| CliError::Argument {
            argument: "--gpu",
            value: args.gpu.clone(),
            accepted: machine::MACHINES.map(|g| g.name).join(", "),
        })?,
    };
    let (bound, text) = match (&args.file, &args.launch) {
        (Some(file), Some(launch)) => {
            let (bound, text) = source::load(file, launch, args.sm)?;
            (bound, Some(text))
        }
        _ => {
            // The plan that a user of that GPU gets.
            let (problem, device) = (Problem::mission(), choice::model(gpu)?);
            let plan = choice::chosen(&problem, &device)?.plan;
            (bind(&plan, &problem, &device.arch)?, None)
        }
    };
    let ptxas = Ptxas::find().ok();
    detail(format_args!(
        "ptxas: {}",
        ptxas.as_ref().map_or("none, registers are estimated", |ptxas| ptxas.version())
    ));
    let check = watched(&bound, &Settings::quick(), args.timeout)?;
    let launch = bound.kernel.launch;
    let study = analyse(bound, &launch, text, check, std::slice::from_ref(gpu), ptxas.as_ref());
    let mut out = crate::terminal::out();
    if args.json {
        let prediction = study.prediction();
        let object = json!({
            "verdict": study.check.verdict, "reasons": study.check.reasons, "prediction": prediction,
            "resources": study.resources, "findings": study.findings, "lines": study.lines,
        });
        out.json("explain", &object)?;
    } else {
        print(&mut out, &study, args.lines)?;
    }
    Ok(Status::Passed)
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
        Some(Ok(p)) => {
            writeln!(
                out,
                "predicted on {}: {:.1} µs ({:.1} to {:.1}), bound by {}",
                p.machine,
                p.us,
                p.us_low,
                p.us_high,
                p.bound.name()
            )?;
            for (cause, share) in p.split.iter().filter(|(_, share)| *share >= 0.02) {
                writeln!(out, "  {:>4.0} %  {}", 100.0 * share, cause.name())?;
            }
        }
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
