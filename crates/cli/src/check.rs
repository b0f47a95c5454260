//! The command `flashcore check`: checks a kernel in the emulator.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use check::gate::{CheckReport, Mutant, MutantResult, Settings, Verdict, Watch, check_mutants};
use check::launchfile::Bound;
use check::names::demangle;
use check::sources::Sources;
use check::study::{Study, analyse};
use emu::Placement;
use host::store;
use predict::resources::{ResourceSource, Resources};
use predict::{Gpu, machine};
use problem::Problem;
use serde_json::{Value, json};

use crate::against::Earlier;
use crate::args::Check;
use crate::baseline::Baseline;
use crate::error::CliError;
use crate::findings::{self, Found};
use crate::progress::watched;
use crate::source::Origin;
use crate::terminal::{Out, detail, is_quiet};
use crate::unjudged::Unjudged;
use crate::{Status, junit, sarif, source, unless_closed};

pub fn check(args: &Check) -> Result<Status, CliError> {
    source::keepable(args.keep_ptx.as_deref(), &inputs(args))?;
    let origin = Origin { file: &args.file, sm: args.sm, compiling: &args.compiling, beside: None };
    if args.stated.suggest {
        return suggest(args, origin);
    }
    if args.lines && !args.json {
        return Err(CliError::Needs { argument: "--lines", needed: "--json" });
    }
    let reports = Reports::planned(args)?;
    let started = Instant::now();
    let loaded = match &args.launch {
        Some(launch) => origin.load(launch),
        None => origin.load_stated(&args.stated),
    };
    if let Err(CliError::Unknown(unjudged)) = &loaded {
        reports.write_unjudged(unjudged, started.elapsed().as_secs_f64())?;
    }
    let (mut bound, text) = loaded?;
    if let Some(file) = &args.keep_ptx {
        store::write(file, text.as_bytes())?;
    }
    let mut settings = if args.quick { Settings::quick() } else { Settings::thorough() };
    settings.by_the_letter = args.level == "ptx";
    settings.repeat_races = true;
    settings.budget = args.budget;
    if args.strict_alignment {
        settings.placement = Placement::Declared;
    }
    let ptxas = predict::resources::Ptxas::find().ok();
    let version = ptxas.as_ref().map_or("none, registers are estimated", |ptxas| ptxas.version());
    let target = bound.kernel.module.target;
    detail(format_args!("target {target}; ptxas: {version}"));
    let gpu = gpu(args.gpu.as_deref(), target)?;
    let sources = Sources::new(text, args.file.parent());
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?.unwrap_or_default();
    let earlier = args.against.as_deref().map(|file| Earlier::check(file, args, &settings)).transpose()?;
    if let Some(earlier) = &earlier {
        earlier.judge(&mut bound)?;
    }
    settings.allowed = sources.allowed(|file, text| {
        let of_earlier = earlier.as_ref().map_or_else(Vec::new, |earlier| earlier.kinds(text));
        [baseline.kinds(file, text), of_earlier].concat()
    })?;
    let mut check = watched(&bound, &settings, args.timeout, args.json)?;
    if let Some(percent) = args.require_coverage {
        check.require_coverage(percent);
    }
    let mut mutants = match args.mutants {
        Some(most) if check.verdict == Verdict::Passed => {
            check_mutants(&bound, &settings, &check, most, &Watch::start(args.timeout))?
        }
        _ => Vec::new(),
    };
    let launch = bound.kernel.launch;
    let mut study = analyse(bound, None, Some(sources), check, std::slice::from_ref(gpu), ptxas.as_ref());
    // A check uses a small launch, however large the kernel's real launch is.
    study.findings.retain(|finding| finding.name != kernels::Symptom::SmallGrid);
    if let Some(resources @ Resources { source: ResourceSource::Ptxas(_), .. }) = &study.resources {
        study.check.require_room(&launch, resources, gpu);
    }
    for mutant in &mut mutants {
        if let MutantResult::Failed(reason) | MutantResult::Incomplete(reason) = &mut mutant.result {
            *reason = study.sources.readable(reason);
        }
    }
    let found = Found::of(&study);
    reports.write(&study, &found, started.elapsed().as_secs_f64())?;
    if !reports.on_standard_output() {
        let mut out = crate::terminal::out();
        unless_closed(if args.json {
            let mut object = object(&study, &found, args);
            if args.mutants.is_some() {
                object["mutants"] = json!(mutants);
            }
            if let Some(earlier) = &earlier {
                object["against"] = earlier.object(&found);
            }
            out.json("check", &object).map_err(CliError::from)
        } else {
            print(&mut out, &study, &found, args)
                .and_then(|()| earlier.map_or(Ok(()), |earlier| earlier.print(&mut out, &found)))
                .and_then(|()| print_mutants(&mut out, &study, &mutants))
        })?;
    }
    Ok(match study.check.verdict {
        Verdict::Passed => Status::Passed,
        Verdict::Failed => Status::Failed,
        Verdict::Incomplete => Status::Incomplete,
    })
}

