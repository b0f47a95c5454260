//! The `flashcore` command: attention, and the automated search that tunes it, from the terminal.
//!
//! The search and its ledger are behind the feature `search`. It adds SQLite, Parquet and a web server to the
//! build; `climb`, `check` and `explain` do not need them.
#![cfg_attr(not(feature = "search"), allow(dead_code, reason = "parts that only the search uses"))]

mod accuracy;
mod against;
mod args;
mod bar;
mod baseline;
mod bench;
mod capture;
mod check;
mod choice;
mod climb;
mod device;
mod doctor;
mod emulate;
mod error;
#[cfg(feature = "search")]
mod evolve;
mod explain;
mod findings;
#[cfg(feature = "search")]
mod forecast;
mod help;
mod junit;
#[cfg(feature = "search")]
mod ledger;
mod microbench;
mod plan;
mod plans;
mod progress;
#[cfg(feature = "search")]
mod report;
mod run;
mod sandboxed;
mod sarif;
mod selftest;
#[cfg(feature = "search")]
mod serve;
mod source;
mod table;
mod terminal;
#[cfg(feature = "search")]
mod topk;
mod unjudged;
mod version;
#[cfg(feature = "search")]
mod worker;

use std::process::ExitCode;
use std::time::Instant;

use clap::FromArgMatches;

use ::report::tables::TableError;
use args::{Cli, Command, LabCommand};
use error::CliError;
use host::panics::Panic;
use terminal::tell;

/// The exit codes.
///
/// | code | meaning | commands |
/// |---|---|---|
/// | 0 | success; a check or comparison passed | all |
/// | 1 | a check or comparison failed: a kernel failed, was disqualified or gave an unexpected result, a probe failed, a ledger is inconsistent, a table is stale | `check`, `bench`, `climb`, `ledger check`, `lab selftest`, `lab microbench`, `lab tables --check` |
/// | 2 | no verdict: something could not be judged | `check`, `lab selftest` |
/// | 2 | an internal error of FlashCore | all |
/// | 3 | bad usage, or a file, ledger or device that cannot be used | all |
///
/// The commands that judge are `check`, `bench`, `climb`, `ledger check`, `lab selftest`, `lab microbench`
/// and `lab tables --check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Passed = 0,
    Failed = 1,
    Incomplete = 2,
    BadUsage = 3,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> ExitCode {
        ExitCode::from(status as u8)
    }
}

/// Runs the command that the arguments of this process state.
pub fn main() -> ExitCode {
    let began = Instant::now();
    let parsed = help::command().try_get_matches();
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            help::refuse(&error);
            return if error.use_stderr() { Status::BadUsage.into() } else { Status::Passed.into() };
        }
    };
    terminal::configure(&cli.output);
    let outcome = host::panics::contain(|| run_command(&cli));
    let (status, message) = conclude(outcome);
    if let Some(message) = message {
        if status == Status::Incomplete && cli.output.json {
            let object = serde_json::json!({ "verdict": "incomplete", "reasons": [message] });
            // If the reader has closed the pipe, the exit code still carries the verdict.
            let _ = terminal::out().json("error", &object);
        }
        terminal::fault(message);
    }
    terminal::detail(format_args!("{:.2} s, exit code {}", began.elapsed().as_secs_f64(), status as u8));
    status.into()
}

