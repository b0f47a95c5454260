//! The command `cargo xtask test`: runs every check that must pass before a change lands.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::tools::Tools;
use crate::{
    XtaskError, book, bridge_crates, bridges, browser, circles, dependencies, evidence, evolution, floors,
    names, run, tables, target, tools, wheel,
};

/// Runs every check, stopping at the first that fails. The last lines say how long each took. The tests in
/// Python, which use one core most of the time, run at the same time as the tests in Rust. The evolution,
/// whose length is fixed, runs at the same time as the checks after them. JAX is installed beside the first
/// checks. The longest tests run a share of
/// their cases, which the hash of the commit chooses; `is_whole` has them run all.
///
/// # Errors
/// When a command fails.
pub fn all(root: &Path, is_whole: bool) -> Result<(), XtaskError> {
    let mut times = Times::default();
    let tools = times.step("tools", || tools::fetch(root))?;
    let cargo = || cargo(root, &tools);
    let jax = Beside::start(root, JAX)?;
    times.step("format", || run(cargo().args(["fmt", "--all", "--check"])))?;
    times.step("book", || book::check(root, &tools))?;
    times.step("dependencies", || {
        dependencies::check(root)?;
        floors::check(root)?;
        circles::check(root)?;
        names::check(root)
    })?;
    times.step("clippy", || clippy(root, cargo))?;
    times.step("documentation", || documentation(cargo))?;
    times.step("tests, compiled", || run(cargo().args(TESTS).arg("--no-run")))?;
    let python = Beside::start(root, "python")?;
    let list = NotRun::start(root)?;
    let share = if is_whole { None } else { share(root) };
    let share = share.iter().map(|number| (filetest::SHARE, number));
    times.step("tests", || run(cargo().args(TESTS).env(filetest::LIST, &list.0).envs(share)))?;
    let evolution = Beside::start(root, "evolution")?;
    times.step("examples of the documentation", || {
        run(cargo().args(["test", "--workspace", "--features", wheel::ALL, "--quiet", "--doc"]))
    })?;
    times.step("bridges in Rust", || bridge_crates::candle(root, cargo))?;
    times.step("browser", || browser::test(root, cargo))?;
    times.step("evolution, waited for", || evolution.finish())?;
    times.step("tests in Python, waited for", || python.finish())?;
    // They also use the environment with PyTorch that these tests may have installed.
    times.step("JAX, waited for", || jax.finish())?;
    times.step("bridges in Python", || bridges::python(root, cargo))?;
    times.step("tables", || tables::make(root, true))?;
    times.tell();
    list.tell()
}

/// The number that chooses the cases of long tests, the first digits of the commit's hash. `None` where the
/// sources are no repository: all cases run.
fn share(root: &Path) -> Option<String> {
    let commit = evidence::git(root, &["rev-parse", "HEAD"]).ok()?;
    let number = u32::from_str_radix(commit.get(..8)?, 16).ok()?;
    eprintln!("xtask: {}={number} chooses the cases of the long tests", filetest::SHARE);
    Some(number.to_string())
}

/// The arguments of cargo for all tests except documentation tests: `--tests` selects the libraries and
/// programs that have unit tests, too. The features are those of the wheel under test, so that cargo compiles
/// each crate once. Clippy has compiled the examples; no test runs one.
const TESTS: [&str; 6] = ["test", "--workspace", "--quiet", "--tests", "--features", wheel::ALL];

/// Installs the packages of the bridges in Python, which waits for the network.
const JAX: &str = "bridges --install";

/// A task of this program that runs at the same time as this one, in a child process. Its output is shown
/// when it has ended. If it is dropped before that, it starts no further command.
struct Beside {
    task: &'static str,
    child: Child,
    output: PathBuf,
}

impl Beside {
    fn start(root: &Path, task: &'static str) -> Result<Beside, XtaskError> {
        let output = target(root)?.join(format!("xtask-{}.txt", task.replace(' ', "")));
        let io = |source| XtaskError::Io { path: output.clone(), source };
        let file = fs::File::create(&output).map_err(io)?;
        let mut command = Command::new(std::env::current_exe().map_err(io)?);
        command.current_dir(root).args(task.split(' ')).stdin(Stdio::null());
        command.stdout(file.try_clone().map_err(io)?).stderr(file);
        let start = |source| XtaskError::Start { command: format!("cargo xtask {task}"), source };
        let child = command.spawn().map_err(start)?;
        Ok(Beside { task, child, output })
    }

