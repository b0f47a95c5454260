//! The bridges to other frameworks: crates outside the workspace, each with its own lock file.

use std::path::Path;
use std::process::Command;

use crate::{XtaskError, run};

/// Formats, lints and tests each bridge. Their half for CUDA devices is only compiled: candle compiles its
/// CUDA kernels with nvcc, in whose place stands a script that makes empty files.
///
/// # Errors
/// When a command fails.
pub fn test(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    let candle = root.join("bridges/candle");
    let in_candle = |arguments: &[&str]| {
        let mut command = cargo();
        command.current_dir(&candle).args(arguments);
        command
    };
    run(&mut in_candle(&["fmt", "--check"]))?;
    run(&mut in_candle(&["clippy", "--locked", "--quiet", "--all-targets", "--", "-D", "warnings"]))?;
    run(in_candle(&["clippy", "--locked", "--quiet", "--features", "cuda", "--", "-D", "warnings"])
        .env("NVCC", candle.join("tests/nvcc.sh"))
        .env("CUDA_COMPUTE_CAP", "90")
        .env("CUDARC_CUDA_VERSION", "13000"))?;
    run(&mut in_candle(&["test", "--locked", "--quiet"]))
}
