//! The bridges in Rust: crates outside the workspace, each with its own lock file.

use std::path::Path;
use std::process::Command;

use crate::signatures;
use crate::{XtaskError, run};

/// A folder in bridges/, which is a workspace.
struct Bridge {
    folder: &'static str,
    /// Whether its crates have the feature `cuda`, whose code is only compiled.
    has_cuda: bool,
}

const CANDLE: Bridge = Bridge { folder: "bridges/candle", has_cuda: true };
const MISTRALRS: Bridge = Bridge { folder: "bridges/mistralrs", has_cuda: true };

/// Bridges that take minutes to compile: mistral.rs has another candle, and burn has 160 crates.
const SCHEDULED: [Bridge; 2] = [MISTRALRS, Bridge { folder: "bridges/burn", has_cuda: false }];

/// Tests the bridge to candle, and checks the crates for mistral.rs, which are compiled from the same
/// sources.
///
/// # Errors
/// When a command fails.
pub fn candle(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    CANDLE.test(root, &cargo)?;
    let mut check = cargo();
    check.current_dir(root.join(MISTRALRS.folder));
    run(check.args(["check", "--locked", "--quiet", "--workspace", "--no-default-features"]))
}

/// Tests the other bridges, has cargo check mistral.rs of the crates registry with its crates for attention
/// replaced, and compares the record of their functions with the registry.
///
/// # Errors
/// When a command fails, or a signature is another one.
pub fn test_scheduled(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    signatures::record(root, &cargo)?;
    for bridge in SCHEDULED {
        bridge.test(root, &cargo)?;
    }
    for features in [&[][..], &["--no-default-features", "--features", "flash-attn-v3"]] {
        let mut check = cargo();
        check.current_dir(root.join("bridges/mistralrs/check")).args(["check", "--quiet"]).args(features);
        run(without_nvcc(root, &mut check))?;
    }
    Ok(())
}

impl Bridge {
    /// Formats, lints and tests the bridge.
    fn test(&self, root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
        let with = |arguments: &[&str]| {
            let mut command = cargo();
            command.current_dir(root.join(self.folder)).args(arguments);
            command
        };
        // `--all` would check the crates of FlashCore again.
        run(&mut with(&["fmt", "--check"]))?;
        let lint = |features: &[&str]| {
            let mut command = with(&["clippy", "--locked", "--quiet", "--workspace", "--all-targets"]);
            command.args(features).args(["--", "-D", "warnings"]);
            command
        };
        // The crates for mistral.rs have the feature `cuda` by default, as it asks for no feature.
        run(&mut lint(&["--no-default-features"]))?;
        if self.has_cuda {
            run(without_nvcc(root, &mut lint(&["--features", "cuda"])))?;
        }
        run(&mut with(&["test", "--locked", "--quiet", "--workspace", "--no-default-features"]))
    }
}

/// candle and mistral.rs compile CUDA kernels with nvcc, in whose place stands a script that makes empty
/// files.
fn without_nvcc<'a>(root: &Path, command: &'a mut Command) -> &'a mut Command {
    // candle reads NVCC, and mistral.rs starts `nvcc` of the PATH.
    let folder = root.join("bridges/candle/tests");
    let rest = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(folder.clone()).chain(std::env::split_paths(&rest)));
    command
        .env("NVCC", folder.join("nvcc"))
        .env("PATH", path.unwrap_or(rest))
        .env("CUDA_COMPUTE_CAP", "90")
        .env("CUDARC_CUDA_VERSION", "13000")
}
