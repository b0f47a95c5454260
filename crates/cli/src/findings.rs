//! Prints the findings of a check by source line, as text and as JSON.

use std::io::Write;

use check::causes::{Cause, causes};
use check::gate::{CheckReport, HazardRow};
use check::names::demangle;
use check::sources::{SourceCall, SourceLine, SourceRange, Sources};
use check::study::Study;
use ptx::quote;
use serde_json::{Map, Value, json};

use crate::error::CliError;
use crate::terminal::{Out, Tone, is_verbose};

/// The number of causes and of uncovered lines that are shown unless `--verbose` is given.
const SHOWN: usize = 8;

/// The findings of a check, the worst first.
pub struct Found {
    /// The causes of the failure.
    pub causes: Vec<Cause>,
    /// Causes that do not fail the check.
    pub notes: Vec<Cause>,
    /// Reasons other than hazards why the check did not pass.
    pub reasons: Vec<String>,
    /// Questions that the runs left open.
    pub warnings: Vec<String>,
}

impl Found {
    pub fn of(study: &Study) -> Found {
        Found::in_sources(&study.check, &study.sources)
    }

    /// The findings of a check whose line numbers refer to these sources.
    pub fn in_sources(check: &CheckReport, sources: &Sources) -> Found {
        // Each hazard is also a reason, in words.
        let hazards: std::collections::HashSet<String> =
            check.hazards.iter().map(ToString::to_string).collect();
        let readable = |text: &String| sources.readable(text);
        Found {
            causes: causes(&check.hazards, sources),
            notes: causes(&check.notes, sources),
            reasons: check.reasons.iter().filter(|reason| !hazards.contains(*reason)).map(readable).collect(),
            warnings: check.warnings.iter().map(readable).collect(),
        }
    }

    /// Why the check did not pass: each cause in one sentence, then the other reasons.
    pub fn sentences(&self) -> Vec<String> {
        self.causes.iter().map(sentence).chain(self.reasons.iter().cloned()).collect()
    }
}

/// A line of the source, or of the PTX where there is no source: `row.cu:12`, `line 97`.
fn place(line: u32, source: &Option<SourceLine>) -> String {
    source.as_ref().map_or_else(|| format!("line {line}"), SourceLine::name)
}

/// A cause in one sentence.
pub fn sentence(cause: &Cause) -> String {
    let mut said = cause.kind.name().to_owned();
    // A finding about the whole kernel has line 0.
    if cause.line > 0 {
        said += &format!(" at {}", place(cause.line, &cause.source));
    }
    if let Some(line) = cause.other_line {
        said += &format!(" (and {})", place(line, &cause.other_source));
    }
    said += &format!(": {}", cause.message);
    if let Some(address) = &cause.address {
        said += &format!(", {address}");
    }
    if !cause.threads.is_empty() {
        said += &format!("; {}", cause.threads.join(" and "));
    }
    if cause.count > 1 {
        said += &format!("; {} times", cause.count);
    }
    said
}

/// Prints the causes, each with its lines and its fix, then the other reasons, notes and warnings.
pub fn print<W: Write>(out: &mut Out<W>, found: &Found) -> Result<(), CliError> {
    let most = if is_verbose() { usize::MAX } else { SHOWN };
    for (number, cause) in found.causes.iter().take(most).enumerate() {
        writeln!(out)?;
        out.paint(Tone::Bad, format_args!("{}. ", number + 1))?;
        print_cause(out, cause)?;
    }
    if let Some(more) = found.causes.len().checked_sub(most).filter(|&more| more > 0) {
        writeln!(out, "\n{more} more causes; --verbose shows all")?;
    }
    if !found.causes.is_empty() {
        writeln!(out)?;
    }
    for reason in &found.reasons {
        writeln!(out, "  {}", quote::words(reason))?;
    }
    for cause in found.notes.iter().take(most) {
        write!(out, "note: ")?;
        print_cause(out, cause)?;
    }
    for warning in &found.warnings {
        writeln!(out, "warning: {}", quote::words(warning))?;
    }
    Ok(())
}

fn print_cause<W: Write>(out: &mut Out<W>, cause: &Cause) -> Result<(), CliError> {
    writeln!(out, "{}", quote::words(&sentence(cause)))?;
    print_line(out, cause.line, &cause.text, &cause.source)?;
    if let Some(line) = cause.other_line {
        print_line(out, line, &cause.other_text, &cause.other_source)?;
    }
    if cause.ptx_lines.len() > 1 {
        let lines: std::collections::BTreeSet<u32> = cause.ptx_lines.iter().map(|(line, _)| *line).collect();
        let lines = quote::list(lines.iter().map(u32::to_string));
        match cause.other_line {
            Some(_) => writeln!(out, "     {} pairs of PTX lines, from {lines}", cause.ptx_lines.len())?,
            None => writeln!(out, "     PTX lines {lines}")?,
        }
    }
    writeln!(out, "     cure: {}", cause.cure)?;
    Ok(())
}

