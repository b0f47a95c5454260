//! The command `flashcore explain`: predicts the time of a kernel and says what limits it.

use std::io::Write;
use std::path::Path;

use check::diagnose::{LineCost, SourceCost};
use check::gate::{Settings, bind};
use check::launchfile::Bound;
use check::names::demangle;
use check::sources::{SourceRange, Sources};
use check::study::{Study, analyse};
use host::store;
use predict::resources::{Ptxas, ResourceSource};
use predict::{Bottleneck as Unit, Cause, Gpu, Prediction, machine};
use problem::Problem;
use ptx::quote;
use serde_json::{Value, json};

use crate::args::Explain;
use crate::error::CliError;
use crate::findings::{self, Found};
use crate::progress::watched;
use crate::source::Origin;
use crate::terminal::{Out, Tone, detail};
use crate::{Status, choice, source, table, unless_closed};

pub fn explain(args: &Explain) -> Result<Status, CliError> {
    if let Some(problem) = &args.problem {
        return choice::explain(args, problem);
    }
    if args.device.is_some() {
        let needed = "--problem; --gpu names the machine whose time is predicted for a kernel";
        return Err(CliError::Needs { argument: "--device", needed });
    }
    if args.plan.is_some() {
        return Err(CliError::Needs { argument: "--plan", needed: "--problem" });
    }
    let gpu = match &args.machine {
        Some(file) => calibrate::machine::read(file)?,
        None => {
            let name = args.gpu.as_deref().unwrap_or("L4");
            Gpu::named(name).ok_or_else(|| CliError::Argument {
                argument: "--gpu",
                value: name.to_owned(),
                accepted: machine::MACHINES.map(|g| g.name).join(", "),
            })?
        }
    };
    let ptxas = Ptxas::find().ok();
    detail(format_args!(
        "ptxas: {}",
        ptxas.as_ref().map_or("none, registers are estimated", |ptxas| ptxas.version())
    ));
    let studied = |bound: Bound, sources: Option<Sources>| -> Result<Study, CliError> {
        let mut settings = Settings { by_the_letter: false, ..Settings::quick() };
        if let Some(sources) = &sources {
            settings.allowed = sources.allowed(|_, _| Vec::new())?;
        }
        let check = watched(&bound, &settings, args.timeout, args.json)?;
        Ok(analyse(bound, None, sources, check, std::slice::from_ref(gpu), ptxas.as_ref()))
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
            let load = |file: &Path, beside: Option<&Path>| {
                Origin { file, sm: args.sm, compiling: &args.compiling, beside }.load(launch)
            };
            let sources = |text, file: &Path| Some(Sources::new(text, file.parent()));
            let other = args.against.as_deref();
            let (bound, text) = load(file, other)?;
            let loaded = other.map(|other| load(other, Some(file))).transpose()?;
            let other = other.zip(loaded);
            let other = other.map(|(file, (bound, text))| studied(bound, sources(text, file))).transpose()?;
            (studied(bound, sources(text, file))?, other)
        }
        _ => {
            // The plan that a user of that GPU gets.
            let (problem, device) = (Problem::mission(), choice::model(gpu)?);
            let plan = choice::chosen(&problem, &device)?.plan;
            (studied(bind(&plan, &problem, &device.arch)?, None)?, None)
        }
    };
    if let Some(file) = &args.keep_ptx {
        store::write(file, study.sources.ptx().as_bytes())?;
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
            Some(other) => {
                let files =
                    [&args.file, &args.against].map(|file| file.as_deref().map_or_else(String::new, name));
                compare(&mut out, files, &study, other)
            }
            None => Ok(()),
        })
    })?;
    Ok(Status::Passed)
}

