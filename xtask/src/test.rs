//! `cargo xtask test`: every check that must pass before a change lands.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::tools::Tools;
use crate::{XtaskError, book, browser, dependencies, evolution, floors, run, tables, tools, wheel};

/// Runs every check, stopping at the first that fails.
///
/// # Errors
/// The failing command.
pub fn all(root: &Path) -> Result<(), XtaskError> {
    let start = Instant::now();
    let tools = tools::fetch(root)?;
    let cargo = || cargo(root, &tools);
    run(cargo().args(["fmt", "--all", "--check"]))?;
    book::check(root, &tools)?;
    dependencies::check(root)?;
    floors::check(root)?;
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))?;
    let search = ["clippy", "--package", "flashcore-python", "--features", "evolve", "--quiet"];
    run(cargo().args(search).args(["--", "-D", "warnings"]))?;
    if has_target(root, ARM) {
        // The NEON kernels, which no other check compiles on this machine.
        let clippy = ["clippy", "--package", "flashcore-cpu", "--all-targets", "--quiet", "--target", ARM];
        run(cargo().args(clippy).args(["--", "-D", "warnings"]))?;
    } else {
        eprintln!("xtask: NEON kernels not compiled: `rustup target add {ARM}` adds what it takes");
    }
    run(cargo().args(["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    run(cargo().args(["test", "--workspace", "--quiet"]))?;
    evolution::test(root, cargo)?;
    browser::test(root, cargo)?;
    wheel::test(root)?;
    tables::make(root, true)?;
    eprintln!("xtask: all checks passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Checks and builds the book only.
///
/// # Errors
/// The failing command, or the faults of the documents.
pub fn book(root: &Path) -> Result<(), XtaskError> {
    book::check(root, &tools::fetch(root)?)
}

/// Tests the pages in a browser only.
///
/// # Errors
/// The failing command.
pub fn browser(root: &Path) -> Result<(), XtaskError> {
    let tools = tools::fetch(root)?;
    browser::test(root, || cargo(root, &tools))
}

/// Runs the evolution test only.
///
/// # Errors
/// The failing command, or what is missing from its results.
pub fn evolution(root: &Path) -> Result<(), XtaskError> {
    let tools = tools::fetch(root)?;
    evolution::test(root, || cargo(root, &tools))
}

/// A cargo command whose environment names the fetched tools.
fn cargo(root: &Path, tools: &Tools) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).env("FLASHCORE_PTXAS", &tools.ptxas);
    command.env("FLASHCORE_NVDISASM", &tools.nvdisasm).env("FLASHCORE_NVRTC", &tools.nvrtc);
    command
}

const ARM: &str = "aarch64-unknown-linux-gnu";

/// Whether rustup is installed and the toolchain in use has the target.
fn has_target(root: &Path, target: &str) -> bool {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).current_dir(root).output();
    listed.is_ok_and(|l| String::from_utf8_lossy(&l.stdout).lines().any(|line| line == target))
}