/// The source line, the PTX line, then the calls around the source line.
fn print_line<W: Write>(
    out: &mut Out<W>,
    line: u32,
    ptx: &Option<String>,
    source: &Option<SourceLine>,
) -> Result<(), CliError> {
    if let Some(SourceLine { text, within, inlined_at, function, .. }) = source {
        let text = text.as_ref().map_or("(the source file cannot be read)".into(), |text| quote::cut(text));
        writeln!(out, "  {:>18} | {text}", place(line, source))?;
        for call in within {
            writeln!(out, "  {:>18} | by {}", "", quote::words(&called(call)))?;
        }
        for (call, inner) in
            inlined_at.iter().zip([function].into_iter().chain(inlined_at.iter().map(|c| &c.function)))
        {
            let inner = inner.as_ref().map_or_else(String::new, |name| format!("{name}, "));
            writeln!(
                out,
                "  {:>18} | {}inlined at {}",
                "",
                quote::words(&inner),
                quote::words(&called(call))
            )?;
        }
    }
    if let Some(ptx) = ptx {
        writeln!(out, "  {:>18} | {}", format!("PTX {line}"), quote::cut(ptx))?;
    }
    Ok(())
}

fn called(call: &SourceCall) -> String {
    let SourceCall { file, line, function } = call;
    function.as_ref().map_or_else(|| format!("{file}:{line}"), |name| format!("{file}:{line} in {name}"))
}

/// The line that says how much of the kernel ran, and with `all` each source line of which a part did not.
pub fn print_coverage(out: &mut Out, study: &Study, all: bool) -> Result<(), CliError> {
    let Some(coverage) = &study.check.coverage else {
        writeln!(out, "no run ended, so no instruction counts as executed")?;
        return Ok(());
    };
    let missing = || coverage.lines().filter(|(_, executed)| !executed).map(|(line, _)| line);
    let ranges = study.sources.ranges(missing());
    if ranges.is_empty() {
        writeln!(out, "{coverage}")?;
    } else {
        let ranges = ranges.iter().map(SourceRange::to_string);
        writeln!(out, "{}; not fully executed: {}", coverage.summary(), quote::list(ranges))?;
    }
    if !all {
        return Ok(());
    }
    let lines = study.sources.uncovered(coverage);
    for line in &lines {
        let text = line.text.as_ref().map_or("".into(), |text| quote::cut(text));
        let place = format!("{}:{}", line.file, line.line);
        writeln!(out, "  {place:>18} | {text}  ({} of {} instructions)", line.executed, line.instructions)?;
    }
    if lines.is_empty() {
        let ptx = study.sources.ptx_lines();
        for line in missing() {
            let text = (line as usize).checked_sub(1).and_then(|at| ptx.get(at)).copied().unwrap_or("");
            writeln!(out, "  {:>18} | {}", format!("PTX {line}"), quote::cut(text))?;
        }
    }
    Ok(())
}

/// The check as JSON. With `lines` also every hazard and every counter by PTX line.
pub fn object(study: &Study, found: &Found, lines: bool) -> Value {
    let mut object = study.check.json(&findings(study));
    object["reasons"] = json!(found.sentences());
    object["warnings"] = json!(found.warnings);
    let entry = &study.bound.kernel.entry;
    object["kernel"] = json!({ "name": demangle(entry), "entry": entry });
    if lines {
        object["hazard_lines"] =
            study.check.hazards.iter().map(|hazard| json!(HazardRow::from(hazard))).collect();
    }
    for (key, causes) in [("hazards", &found.causes), ("notes", &found.notes)] {
        object[key] = rows(causes, lines);
    }
    if let Some(coverage) = &study.check.coverage {
        object["coverage"]["source_lines"] = json!(study.sources.uncovered(coverage));
    }
    if let Some(counters) = object["counters"].as_object_mut() {
        if !lines {
            counters.remove("instructions");
        }
        counters.insert("source_lines".to_owned(), counters_of_lines(study));
    }
    object
}

/// Causes as JSON, with `lines` also their PTX lines.
pub fn rows(causes: &[Cause], lines: bool) -> Value {
    let mut rows = json!(causes);
    for row in rows.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        if !lines {
            row.remove("ptx_lines");
        }
    }
    rows
}

/// The diagnosis, each finding with its source lines.
pub fn findings(study: &Study) -> Value {
    let mut rows = json!(study.findings);
    for (row, finding) in rows.as_array_mut().into_iter().flatten().zip(&study.findings) {
        let within = |line: &u32| finding.lines.iter().any(|&(first, last)| (first..=last).contains(line));
        let lines = study.lines.iter().map(|cost| cost.line).filter(within);
        row["source"] = json!(study.sources.ranges(lines));
    }
    rows
}

/// The counters of each source line.
fn counters_of_lines(study: &Study) -> Value {
    let row = |line: &check::diagnose::SourceCost| {
        let mut row = match json!(line.counter) {
            Value::Object(counts) => counts,
            _ => Map::new(),
        };
        row.insert("file".to_owned(), json!(line.file));
        row.insert("line".to_owned(), json!(line.cost.line));
        row.insert("text".to_owned(), json!(line.text));
        Value::Object(row)
    };
    study.source_lines.iter().map(row).collect()
}
