//! The command `cargo xtask fuzz`: runs the fuzzer on hostile kernels, launch files and tensor files.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{XtaskError, run};

/// The options of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub struct Fuzz {
    /// Seconds to run
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seed of the random numbers; a seed gives the same cases on the same commit
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run one case again: FILE.ptx with FILE.toml
    #[arg(long, value_name = "FILE.ptx", conflicts_with_all = ["seconds", "seed"])]
    replay: Option<PathBuf>,
}

/// Runs the fuzzer of `calibrate` in the profile of the tests: optimised, with checks of arithmetic overflow.
/// Faults go to `target/fuzz`.
///
/// # Errors
/// When there was a fault.
pub fn fuzz(root: &Path, args: &Fuzz) -> Result<(), XtaskError> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(["run", "--quiet", "--package", "flashcore-calibrate"]);
    command.args(["--example", "fuzz", "--"]);
    match &args.replay {
        Some(file) => command.arg("replay").arg(std::path::absolute(file).unwrap_or_else(|_| file.clone())),
        None => command.args([args.seconds.to_string(), args.seed.to_string()]),
    };
    run(&mut command)
}
