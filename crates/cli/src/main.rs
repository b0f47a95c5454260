//! The `flashcore` program: calls the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    flashcore_cli::main()
}
