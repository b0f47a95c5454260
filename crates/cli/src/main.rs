//! The `flashcore` command: attention, and the machine that makes it faster, from the terminal.

mod args;
mod bench;
mod check;
mod climb;
mod doctor;
mod error;
mod explain;
mod run;
mod source;
mod table;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use error::CliError;

/// What `check` exits with; the other commands use the first and the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Proven = 0,
    Refuted = 1,
    Incomplete = 2,
    BadUsage = 3,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> ExitCode {
        ExitCode::from(status as u8)
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A pipe that is closed is the reader's choice.
            let _ = error.print();
            return if error.use_stderr() { Status::BadUsage.into() } else { Status::Proven.into() };
        }
    };
    let outcome = match &cli.command {
        Command::Climb(args) => climb::climb(args),
        Command::Check(args) => check::check(args),
        Command::Explain(args) => explain::explain(args),
        Command::Run(args) => run::run(args),
        Command::Bench(args) => bench::bench(args),
        Command::Doctor => doctor::doctor(),
    };
    match outcome {
        Ok(status) => status.into(),
        // Someone closed the pipe (`flashcore … | head`): there is no one left to tell.
        Err(CliError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Status::Proven.into()
        }
        Err(error) => {
            eprintln!("flashcore: {error}");
            Status::BadUsage.into()
        }
    }
}
