//! `flashcore check`.

use std::io::Write;
use std::time::Duration;

use check::gate::{CheckReport, GateError, Settings, Verdict, Watch, check_watched};
use check::launchfile::Bound;
use check::study::{Study, analyse};
use emu::Placement;
use host::store;
use predict::machine;
use predict::resources::{Resources, Source};
use problem::Problem;
use serde_json::{Value, json};

use crate::args::Check;
use crate::error::CliError;
use crate::progress::Progress;
use crate::source::Origin;
use crate::terminal::{Out, detail, is_verbose};
use crate::{Status, source, unless_closed};

pub fn check(args: &Check) -> Result<Status, CliError> {
    let mut inputs = vec![("FILE", args.file.as_path())];
    inputs.extend(args.launch.as_deref().map(|launch| ("--launch", launch)));
    source::keepable(args.keep_ptx.as_deref(), &inputs)?;
    let origin = Origin { file: &args.file, sm: args.sm, compiling: &args.compiling };
    if args.stated.suggest {
        return suggest(args, origin);
    }
    let (bound, text) = match &args.launch {
        Some(launch) => origin.load(launch)?,
        None => origin.load_stated(&args.stated)?,
    };
    if let Some(file) = &args.keep_ptx {
        store::write(file, text.as_bytes())?;
    }
    let mut settings = if args.quick { Settings::quick() } else { Settings::thorough() };
    settings.collectives_order = args.warp_order == "assume";
    if args.strict_alignment {
        settings.placement = Placement::Declared;
    }
    let ptxas = predict::resources::Ptxas::find().ok();
    let version = ptxas.as_ref().map_or("none, registers are estimated", |ptxas| ptxas.version());
    let target = bound.kernel.module.target;
    detail(format_args!("target {target}; ptxas: {version}"));
    let gpu = [machine::L4, machine::H200].into_iter().find(|gpu| target.runs_on(gpu.sm));
    let mut check = watched(&bound, &settings, args.timeout)?;
    if let Some(percent) = args.require_coverage {
        check.require_coverage(percent);
    }
    let launch = bound.kernel.launch;
    let gpu = gpu.unwrap_or(machine::L4);
    let mut study = analyse(bound, &launch, Some(text), check, std::slice::from_ref(&gpu), ptxas.as_ref());
    if let Some(resources @ Resources { source: Source::Ptxas(_), .. }) = &study.resources {
        study.check.require_room(&launch, resources, &gpu);
    }
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("check", &object(&study, args.printf)).map_err(CliError::from)
    } else {
        print(&mut out, &study, args.printf)
    })?;
    Ok(match study.check.verdict {
        Verdict::Passed => Status::Passed,
        Verdict::Failed => Status::Failed,
        Verdict::Incomplete => Status::Incomplete,
    })
}

/// Prints a first launch file.
fn suggest(args: &Check, origin: Origin<'_>) -> Result<Status, CliError> {
    if args.json {
        return Err(CliError::NoJson("check --suggest"));
    }
    let text = origin.suggest(args.stated.entry.as_deref())?;
    unless_closed(write!(crate::terminal::out(), "{text}").map_err(CliError::from))?;
    Ok(Status::Passed)
}

/// Runs the gate on a kernel with a time limit, and shows the progress.
pub fn watched(bound: &Bound, settings: &Settings, limit: Duration) -> Result<CheckReport, GateError> {
    let watch = Watch::start(limit);
    Progress::new(None).during(|| watch.to_string(), || check_watched(bound, settings, &watch))
}

/// The number of hazards that are shown unless `--verbose` is given.
const HAZARDS: usize = 8;

/// A line of the kernel's text, counted from 1.
fn quote<'t>(lines: &[&'t str], line: u64) -> Option<&'t str> {
    let index = usize::try_from(line).ok()?.checked_sub(1)?;
    lines.get(index).map(|text| text.trim())
}

/// The check as JSON, with the PTX lines that its hazards name: of CUDA C++ the caller does not have the PTX.
fn object(study: &Study, printf: bool) -> Value {
    let lines: Vec<&str> = study.text.lines().collect();
    let mut object = study.check.json(&json!(study.findings));
    for list in ["hazards", "notes"] {
        for hazard in object[list].as_array_mut().into_iter().flatten() {
            for (line, text) in [("line", "text"), ("other_line", "other_text")] {
                hazard[text] = json!(hazard[line].as_u64().and_then(|line| quote(&lines, line)));
            }
        }
    }
    if printf {
        let printed = study.check.printed.iter();
        object["printed"] = printed
            .map(|printed| json!({ "thread": printed.thread.to_string(), "text": printed.text }))
            .collect();
    }
    object["shapes"] = json!([shape(&study.bound)]);
    object
}

