//! `flashcore evolve`.

mod drive;
mod print;
mod setup;

use std::io::Write;

use lab::evolve::Evolution;
use lab::ledger::{Ledger, RunEvent, RunId};
use lab::provenance::iso8601_now;
use lab::store::append_line;

use crate::args::Evolve;
use crate::error::CliError;
use crate::{Status, unless_closed};
use drive::Ended;

pub fn evolve(args: &Evolve) -> Result<Status, CliError> {
    let ledger = Ledger::open(&args.ledger.path)?;
    let (evolution, crew) = match args.resume {
        Some(run) => {
            let run = which(&ledger, run, args)?;
            setup::resume(ledger, run, args)?
        }
        None => setup::begin(ledger, args)?,
    };
    let (evolution, ended) = drive::drive(evolution, crew, args)?;
    let report = evolution.report();
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        writeln!(out, "{report}").map_err(CliError::from)
    } else {
        print::print(&mut out, &report)
    })?;
    match ended {
        Ended::Done => promote(&evolution, args)?,
        Ended::Stopped => eprintln!(
            "flashcore: stopped; `flashcore evolve --resume {} --ledger {}` goes on",
            evolution.run().0,
            args.ledger.path.display()
        ),
    }
    Ok(Status::Proven)
}

/// The run to go on with.
fn which(ledger: &Ledger, run: Option<i64>, args: &Evolve) -> Result<RunId, CliError> {
    let runs = ledger.runs()?;
    let open = |event: &Option<(i64, RunEvent)>| !matches!(event, Some((_, RunEvent::Finished)));
    let found = match run {
        Some(number) => runs.iter().find(|line| line.id.0 == number),
        None => runs.iter().find(|line| open(&line.last)),
    };
    found.map(|line| line.id).ok_or_else(|| CliError::NoRun { ledger: args.ledger.path.clone() })
}

fn promote(evolution: &Evolution, args: &Evolve) -> Result<(), CliError> {
    let Some(file) = &args.promote else { return Ok(()) };
    let environment = evolution.ledger().run(evolution.run())?.environment;
    let run = format!("ledger-{}", evolution.run().0);
    for row in evolution.promoted(&environment, &run, &iso8601_now()) {
        append_line(file, &serde_json::json!(row).to_string())?;
    }
    Ok(())
}
