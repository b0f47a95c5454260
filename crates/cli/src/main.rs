//! The `flashcore` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    flashcore_cli::main()
}
