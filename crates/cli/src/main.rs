//! The `flashcore` command: attention, and the automated search that tunes it, from the terminal.

mod args;
mod bench;
mod check;
mod choice;
mod climb;
mod device;
mod doctor;
mod error;
mod evolve;
mod explain;
mod forecast;
mod ledger;
mod microbench;
mod plan;
mod progress;
mod report;
mod run;
mod sandboxed;
mod selftest;
mod serve;
mod source;
mod table;
mod terminal;
mod topk;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use ::report::tables::TableError;
use args::{Cli, Command};
use error::CliError;
use host::panics::Panic;
use terminal::{aside, tell};

/// The exit codes.
///
/// | code | meaning | commands |
/// |---|---|---|
/// | 0 | done, and right as far as it was to be judged | all |
/// | 1 | something is wrong: a kernel failed, is out of its race or not as expected, a failed probe, a ledger that disagrees, a stale table | `check`, `selftest`, `bench`, `climb`, `microbench`, `ledger check`, `tables --check` |
/// | 2 | no verdict: something could not be judged | `check`, `selftest` |
/// | 2 | an internal error of FlashCore | all |
/// | 3 | bad usage, or a file, ledger or device that cannot be used | all |
///
/// The commands that judge are `check`, `selftest`, `bench`, `climb`, `microbench`, `ledger check` and
/// `tables --check`.
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

fn main() -> ExitCode {
    let parsed = numbers(Cli::command()).try_get_matches();
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            refuse(&error);
            return if error.use_stderr() { Status::BadUsage.into() } else { Status::Passed.into() };
        }
    };
    let outcome = host::panics::contain(|| run_command(&cli.command));
    let (status, message) = conclude(outcome);
    if let Some(message) = message {
        if status == Status::Incomplete && wants_json(&cli.command) {
            let object = serde_json::json!({ "verdict": "incomplete", "reasons": [message] });
            // If the reader has closed the pipe, the exit code still carries the verdict.
            let _ = terminal::out().json(&object);
        }
        tell(message);
    }
    status.into()
}

/// Prints a message of clap: the help, or an error that quotes arguments as they were given. Control
/// characters in the arguments are escaped.
fn refuse(error: &clap::Error) {
    let text = error.render().to_string();
    if terminal::escaped(&text) == text {
        // An error here means that the reader has closed the pipe.
        let _ = error.print();
    } else {
        aside(text.trim_end().replace('\n', "\n  "));
    }
}

/// Makes every option that takes a value accept `-1` as its value. The error message is then about the value,
/// not about an unknown option `-1`.
fn numbers(command: clap::Command) -> clap::Command {
    let values = |arg: clap::Arg| {
        let takes = arg.get_action().takes_values();
        arg.allow_negative_numbers(takes)
    };
    command.mut_args(values).mut_subcommands(numbers)
}

fn run_command(command: &Command) -> Result<Status, CliError> {
    match command {
        Command::Climb(args) => climb::climb(args),
        Command::Check(args) => check::check(args),
        Command::Explain(args) => explain::explain(args),
        Command::Run(args) => run::run(args),
        Command::Bench(args) => bench::bench(args),
        Command::Tables(args) => tables(args),
        Command::Report(args) => report::report(args),
        Command::Serve(args) => serve::serve(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Selftest(args) => selftest::selftest(args),
        Command::Microbench(args) => microbench::microbench(args),
        Command::Worker(args) => worker::worker(args),
        Command::Sandboxed(args) => sandboxed::sandboxed(args),
        Command::Evolve(args) => evolve::evolve(args),
        Command::Topk(args) => topk::topk(args),
        Command::Forecast(command) => forecast::forecast(command),
        Command::Ledger(command) => ledger::ledger(command),
    }
}

fn tables(args: &args::Tables) -> Result<Status, CliError> {
    if args.check {
        return match ::report::tables::check(&args.root, &args.documents) {
            Err(stale @ TableError::Stale(_)) => {
                tell(stale);
                Ok(Status::Failed)
            }
            checked => Ok(checked.map(|()| Status::Passed)?),
        };
    }
    for path in ::report::tables::update(&args.root, &args.documents)? {
        tell(format_args!("{} is rewritten", path.display()));
    }
    Ok(Status::Passed)
}

fn wants_json(command: &Command) -> bool {
    match command {
        Command::Climb(args) => args.json,
        Command::Check(args) => args.json,
        Command::Explain(args) => args.json,
        Command::Doctor(args) => args.json,
        Command::Selftest(args) => args.json,
        Command::Microbench(args) => args.json,
        Command::Topk(args) => args.json,
        Command::Evolve(args) => args.json,
        Command::Bench(args) => args.json,
        Command::Forecast(command) => command.json(),
        Command::Ledger(command) => command.json(),
        Command::Run(_)
        | Command::Tables(_)
        | Command::Worker(_)
        | Command::Sandboxed(_)
        | Command::Report(_)
        | Command::Serve(_) => false,
    }
}

/// The exit code and the message of an outcome. A panic is an internal error of FlashCore and no verdict on
/// the input.
fn conclude(outcome: Result<Result<Status, CliError>, Panic>) -> (Status, Option<String>) {
    match outcome {
        Ok(Ok(status)) => (status, None),
        // The reader has closed the pipe (`flashcore … | head`), so no message is printed.
        Ok(Err(CliError::Output(error))) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            (Status::Passed, None)
        }
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
        for part in ["index 7 of 5", "main.rs:", "fault of FlashCore,", "/issues"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert_eq!(conclude(Ok(Ok(Status::Failed))), (Status::Failed, None));
    }
}
