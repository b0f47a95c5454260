//! Builds the programs that run on a GPU machine. They contain the commit of the build, because the GPU
//! machine need not have the repository. Without a clean commit they write no rows.

mod prune;

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::{XtaskError, run};

#[derive(Debug, clap::Args)]
pub struct Evidence {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Remove the rows of evidence/ that newer runs supersede: of each measurement the newest two runs stay
    Prune,
}

/// Builds the programs, or does the named task.
///
/// # Errors
/// When the build or the task fails.
pub fn evidence(root: &Path, args: &Evidence) -> Result<(), XtaskError> {
    match args.task {
        Some(Task::Prune) => prune::prune(root),
        None => build(root),
    }
}

/// The package of both programs, in the features that they need.
const PACKAGE: [&str; 5] = ["--release", "--package", "flashcore-cli", "--features", "search"];

/// The example that measures; the file of each of its programs says what.
const MEASURE: &str = "measure";

/// The `flashcore` command, which races plans and runs `climb`.
const COMMAND: &str = "flashcore";

/// Runs a program of [`MEASURE`] on this machine.
///
/// # Errors
/// When the build or the program fails.
pub fn measure(root: &Path, args: &[String]) -> Result<(), XtaskError> {
    let mut cargo = Command::new(env!("CARGO"));
    run(cargo.current_dir(root).arg("run").args(PACKAGE).args(["--example", MEASURE, "--"]).args(args))
}

/// Builds the programs in release mode and puts them into `.device/`.
///
/// # Errors
/// When there are uncommitted changes, or a build fails.
fn build(root: &Path) -> Result<(), XtaskError> {
    let commit = commit(root)?;
    let folder = root.join(".device");
    let io = |source| XtaskError::Io { path: folder.clone(), source };
    fs::create_dir_all(&folder).map_err(io)?;
    // In two builds: development dependencies, which examples have, would give the command other features.
    for (what, name, built) in [("--example", MEASURE, "examples/measure"), ("--bin", COMMAND, COMMAND)] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root).env("FLASHCORE_COMMIT", &commit).arg("build").args(PACKAGE);
        run(cargo.args([what, name]))?;
        fs::copy(root.join("target/release").join(built), folder.join(name)).map_err(io)?;
        println!("{} at commit {commit}", folder.join(name).display());
    }
    Ok(())
}

/// The commit of a clean checkout.
///
/// # Errors
/// When there are uncommitted changes.
pub fn commit(root: &Path) -> Result<String, XtaskError> {
    let changes = git(root, &["status", "--porcelain", "--", ".", ":(exclude)evidence"])?;
    if !changes.is_empty() {
        return Err(XtaskError::Check(format!(
            "evidence comes from a clean commit; commit or stash:\n{changes}"
        )));
    }
    git(root, &["rev-parse", "--short=12", "HEAD"])
}

/// The output of git in the repository.
///
/// # Errors
/// When git is missing or fails.
pub fn git(root: &Path, args: &[&str]) -> Result<String, XtaskError> {
    let output = Command::new("git").current_dir(root).args(args).output();
    let output = output.map_err(|source| XtaskError::Start { command: "git".to_owned(), source })?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(XtaskError::Check(format!("git {}: {why}", args.join(" "))));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