fn run_command(cli: &Cli) -> Result<Status, CliError> {
    match &cli.command {
        Command::Climb(args) => climb::climb(args),
        Command::Check(args) => check::check(args),
        Command::Explain(args) => explain::explain(args),
        Command::Run(args) => run::run(args),
        Command::Bench(args) => bench::bench(args),
        Command::Accuracy(args) => accuracy::accuracy(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Emulate(args) => emulate::emulate(args),
        Command::Capture(args) => capture::capture(args),
        Command::Plans(command) => plans::plans(command),
        Command::Sandboxed(args) => sandboxed::sandboxed(args),
        Command::Report(_)
        | Command::Serve(_)
        | Command::Worker(_)
        | Command::Evolve(_)
        | Command::Topk(_)
        | Command::Forecast(_)
        | Command::Ledger(_) => run_search(&cli.command),
        Command::Lab(LabCommand::Tables(args)) => tables(args),
        Command::Lab(LabCommand::Selftest(args)) => selftest::selftest(args),
        Command::Lab(LabCommand::Microbench(args)) => microbench::microbench(args),
        Command::Completions(_) if cli.output.json => Err(CliError::NoJson("completions")),
        Command::Man(_) if cli.output.json => Err(CliError::NoJson("man")),
        Command::Completions(args) => help::completions(args),
        Command::Man(args) => help::man(args),
        Command::Version(args) => version::version(args),
    }
}

/// Runs a command of the search.
#[cfg(feature = "search")]
fn run_search(command: &Command) -> Result<Status, CliError> {
    match command {
        Command::Report(args) => report::report(args),
        Command::Serve(args) => serve::serve(args),
        Command::Worker(args) => worker::worker(args),
        Command::Evolve(args) => evolve::evolve(args),
        Command::Topk(args) => topk::topk(args),
        Command::Forecast(command) => forecast::forecast(command),
        Command::Ledger(command) => ledger::ledger(command),
        _ => Err(CliError::NoSearch),
    }
}

/// Says how to get a command with the search.
#[cfg(not(feature = "search"))]
const fn run_search(_: &Command) -> Result<Status, CliError> {
    Err(CliError::NoSearch)
}

/// Updates or checks the tables in documents (`flashcore lab tables`).
fn tables(args: &args::Tables) -> Result<Status, CliError> {
    let (stale, rewritten) = if args.check {
        match ::report::tables::check(&args.root, &args.documents) {
            Err(stale @ TableError::Stale(_)) => (Some(stale.to_string()), Vec::new()),
            checked => (checked.map(|()| None)?, Vec::new()),
        }
    } else {
        (None, ::report::tables::update(&args.root, &args.documents)?)
    };
    if args.json {
        let object = serde_json::json!({ "stale": stale, "rewritten": rewritten });
        unless_closed(terminal::out().json("tables", &object).map_err(CliError::from))?;
    }
    for path in rewritten {
        tell(format_args!("{} is rewritten", path.display()));
    }
    Ok(match stale {
        Some(stale) => {
            terminal::fault(stale);
            Status::Failed
        }
        None => Status::Passed,
    })
}

/// The exit code and the message of an outcome. A panic is an internal error of FlashCore; it is not a
/// verdict on the input.
fn conclude(outcome: Result<Result<Status, CliError>, Panic>) -> (Status, Option<String>) {
    match outcome {
        Ok(Ok(status)) => (status, None),
        // The reader has closed the pipe (`flashcore … | head`), so no message is printed.
        Ok(Err(CliError::Output(error))) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            (Status::Passed, None)
        }
        Ok(Err(error @ CliError::Unknown(_))) => (Status::Incomplete, Some(error.to_string())),
        Ok(Err(error)) => (Status::BadUsage, Some(error.to_string())),
        Err(panic) => (Status::Incomplete, Some(CliError::Internal(panic).to_string())),
    }
}

/// Returns `written`, but treats a closed pipe as success: the verdict stands.
fn unless_closed(written: Result<(), CliError>) -> Result<(), CliError> {
    match written {
        Err(CliError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_no_verdict_and_asks_for_a_report() {
        let (status, message) = conclude(host::panics::contain(|| panic!("index 7 of {}", 5)));
        let message = message.unwrap();
        assert_eq!(status, Status::Incomplete);
        for part in ["index 7 of 5", "lib.rs:", "bug in FlashCore,", "/issues"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert_eq!(conclude(Ok(Ok(Status::Failed))), (Status::Failed, None));
    }
}
