//! The command `flashcore evolve`: runs the search and prints its report.

mod drive;
mod print;
mod setup;

use std::path::Path;

use bench::provenance::iso8601_now;
use cpu::kept::KeptPlan;
use evolve::{Cases, Evolution, Promoted, Report};
use host::store::{self, append_line};
use ledger::CandidateId;
use serde_json::{Value, json};

use crate::args::Evolve;
use crate::error::CliError;
use crate::terminal::tell;
use crate::{Status, plans, source, unless_closed};
use drive::Ended;

pub fn evolve(args: &Evolve) -> Result<Status, CliError> {
    for (argument, file) in [("--promote", &args.promote), ("--evidence", &args.evidence)] {
        let Some(file) = file else { continue };
        let seed = args.seed_plan.as_deref().map(|seed| ("--seed-plan", seed));
        let inputs: Vec<_> = [("--ledger", args.ledger.path.as_path())].into_iter().chain(seed).collect();
        source::distinct(argument, file, &inputs)?;
        store::appendable(file)?;
    }
    let (evolution, pool) = match args.resume {
        Some(number) => setup::resume(number, args)?,
        None => setup::begin(args)?,
    };
    let was_finished = evolution.is_finished();
    let (evolution, ended) = drive::drive(evolution, pool, args)?;
    let (report, going_on) = (evolution.report(), drive::how_to_go_on(&evolution));
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        let schema = match report.cases {
            Cases::One(_) => "evolve",
            Cases::Several { .. } => "evolve-several",
        };
        out.json(schema, &json!(report)).map_err(CliError::from)
    } else {
        print::print(&mut out, &report)
    })?;
    match ended {
        Ended::Done => {
            keep(&evolution, &report, args)?;
            // A later plan may have taken the place of the one that a complete run found.
            promote(&evolution, args, !was_finished)?;
        }
        Ended::Stopped => tell(format_args!("stopped; {going_on}")),
    }
    Ok(Status::Passed)
}

/// Appends the report as a row of evidence, with its provenance and without the path of the ledger.
fn keep(evolution: &Evolution, report: &Report, args: &Evolve) -> Result<(), CliError> {
    let Some(file) = &args.evidence else { return Ok(()) };
    let environment = evolution.ledger().run(evolution.run())?.environment;
    let mut row = json!({ "suite": "evolution", "when": iso8601_now() });
    for part in [json!(report), json!(environment)] {
        if let (Some(row), Value::Object(part)) = (row.as_object_mut(), part) {
            row.extend(part);
        }
    }
    if let Some(row) = row.as_object_mut() {
        row.remove("ledger");
    }
    append(file, &row)
}

/// Appends a row unless the file has an equal row. The time of writing is not compared: a complete run gives
/// the same report each time that it is resumed.
fn append(file: &Path, row: &Value) -> Result<(), CliError> {
    let line = row.to_string();
    let undated = |line: &str| {
        let mut row: Value = serde_json::from_str(line).ok()?;
        row.as_object_mut()?.remove("when");
        Some(row)
    };
    // Only a regular file can be searched for the row, not a device or a pipe.
    let kept = if file.is_file() { std::fs::read_to_string(file) } else { Ok(String::new()) };
    let kept = kept.map_err(|source| CliError::Read { path: file.to_path_buf(), source })?;
    let row = undated(&line);
    if kept.lines().any(|line| undated(line) == row) {
        tell(format_args!("{} has this row already", file.display()));
        return Ok(());
    }
    Ok(append_line(file, &line)?)
}

/// Keeps a plan for the calls of this user, and prints what the plan is for.
fn keep_plan(candidate: CandidateId, plan: KeptPlan) -> Result<(), CliError> {
    let (problem, threads) = (plan.problem.to_string(), plan.threads);
    let speedup = plan.speedup.map_or_else(String::new, |ratio| format!(", {ratio:.3}× as fast as before"));
    let file = plans::keep(plan)?;
    tell(format_args!(
        "candidate {} is kept in {}: `flashcore run`, the Rust API and the Python package use it for {problem} \
         on {threads} threads of this processor{speedup} (`flashcore plans list`, `check`, `clear`)",
        candidate.0,
        file.display(),
    ));
    Ok(())
}

/// Stores the winners where calls find them. A plan is kept only if `ends` says that this command ended the
/// run.
fn promote(evolution: &Evolution, args: &Evolve, ends: bool) -> Result<(), CliError> {
    let keeps = ends && !args.no_keep && !evolution.config().no_keep;
    let environment = evolution.ledger().run(evolution.run())?.environment;
    let run = format!("ledger-{}", evolution.run().0);
    for winner in evolution.promoted(&environment, &run, &iso8601_now()) {
        match winner {
            Promoted::Row(row) => args.promote.as_deref().map_or(Ok(()), |file| append(file, &json!(row)))?,
            Promoted::Kept(candidate, plan) if keeps => keep_plan(candidate, *plan)?,
            Promoted::Kept(..) => {}
            Promoted::NoRow { candidate, why } => {
                let Some(file) = &args.promote else { continue };
                let file = file.display();
                let candidate = candidate.0;
                tell(format_args!(
                    "candidate {candidate} won and is no row of {file}: {why}; it stays in the ledger"
                ));
            }
        }
    }
    Ok(())
}