fn object(study: &Study) -> Value {
    let source_lines = study.source_lines.iter().map(|line| {
        let mut row = json!(line.cost);
        row["file"] = json!(line.file);
        row["text"] = json!(line.text);
        row["ptx_lines"] = json!(line.ptx_lines);
        row
    });
    let source_lines: Vec<Value> = source_lines.collect();
    let resources = study.resources.as_ref().map(|resources| {
        let mut row = json!(resources);
        row["shared"] = json!(study.check.counters.shared_bytes);
        row
    });
    json!({
        "verdict": study.check.verdict, "reasons": Found::of(study).sentences(),
        "prediction": study.prediction(),
        "resources": resources, "findings": findings::findings(study), "lines": study.lines,
        "loops": study.loops, "source_lines": source_lines,
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

/// Prints a bar for each unit (what Nsight Compute calls speed of light), then what the warps wait for.
fn print_prediction(out: &mut Out, p: &Prediction) -> Result<(), CliError> {
    let Prediction { machine, us, us_low, us_high, bound, .. } = p;
    writeln!(
        out,
        "predicted on {machine}: {us:.1} µs ({us_low:.1} to {us_high:.1}), limited by {}",
        bound.name()
    )?;
    writeln!(out, "\nbusy, % of the time from the first instruction to the last:")?;
    let units = busy(p);
    for (unit, share) in units.iter().filter(|(unit, share)| *share >= SMALL || unit == bound) {
        let bar = "█".repeat((share.clamp(0.0, 1.0) * BAR).round() as usize);
        let mark = if unit == bound { "  ← bound" } else { "" };
        writeln!(out, "  {:<20} {:>4.0} %  {bar}{mark}", unit.name(), 100.0 * share)?;
    }
    if let Some((busiest, most)) = units.first().filter(|(busiest, _)| busiest != bound)
        && let Some((_, share)) = units.iter().find(|(unit, _)| unit == bound)
    {
        let busy = if most - share < 0.05 { "busy as long" } else { "busier" };
        let (bound, busiest) = (bound.name(), busiest.name());
        writeln!(out, "  {busiest} is {busy}, but warps wait longer for {bound}, which is the bound")?;
    }
    if let Some((_, most)) = units.first().filter(|_| !units.iter().any(|(unit, _)| unit == bound)) {
        writeln!(out, "  limited by {}: no unit is above {:.0} %", bound.name(), (100.0 * most).ceil())?;
    }
    writeln!(out, "\nwarps, % of their time:")?;
    for (cause, share) in p.split.iter().filter(|(_, share)| *share >= SMALL) {
        writeln!(out, "  {:<20} {:>4.0} %", cause.name(), 100.0 * share)?;
    }
    if let Some(cause) = elsewhere(p, units.first().map(|(unit, _)| *unit)) {
        let (bound, cause) = (bound.name(), cause.name());
        writeln!(out, "  the bound is the busiest unit, {bound}: waits for {cause} can follow from it")?;
    }
    Ok(())
}

/// The cause for which warps wait longest, if a level of memory is both the busiest unit and the bound, and
/// the cause has another name.
fn elsewhere(p: &Prediction, busiest: Option<Unit>) -> Option<Cause> {
    let own: &[Cause] = match p.bound {
        Unit::L1 => &[Cause::L1],
        Unit::L2 => &[Cause::L2, Cause::L2Bandwidth],
        Unit::Dram => &[Cause::Dram, Cause::DramBandwidth],
        _ => return None,
    };
    let is_wait = |cause: &Cause| !matches!(cause, Cause::Launch | Cause::Issue | Cause::NotSelected);
    let waits = p.split.iter().filter(|(cause, _)| is_wait(cause));
    let (longest, _) = waits.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (busiest == Some(p.bound) && !own.contains(longest)).then_some(*longest)
}

/// The names of a program's kernels in launch order.
fn entries(study: &Study) -> String {
    let names = study.bound.steps().map(|kernel| quote::cut(&demangle(&kernel.entry)).into_owned());
    names.collect::<Vec<_>>().join(", then ")
}

fn name(file: &Path) -> String {
    quote::cut(&file.display().to_string()).into_owned()
}

/// A table of the kernels of two files: times, resources, busy units and waits.
fn compare(out: &mut Out, files: [String; 2], study: &Study, other: &Study) -> Result<(), CliError> {
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
    let [file, against] = files;
    table::print(out, &["", &file, &format!("against {against}"), "ratio"], &rows)?;
    Ok(())
}

fn print(out: &mut Out, study: &Study, lines: usize) -> Result<(), CliError> {
    write!(out, "{}: ", entries(study))?;
    out.paint(study.check.verdict.into(), study.check.verdict)?;
    writeln!(out)?;
    for reason in Found::of(study).sentences() {
        writeln!(out, "  {}", quote::words(&reason))?;
    }
    if let Some(r) = &study.resources {
        writeln!(
            out,
            "{} registers, {} bytes of spills, {} bytes of shared memory ({})",
            r.registers,
            r.spill_loads + r.spill_stores,
            study.check.counters.shared_bytes,
            match &r.source {
                ResourceSource::Ptxas(version) => format!("ptxas {version}"),
                ResourceSource::Estimate => "estimated, without ptxas".to_owned(),
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
        out.paint(Tone::Name, finding.name.name())?;
        writeln!(out, " — potential gain at most {:.2}×", finding.expected_gain)?;
        writeln!(out, "  {}", finding.evidence)?;
        writeln!(out, "  cure: {}", finding.cure)?;
    }
    if study.findings.is_empty() {
        writeln!(out, "\nno single bottleneck found")?;
    }
    print_loops(out, study)?;
    writeln!(out)?;
    print_lines(out, study, lines)
}

/// Maximum number of loops that are listed.
const LOOPS: usize = 4;

/// The loops with their shares of the warps' time.
fn print_loops(out: &mut Out, study: &Study) -> Result<(), CliError> {
    let loops = study.loops.iter().filter(|l| l.stall >= SMALL).take(LOOPS);
    for (i, l) in loops.enumerate() {
        if i == 0 {
            writeln!(out, "\nloops, % of the warps' time:")?;
        }
        let name = if l.has_products { "loop with tensor-core products" } else { "loop" };
        let (first, last) = l.lines;
        let ranges =
            study.sources.ranges(study.lines.iter().map(|c| c.line).filter(|c| (first..=last).contains(c)));
        let mut place = format!("PTX lines {first} to {last}");
        if !ranges.is_empty() {
            place = format!("{} ({place})", quote::list(ranges.iter().map(SourceRange::to_string)));
        }
        writeln!(out, "  {name:<32} {:>4.0} %  {place}", 100.0 * l.stall)?;
    }
    Ok(())
}

/// A table of the most expensive lines: of the source where the PTX has line information, else of the PTX.
fn print_lines(out: &mut Out, study: &Study, lines: usize) -> Result<(), CliError> {
    let cells = |place: String, cost: &LineCost, text: &str| {
        vec![
            place,
            cost.stall.map_or("–".to_owned(), |stall| format!("{:.1}", 100.0 * stall)),
            format!("{:.1}", 100.0 * cost.share),
            cost.issues.to_string(),
            format!("{:.1}", cost.lanes),
            format!("{:.1}", cost.conflicts),
            format!("{:.1}", cost.sectors),
            quote::cut(text).replace('\t', " "),
        ]
    };
    let header =
        |first, last| [first, "% of time", "% issued", "issues", "lanes", "conflicts", "sectors", last];
    // By time if it is predicted, else by number of issued instructions.
    let by_cost = |a: &LineCost, b: &LineCost| {
        let stall = |cost: &LineCost| cost.stall.unwrap_or(0.0);
        stall(b).total_cmp(&stall(a)).then(b.issues.cmp(&a.issues)).then(a.line.cmp(&b.line))
    };
    if !study.source_lines.is_empty() {
        let mut dear: Vec<&SourceCost> = study.source_lines.iter().collect();
        dear.sort_by(|a, b| by_cost(&a.cost, &b.cost));
        let row = |line: &&SourceCost| {
            let place = format!("{}:{}", line.file, line.cost.line);
            cells(place, &line.cost, line.text.as_deref().unwrap_or(""))
        };
        let rows: Vec<_> = dear.iter().take(lines).map(row).collect();
        table::print(out, &header("source", "text"), &rows)?;
        return define(out);
    }
    let text = study.sources.ptx_lines();
    let mut dear: Vec<&LineCost> = study.lines.iter().collect();
    dear.sort_by(|a, b| by_cost(a, b));
    let row = |cost: &&LineCost| {
        let text = (cost.line as usize).checked_sub(1).and_then(|i| text.get(i)).copied();
        cells(cost.line.to_string(), cost, text.unwrap_or(""))
    };
    let rows: Vec<_> = dear.iter().take(lines).map(row).collect();
    table::print(out, &header("line", "PTX"), &rows)?;
    define(out)
}

/// Defines the columns of the table of lines.
fn define(out: &mut Out) -> Result<(), CliError> {
    writeln!(
        out,
        "% of time: of the warps, issuing the line or waiting for its result; % issued: of all issue slots; issues: by \
         warps;\nlanes: active, of 32; conflicts: shared-memory passes an access, 1 without conflicts; sectors: of 32 \
         bytes, an access"
    )?;
    Ok(())
}
