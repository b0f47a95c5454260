//! `cargo xtask test`: every check that must pass before a change lands.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::tools::Tools;
use crate::{XtaskError, book, browser, dependencies, evolution, floors, run, tables, tools, wheel};

/// Runs every check, stopping at the first that fails. The last lines say how long each took.
///
/// # Errors
/// The failing command.
pub fn all(root: &Path) -> Result<(), XtaskError> {
    let mut times = Times::default();
    let tools = times.step("tools", || tools::fetch(root))?;
    let cargo = || cargo(root, &tools);
    times.step("format", || run(cargo().args(["fmt", "--all", "--check"])))?;
    times.step("book", || book::check(root, &tools))?;
    times.step("dependencies", || dependencies::check(root).and_then(|()| floors::check(root)))?;
    times.step("clippy", || clippy(root, cargo))?;
    times.step("documentation", || {
        let doc = ["doc", "--workspace", "--no-deps", "--quiet"];
        run(cargo().args(doc).env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    times.step("tests, compiled", || run(cargo().args(["test", "--workspace", "--no-run", "--quiet"])))?;
    times.step("tests", || run(cargo().args(["test", "--workspace", "--quiet"])))?;
    times.step("evolution", || evolution::test(root, cargo))?;
    times.step("browser", || browser::test(root, cargo))?;
    times.step("wheel", || wheel::test(root))?;
    times.step("tables", || tables::make(root, true))?;
    times.tell();
    Ok(())
}

/// How long each step took.
#[derive(Default)]
struct Times(Vec<(&'static str, Duration)>);

impl Times {
    fn step<T>(
        &mut self,
        name: &'static str,
        run: impl FnOnce() -> Result<T, XtaskError>,
    ) -> Result<T, XtaskError> {
        let start = Instant::now();
        let result = run();
        self.0.push((name, start.elapsed()));
        result
    }

    fn tell(&self) {
        for (name, took) in &self.0 {
            eprintln!("xtask: {:>6.0} s  {name}", took.as_secs_f64());
        }
        let total: Duration = self.0.iter().map(|(_, took)| took).sum();
        eprintln!("xtask: all checks passed in {:.0} s", total.as_secs_f64());
    }
}

fn clippy(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))?;
    let search = ["clippy", "--package", "flashcore-python", "--features", "evolve", "--quiet"];
    run(cargo().args(search).args(["--", "-D", "warnings"]))?;
    if !has_target(root, ARM) {
        eprintln!("xtask: NEON kernels not compiled: `rustup target add {ARM}` adds what it takes");
        return Ok(());
    }
    // The NEON kernels, which no other check compiles on this machine.
    let clippy = ["clippy", "--package", "flashcore-cpu", "--all-targets", "--quiet", "--target", ARM];
    run(cargo().args(clippy).args(["--", "-D", "warnings"]))
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
