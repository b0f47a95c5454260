//! `flashcore evolve`.

mod drive;
mod print;
mod setup;

use std::io::Write;

use lab::evolve::{Evolution, Promoted};
use lab::provenance::iso8601_now;
use lab::store::append_line;
use serde_json::{Value, json};

use crate::args::Evolve;
use crate::error::CliError;
use crate::{Status, unless_closed};
use drive::Ended;

pub fn evolve(args: &Evolve) -> Result<Status, CliError> {
    let (evolution, crew) = match args.resume {
        Some(number) => setup::resume(number, args)?,
        None => setup::begin(args)?,
    };
    let (evolution, ended) = drive::drive(evolution, crew, args)?;
    let (report, going_on) = (evolution.report(), drive::how_to_go_on(&evolution));
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        writeln!(out, "{report}").map_err(CliError::from)
    } else {
        print::print(&mut out, &report)
    })?;
    match ended {
        Ended::Done => {
            keep(&evolution, report, args)?;
            promote(&evolution, args)?;
        }
        Ended::Stopped => eprintln!("flashcore: stopped; {going_on}"),
    }
    Ok(Status::Proven)
}

/// The report as a row of evidence: what it says, and where it was made. Where the ledger lies is nobody else's concern.
fn keep(evolution: &Evolution, report: Value, args: &Evolve) -> Result<(), CliError> {
    let Some(file) = &args.evidence else { return Ok(()) };
    let environment = evolution.ledger().run(evolution.run())?.environment;
    let mut row = json!({ "suite": "evolution", "when": iso8601_now() });
    for part in [report, json!(environment)] {
        if let (Some(row), Value::Object(part)) = (row.as_object_mut(), part) {
            row.extend(part);
        }
    }
    if let Some(row) = row.as_object_mut() {
        row.remove("ledger");
    }
    Ok(append_line(file, &row.to_string())?)
}

fn promote(evolution: &Evolution, args: &Evolve) -> Result<(), CliError> {
    let Some(file) = &args.promote else { return Ok(()) };
    let environment = evolution.ledger().run(evolution.run())?.environment;
    let run = format!("ledger-{}", evolution.run().0);
    for winner in evolution.promoted(&environment, &run, &iso8601_now()) {
        match winner {
            Promoted::Row(row) => append_line(file, &json!(row).to_string())?,
            Promoted::NoRow { candidate, why } => eprintln!(
                "flashcore: candidate {} won and is no row of {}: {why}; it stays in the ledger",
                candidate.0,
                file.display()
            ),
        }
    }
    Ok(())
}
