//! The command `flashcore ledger`: exports the facts of a ledger, checks its pages, and lists its runs.

use std::io::Write;

use bench::provenance::iso8601;
use host::store::{self, Scratch};
use ledger::{Format, Ledger, LedgerError, RunEvent, RunLine};
use serde_json::json;

use crate::args::{LedgerCheck, LedgerCommand, LedgerExport, LedgerRuns};
use crate::error::CliError;
use crate::terminal::fault;
use crate::{Status, source, table, unless_closed};

pub fn ledger(command: &LedgerCommand) -> Result<Status, CliError> {
    match command {
        LedgerCommand::Export(args) => export(args),
        LedgerCommand::Check(args) => check(args),
        LedgerCommand::Runs(args) => runs(args),
    }
}

fn export(args: &LedgerExport) -> Result<Status, CliError> {
    source::distinct("FILE.jsonl", &args.to, &[("--ledger", &args.ledger.path)])?;
    let ledger = Ledger::read(&args.ledger.path).map_err(beyond)?;
    let format = if args.parquet { Format::Parquet } else { Format::JsonLines };
    if store::is_standard(&args.to) {
        return to_standard_output(&ledger, args);
    }
    let exported = ledger.export(&args.to, format).map_err(beyond)?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("ledger-export", &json!(exported)).map_err(CliError::from)
    } else {
        let rows: Vec<Vec<String>> = exported
            .iter()
            .filter(|e| e.rows > 0 || e.broken.is_some())
            .map(|e| {
                let end = e.broken.as_ref().map_or(String::new(), |why| format!("damaged: {why}"));
                vec![e.table.to_owned(), e.rows.to_string(), end]
            })
            .collect();
        table::print(&mut out, &["table", "rows", ""], &rows).map_err(CliError::from)
    })?;
    let whole = exported.iter().all(|e| e.broken.is_none());
    Ok(if whole { Status::Passed } else { Status::Failed })
}

/// Prints all facts, one JSON object per line.
fn to_standard_output(ledger: &Ledger, args: &LedgerExport) -> Result<Status, CliError> {
    if args.parquet {
        return Err(CliError::Argument {
            argument: "FILE.jsonl",
            value: "-".to_owned(),
            accepted: "a folder, since --parquet writes a file per table".to_owned(),
        });
    }
    source::not_beside_json("FILE.jsonl", &args.to, args.json)?;
    let scratch = Scratch::new()?;
    let path = scratch.path("facts.jsonl");
    let exported = ledger.export(&path, Format::JsonLines).map_err(beyond)?;
    let mut facts = std::fs::File::open(&path).map_err(|source| CliError::Read { path, source })?;
    let copied = std::io::copy(&mut facts, &mut std::io::stdout().lock());
    unless_closed(copied.map(drop).map_err(CliError::from))?;
    for damaged in exported.iter().filter_map(|e| Some((e.table, e.broken.as_ref()?))) {
        fault(format_args!("{} is damaged: {}", damaged.0, damaged.1));
    }
    Ok(if exported.iter().all(|e| e.broken.is_none()) { Status::Passed } else { Status::Failed })
}

/// The usual message for a damaged ledger advises the user to export it. Here the export itself failed, so
/// another message is returned.
fn beyond(error: LedgerError) -> CliError {
    match error {
        LedgerError::Damaged { path, what } => CliError::BeyondExport { path, what },
        other => other.into(),
    }
}

fn check(args: &LedgerCheck) -> Result<Status, CliError> {
    let ledger = Ledger::read(&args.ledger.path)?;
    let found = ledger.check()?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        let object = json!({ "sound": found.is_sound(), "found": found });
        out.json("ledger-check", &object).map_err(CliError::from)
    } else {
        print_check(&mut out, &found)
    })?;
    Ok(if found.is_sound() { Status::Passed } else { Status::Failed })
}

fn print_check(out: &mut impl Write, found: &ledger::Soundness) -> Result<(), CliError> {
    let rows: Vec<Vec<String>> = found
        .facts
        .iter()
        .filter(|(_, rows)| *rows > 0)
        .map(|(table, rows)| vec![(*table).to_owned(), rows.to_string()])
        .collect();
    table::print(out, &["table", "rows"], &rows)?;
    for d in &found.disagreements {
        writeln!(out, "{}: {} by the facts, {} by the summary", d.what, d.facts, d.summary)?;
    }
    for row in &found.altered.named {
        writeln!(out, "altered since it was written: {row}")?;
    }
    if let more @ 1.. = found.altered.rows - found.altered.named.len() as u64 {
        writeln!(out, "altered since they were written: {more} more rows")?;
    }
    if found.dangling > 0 {
        writeln!(out, "{} rows name what is not there", found.dangling)?;
    }
    let verdict = if found.is_sound() { "sound" } else { "NOT sound" };
    writeln!(out, "pages, rows, references and summaries: {verdict}")?;
    Ok(())
}

fn runs(args: &LedgerRuns) -> Result<Status, CliError> {
    let runs = Ledger::read(&args.ledger.path)?.runs()?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("ledger-runs", &json!(runs)).map_err(CliError::from)
    } else {
        let header = [
            "run",
            "begun",
            "device",
            "state",
            "candidates",
            "timed",
            "rejected",
            "promoted",
            "device s",
            "cost",
        ];
        let rows: Vec<Vec<String>> = runs.iter().map(line).collect();
        table::print(&mut out, &header, &rows).map_err(CliError::from)
    })?;
    Ok(Status::Passed)
}

fn line(run: &RunLine) -> Vec<String> {
    let state = match run.last {
        None => "begun",
        Some((_, RunEvent::Resumed)) => "resumed",
        Some((_, RunEvent::Stopped)) => "stopped",
        Some((_, RunEvent::Finished)) => "finished",
    };
    vec![
        run.id.0.to_string(),
        iso8601(run.at.max(0) as u64 / 1000),
        run.device.clone(),
        state.to_owned(),
        run.candidates.to_string(),
        run.timed.to_string(),
        run.rejected.to_string(),
        run.promoted.to_string(),
        format!("{:.1}", run.device_seconds),
        run.cost.map_or("–".to_owned(), |cost| format!("{cost:.2}")),
    ]
}