/// The input files with the arguments that name them.
fn inputs(args: &Check) -> Vec<(&'static str, &Path)> {
    let launch = args.launch.as_deref().map(|launch| ("--launch", launch));
    let baseline = args.baseline.as_deref().map(|baseline| ("--baseline", baseline));
    let against = args.against.as_deref().map(|against| ("--against", against));
    let others = args.compiling.others.iter().map(|other| ("--with", other.as_path()));
    std::iter::once(("FILE", args.file.as_path()))
        .chain(launch)
        .chain(baseline)
        .chain(against)
        .chain(others)
        .collect()
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

/// The GPU for the time and the resources: the one that `--gpu` names, else the first that runs the target.
fn gpu(name: Option<&str>, target: ptx::Target) -> Result<&'static Gpu, CliError> {
    let Some(name) = name else {
        let runs = |gpu: &&Gpu| target.runs_on(gpu.sm);
        return Ok([&machine::L4, &machine::H200].into_iter().find(runs).unwrap_or(&machine::L4));
    };
    let fits = machine::MACHINES.into_iter().filter(|gpu| target.runs_on(gpu.sm));
    Gpu::named(name).filter(|gpu| target.runs_on(gpu.sm)).ok_or_else(|| CliError::Argument {
        argument: "--gpu",
        value: name.to_owned(),
        accepted: format!(
            "a GPU that runs {target}: {}",
            fits.map(|g| g.name).collect::<Vec<_>>().join(", ")
        ),
    })
}

/// The files for other programs that a check writes in addition to its output.
struct Reports<'a> {
    args: &'a Check,
}

impl Reports<'_> {
    /// Rejects files that cannot be written, before the kernel is run.
    fn planned(args: &Check) -> Result<Reports<'_>, CliError> {
        let reports = Reports { args };
        let mut inputs = inputs(args);
        inputs.extend(args.keep_ptx.as_deref().map(|file| ("--keep-ptx", file)));
        for (argument, path) in reports.paths() {
            source::not_beside_json(argument, path, args.json)?;
            if store::is_standard(path) {
                continue;
            }
            source::distinct(argument, path, &inputs)?;
            store::writable(path)?;
            inputs.push((argument, path));
        }
        if reports.paths().filter(|(_, path)| store::is_standard(path)).count() > 1 {
            let accepted = "a file, since --sarif prints to standard output".to_owned();
            return Err(CliError::Argument { argument: "--junit", value: "-".to_owned(), accepted });
        }
        Ok(reports)
    }

    fn paths(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let given = [("--sarif", &self.args.sarif), ("--junit", &self.args.junit)];
        given.into_iter().filter_map(|(argument, path)| Some((argument, path.as_deref()?)))
    }

    /// Whether one of the files is standard output, which then carries nothing else.
    fn on_standard_output(&self) -> bool {
        self.paths().any(|(_, path)| store::is_standard(path))
    }

    fn write(&self, study: &Study, found: &Found, seconds: f64) -> Result<(), CliError> {
        let Check { file, launch, .. } = self.args;
        self.write_each(
            || sarif::log(study, found, file, launch.as_deref()),
            || junit::suite(study, found, file, seconds),
        )
    }

    /// The files of a kernel that did not run.
    fn write_unjudged(&self, unjudged: &Unjudged, seconds: f64) -> Result<(), CliError> {
        self.write_each(
            || sarif::unjudged(unjudged, self.args.launch.as_deref()),
            || junit::unjudged(unjudged, seconds),
        )
    }

    fn write_each(&self, sarif: impl Fn() -> Value, junit: impl Fn() -> String) -> Result<(), CliError> {
        for (argument, path) in self.paths() {
            let text = if argument == "--sarif" { format!("{:#}\n", sarif()) } else { junit() };
            store::write(path, text.as_bytes())?;
        }
        Ok(())
    }
}