    fn finish(mut self) -> Result<(), XtaskError> {
        let io = |source| XtaskError::Io { path: self.output.clone(), source };
        let status = self.child.wait().map_err(io)?;
        eprint!("{}", fs::read_to_string(&self.output).map_err(io)?);
        if status.success() {
            return Ok(());
        }
        Err(XtaskError::Failed { command: format!("cargo xtask {}", self.task), status })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Both calls do nothing if the task has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file to which tests in Rust that need something which this machine lacks write a line each.
struct NotRun(PathBuf);

impl NotRun {
    fn start(root: &Path) -> Result<NotRun, XtaskError> {
        let list = target(root)?.join("not_run.txt");
        fs::write(&list, "").map_err(|source| XtaskError::Io { path: list.clone(), source })?;
        Ok(NotRun(list))
    }

    /// Prints the tests that did not run, and their number.
    fn tell(&self) -> Result<(), XtaskError> {
        let text = fs::read_to_string(&self.0);
        let text = text.map_err(|source| XtaskError::Io { path: self.0.clone(), source })?;
        // A test may ask twice.
        let tests: BTreeSet<&str> = text.lines().collect();
        tests.iter().for_each(|test| eprintln!("xtask: not run: {test}"));
        eprintln!("xtask: not run: {}", tests.len());
        Ok(())
    }
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
    // This selects the whole workspace, so that its libraries keep their features and are not checked again.
    let search = ["clippy", "--workspace", "--lib", "--features", wheel::ALL, "--quiet"];
    run(cargo().args(search).args(["--", "-D", "warnings"]))?;
    if !has_target(root, ARM) {
        eprintln!("xtask: NEON kernels not compiled: `rustup target add {ARM}` adds what it takes");
        return Ok(());
    }
    // Checks the NEON kernels, which no other check compiles on this machine.
    let clippy = ["clippy", "--package", "flashcore-cpu", "--all-targets", "--quiet", "--target", ARM];
    run(cargo().args(clippy).args(["--", "-D", "warnings"]))
}

/// Builds the documentation from the metadata that clippy has written: with another compiler, other arguments
/// or other features, cargo would check all crates again.
fn documentation(cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    let mut doc = cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--quiet", "--features", wheel::ALL]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    // `cargo clippy` sets both. Its program is the one beside cargo, without symbolic links.
    if let Ok(driver) = fs::canonicalize(Path::new(env!("CARGO")).with_file_name("clippy-driver")) {
        doc.env("RUSTC_WORKSPACE_WRAPPER", driver);
        doc.env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
    }
    run(&mut doc)
}

/// Checks and builds the book only.
///
/// # Errors
/// When the build fails or a document has faults.
pub fn book(root: &Path) -> Result<(), XtaskError> {
    book::check(root, &tools::fetch(root)?)
}

/// Tests the bridges only, or those that a schedule tests.
///
/// # Errors
/// When a command fails.
pub fn bridges(root: &Path, is_scheduled: bool) -> Result<(), XtaskError> {
    let tools = tools::fetch(root)?;
    let cargo = || cargo(root, &tools);
    if is_scheduled {
        return bridge_crates::test_scheduled(root, cargo);
    }
    let jax = Beside::start(root, JAX)?;
    bridge_crates::candle(root, cargo)?;
    jax.finish()?;
    bridges::python(root, cargo)
}

/// Tests the pages in a browser only.
///
/// # Errors
/// When a command fails.
pub fn browser(root: &Path) -> Result<(), XtaskError> {
    let tools = tools::fetch(root)?;
    browser::test(root, || cargo(root, &tools))
}

/// Runs the evolution test only.
///
/// # Errors
/// When a command fails or something is missing from its results.
pub fn evolution(root: &Path) -> Result<(), XtaskError> {
    let tools = tools::fetch(root)?;
    evolution::test(root, || cargo(root, &tools))
}

/// A cargo command whose environment names the fetched tools.
fn cargo(root: &Path, tools: &Tools) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).env("FLASHCORE_PTXAS", &tools.ptxas);
    command.env("FLASHCORE_NVDISASM", &tools.nvdisasm).env("FLASHCORE_NVRTC", &tools.nvrtc);
    // Tests neither read nor keep plans of the user who runs them.
    command.env("FLASHCORE_CONFIG_DIR", root.join("target/config"));
    command
}

const ARM: &str = "aarch64-unknown-linux-gnu";

/// Whether rustup is installed and the toolchain in use has the target.
fn has_target(root: &Path, target: &str) -> bool {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).current_dir(root).output();
    listed.is_ok_and(|l| String::from_utf8_lossy(&l.stdout).lines().any(|line| line == target))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a source file in the folder has a code block or an included page in its documentation.
    fn has_examples(folder: &Path) -> bool {
        fs::read_dir(folder).unwrap().flatten().any(|entry| {
            let path = entry.path();
            if path.is_dir() {
                return has_examples(&path);
            }
            let text = fs::read_to_string(&path).unwrap();
            let starts = ["/// ```", "//! ```", "#[doc = include_str"];
            text.lines().any(|line| starts.iter().any(|start| line.trim_start().starts_with(start)))
        })
    }

    /// rustdoc takes seconds to find that a crate has no example, so such crates have `doctest = false`.
    #[test]
    fn crates_with_examples_test_them() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("crates");
        for entry in fs::read_dir(crates).unwrap().flatten() {
            let manifest = fs::read_to_string(entry.path().join("Cargo.toml")).unwrap();
            let tests = !manifest.contains("doctest = false");
            assert_eq!(tests, has_examples(&entry.path().join("src")), "{}", entry.path().display());
        }
    }
}
