//! The bridges to other frameworks: crates outside the workspace, each with its own lock file.

use std::path::Path;
use std::process::Command;

use crate::signatures;
use crate::{XtaskError, run};

/// The folders in bridges/, each a workspace, and whether it has the feature `cuda`.
const BRIDGES: [(&str, bool); 2] = [("candle", true), ("mistralrs", true)];

/// Formats, lints and tests each bridge. Their half for CUDA devices is only compiled.
///
/// # Errors
/// When a command fails.
pub fn test(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    for (name, has_cuda) in BRIDGES {
        let folder = root.join("bridges").join(name);
        let in_folder = |arguments: &[&str]| {
            let mut command = cargo();
            command.current_dir(&folder).args(arguments);
            command
        };
        run(&mut in_folder(&["fmt", "--all", "--check"]))?;
        let lint = |options: &[&str]| {
            let mut command = in_folder(&["clippy", "--locked", "--quiet", "--workspace"]);
            command.args(options).args(["--", "-D", "warnings"]);
            command
        };
        // mistral.rs' crates have the feature `cuda` by default.
        run(&mut lint(&["--all-targets", "--no-default-features"]))?;
        if has_cuda {
            run(without_nvcc(root, &mut lint(&["--features", "cuda"])))?;
        }
        run(&mut in_folder(&["test", "--locked", "--quiet", "--workspace", "--no-default-features"]))?;
    }
    signatures::check(root)
}

/// Has cargo check mistral.rs of the crates registry, whose crates for attention `[patch]` replaces, and
/// compares the signatures of the crates that are replaced with those that were recorded.
///
/// # Errors
/// When a command fails, or a signature is another one.
pub fn mistralrs(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    signatures::record(root, &cargo)?;
    let mut check = cargo();
    check.current_dir(root.join("bridges/mistralrs/check")).args(["check", "--quiet"]);
    run(without_nvcc(root, &mut check))
}

/// candle and mistral.rs compile CUDA kernels with nvcc, in whose place stands a script that makes empty
/// files.
fn without_nvcc<'a>(root: &Path, command: &'a mut Command) -> &'a mut Command {
    command
        .env("NVCC", root.join("bridges/candle/tests/nvcc.sh"))
        .env("CUDA_COMPUTE_CAP", "90")
        .env("CUDARC_CUDA_VERSION", "13000")
}