/// The shape that a kernel was run with: its launch, and the problem if the launch file states one.
fn shape(bound: &Bound) -> Value {
    let launch = &bound.kernel.launch;
    json!({
        "grid": [launch.grid.0, launch.grid.1, launch.grid.2],
        "block": [launch.block.0, launch.block.1, launch.block.2],
        "problem": bound.problem.as_ref().map(bench::problem_json),
    })
}

fn print(out: &mut Out, study: &Study, printf: bool) -> Result<(), CliError> {
    let check = &study.check;
    let runs = if check.runs == 1 { "run" } else { "runs" };
    out.paint(check.verdict.into(), check.verdict)?;
    writeln!(out, " after {} {runs} in the emulator", check.runs)?;
    let launch = &study.bound.kernel.launch;
    let judged = judged(study);
    writeln!(out, "1 shape: grid {}, block {}, {judged}", launch.grid, launch.block)?;
    match &check.coverage {
        Some(coverage) => writeln!(out, "{coverage}")?,
        None => writeln!(out, "no run ended, so no instruction counts as executed")?,
    }
    for reason in &check.reasons {
        writeln!(out, "  {}", ptx::quote::words(reason))?;
    }
    let lines: Vec<&str> = study.text.lines().collect();
    for hazard in check.hazards.iter().take(if is_verbose() { usize::MAX } else { HAZARDS }) {
        let places = [Some(hazard.line), hazard.other_line];
        for line in places.into_iter().flatten() {
            if let Some(quoted) = quote(&lines, line.into()) {
                writeln!(out, "  {line:>6} | {}", ptx::quote::cut(quoted))?;
            }
        }
    }
    for note in &check.notes {
        writeln!(out, "note: {}", ptx::quote::words(&note.to_string()))?;
    }
    for warning in &check.warnings {
        writeln!(out, "warning: {}", ptx::quote::words(warning))?;
    }
    for printed in check.printed.iter().filter(|_| printf) {
        writeln!(out, "printf of {}: {}", printed.thread, ptx::quote::words(printed.text.trim_end()))?;
    }
    if let Some(error) = check.error {
        let close = if error.allclose_1e3 { "yes" } else { "no" };
        writeln!(
            out,
            "largest error {:.2e} (allowed {:.2e}), relative {:.2e} (allowed {:.2e}); max_diff {:.6}, allclose(1e-3): {close}",
            error.max_abs, error.max_abs_allowed, error.rel, error.rel_allowed, error.max_diff
        )?;
    }
    for judgement in &check.judgements {
        let (name, wrong) = (&judgement.output, judgement.wrong);
        let (error, allowed) = (judgement.error, judgement.allowed);
        writeln!(
            out,
            "{name}: {wrong} of {} elements wrong; worst error {error:.2e} (allowed {allowed:.2e})",
            judgement.elements
        )?;
    }
    for finding in &study.findings {
        writeln!(out, "{}: {}", finding.name, finding.evidence)?;
    }
    Ok(())
}

/// What judged the output, for the line of the shape.
fn judged(study: &Study) -> String {
    let check = &study.check;
    let mut by: Vec<String> =
        check.judgements.iter().map(|j| format!("{} judged by {}", j.output, j.by)).collect();
    let problem = study.bound.problem.as_ref().map(|problem| format!("{}: ", words(problem)));
    if check.error.is_some() {
        by.insert(0, "output judged by the f64 oracle".to_owned());
    }
    match (&problem, by.is_empty()) {
        (None, true) => "no [problem] and no [reference]: hazards only, output not judged".to_owned(),
        (problem, true) => format!("{}output not judged", problem.as_deref().unwrap_or_default()),
        (problem, false) => format!("{}{}", problem.as_deref().unwrap_or_default(), by.join(", ")),
    }
}

/// A problem in the notation of `--problem`.
fn words(problem: &Problem) -> String {
    format!("problem {}", bench::suites::words(problem))
}