/// The check as JSON.
fn object(study: &Study, found: &Found, args: &Check) -> Value {
    let mut object = findings::object(study, found, args.lines);
    if args.printf {
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

fn print(out: &mut Out, study: &Study, found: &Found, args: &Check) -> Result<(), CliError> {
    let check = &study.check;
    out.paint(check.verdict.into(), check.verdict)?;
    writeln!(out, " {}", after(check))?;
    let launch = &study.bound.kernel.launch;
    let judged = judged(study);
    let kernel = study.bound.steps().map(|kernel| demangle(&kernel.entry));
    let kernel = ptx::quote::list(kernel.map(|name| ptx::quote::cut(&name).into_owned()));
    writeln!(out, "1 shape of {kernel}: grid {}, block {}, {judged}", launch.grid, launch.block)?;
    if let Some(sample) = &check.sample {
        writeln!(out, "{sample}")?;
    }
    findings::print_coverage(out, study, args.coverage)?;
    findings::print(out, found)?;
    for printed in check.printed.iter().filter(|_| args.printf) {
        writeln!(out, "printf of {}: {}", printed.thread, ptx::quote::words(printed.text.trim_end()))?;
    }
    if args.printf && check.printed.is_empty() {
        writeln!(out, "printf: nothing was printed in the first run")?;
    }
    let left_out = check.counters.prints.saturating_sub(check.printed.len() as u64);
    if args.printf && left_out > 0 {
        writeln!(out, "printf: {left_out} more texts are not shown")?;
    }
    if let Some(error) = check.error {
        let close = if error.allclose_1e3 { "yes" } else { "no" };
        writeln!(
            out,
            "nearest its bound, over all runs: absolute error {:.2e} (allowed {:.2e}), relative {:.2e} (allowed {:.2e})",
            error.max_abs, error.max_abs_allowed, error.rel, error.rel_allowed
        )?;
        writeln!(out, "largest difference, of any run: {:.2e}; allclose(1e-3): {close}", error.max_diff)?;
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
    if args.diagnose && check.verdict != Verdict::Failed && !is_quiet() {
        print_diagnosis(out, study)?;
    }
    Ok(())
}

/// Prints what costs time.
fn print_diagnosis(out: &mut Out, study: &Study) -> Result<(), CliError> {
    if !study.findings.is_empty() {
        let machine =
            study.prediction().map_or_else(String::new, |p| format!(", predicted on {}", p.machine));
        writeln!(out, "what costs time{machine}:")?;
    }
    for finding in &study.findings {
        writeln!(out, "  {}: {}", finding.name, finding.evidence)?;
    }
    Ok(())
}

/// The number of runs, with that of the planned runs if some were left out.
fn runs(done: usize, planned: usize) -> String {
    match (done, planned) {
        (done, planned) if done < planned => format!("{done} of {planned} runs"),
        (1, _) => "1 run".to_owned(),
        (done, _) => format!("{done} runs"),
    }
}

/// The runs, shapes and CTAs of a check, for the line of the verdict. With a budget it says how much did not
/// run.
fn after(check: &CheckReport) -> String {
    let done = check.runs as usize;
    let Some(sample) = &check.sample else { return format!("after {} in the emulator", runs(done, done)) };
    let mut said = format!("after {} ", runs(done, sample.runs_planned));
    if sample.ctas_run < sample.ctas {
        said += &format!("of {} of {} CTAs ", sample.ctas_run, sample.ctas);
    }
    said += &format!("in the emulator, within {} s", sample.seconds);
    if let Some(coverage) = &check.coverage {
        // Rounded down, so that 99.97 % does not read as 100 %.
        said += &format!(", {} % of instructions executed", (10.0 * coverage.percent()).floor() / 10.0);
    }
    match sample.ctas - sample.ctas_run {
        0 => said,
        never => said + &format!("; {never} CTAs never ran"),
    }
}

/// Prints what became of each mutant.
fn print_mutants(out: &mut Out, study: &Study, mutants: &[Mutant]) -> Result<(), CliError> {
    for mutant in mutants {
        let place = match mutant.line {
            0 => "an argument".to_owned(),
            line => study.sources.place(line),
        };
        let result = match &mutant.result {
            MutantResult::Failed(reason) => format!("found: {}", ptx::quote::words(reason)),
            MutantResult::Incomplete(reason) => format!("no verdict: {}", ptx::quote::words(reason)),
            MutantResult::Tolerated(what) => {
                format!("within the tolerance: no hazard, {what}, by less than the reference allows")
            }
            MutantResult::Differs(what) => format!("no hazard, {what}: a [reference] would find it"),
            MutantResult::Same => "not found: no hazard, and equal outputs".to_owned(),
            MutantResult::NotExecuted => "not checked: the instruction is not executed".to_owned(),
            MutantResult::NoEffect => {
                "not checked: with this fault the comparison has the same result in every thread".to_owned()
            }
        };
        writeln!(out, "mutant {} at {place}: {result}", in_words(&mutant.fault))?;
    }
    if !mutants.is_empty() {
        writeln!(out, "mutants: {}", totals(mutants))?;
    }
    Ok(())
}

/// The name of a fault in words: `drop barrier` for `DropBarrier`.
fn in_words(fault: &str) -> String {
    let mut words = String::new();
    for c in fault.chars() {
        if c.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(c.to_lowercase());
    }
    words
}

/// How many mutants were found, and what became of the others.
fn totals(mutants: &[Mutant]) -> String {
    let count =
        |is: &dyn Fn(&MutantResult) -> bool| mutants.iter().filter(|mutant| is(&mutant.result)).count();
    let counts = [
        (count(&|r| matches!(r, MutantResult::Failed(_))), "found"),
        (count(&|r| matches!(r, MutantResult::Tolerated(_))), "within the tolerance"),
        (count(&|r| matches!(r, MutantResult::Differs(_))), "only a [reference] would find"),
        (count(&|r| matches!(r, MutantResult::Same)), "not found"),
        (count(&|r| matches!(r, MutantResult::Incomplete(_))), "without a verdict"),
        (count(&|r| matches!(r, MutantResult::NotExecuted | MutantResult::NoEffect)), "not checked"),
    ];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    counts.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}

/// The name of the reference that judged the output, for the line of the shape.
fn judged(study: &Study) -> String {
    let check = &study.check;
    let mut by: Vec<String> =
        check.judgements.iter().map(|j| format!("{} judged by {}", j.output, j.by)).collect();
    let problem = study.bound.problem.as_ref().map(|problem| format!("{}: ", words(problem)));
    if check.error.is_some() {
        by.insert(0, "output judged by the f64 oracle".to_owned());
    }
    match (&problem, by.is_empty()) {
        (_, true) if !study.bound.references.is_empty() => {
            "a [reference], output not judged: the check ended before it".to_owned()
        }
        (None, true) => "no [problem] and no [reference]: hazards only, output not judged".to_owned(),
        (problem, true) => format!("{}output not judged", problem.as_deref().unwrap_or_default()),
        (problem, false) => format!("{}{}", problem.as_deref().unwrap_or_default(), by.join(", ")),
    }
}

/// A problem in the notation of `--problem`.
fn words(problem: &Problem) -> String {
    format!("problem {}", bench::suites::words(problem))
}

#[cfg(test)]
mod tests {
    use check::gate::{Mutant, MutantResult};

    #[test]
    fn mutants_are_named_in_words_and_summed() {
        assert_eq!(super::in_words("DropBarrier"), "drop barrier");
        let mutant = |result| Mutant { fault: String::new(), orders: false, line: 1, result };
        let results = [
            MutantResult::Failed("race".into()),
            MutantResult::Tolerated("9 bytes differ".into()),
            MutantResult::Differs("9 bytes differ".into()),
            MutantResult::NoEffect,
            MutantResult::NotExecuted,
        ];
        let mutants = results.map(mutant);
        let totals = "1 found, 1 within the tolerance, 1 only a [reference] would find, 2 not checked";
        assert_eq!(super::totals(&mutants), totals);
    }

    #[test]
    fn the_plural_follows_the_planned_runs() {
        let said = [(1, 1), (3, 3), (1, 3)].map(|(done, planned)| super::runs(done, planned));
        assert_eq!(said, ["1 run", "3 runs", "1 of 3 runs"]);
    }
}
