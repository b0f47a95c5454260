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

/// Examples with their packages. The top of each file says what it measures.
const PROGRAMS: [(&str, &[&str]); 4] = [
    ("flashcore-calibrate", &["tensor_cores", "probes", "approx"]),
    ("flashcore-climb", &["rungs", "forecast"]),
    ("flashcore-bench", &["host", "hopper"]),
    ("flashcore-evolve", &["tune"]),
];

/// The `flashcore` command, which races plans and runs `climb`.
const COMMAND: &str = "flashcore";

/// Builds the programs in release mode and puts them into `.device/`.
///
/// # Errors
/// When there are uncommitted changes, or a build fails.
fn build(root: &Path) -> Result<(), XtaskError> {
    let commit = commit(root)?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root).env("FLASHCORE_COMMIT", &commit).args(["build", "--release"]);
    for (package, examples) in PROGRAMS {
        cargo.args(["--package", package]).args(examples.iter().flat_map(|name| ["--example", name]));
    }
    run(&mut cargo)?;
    let mut cargo = Command::new(env!("CARGO"));
    let build = ["build", "--release", "--package", "flashcore-cli", "--features", "search"];
    run(cargo.current_dir(root).env("FLASHCORE_COMMIT", &commit).args(build))?;
    let folder = root.join(".device");
    let io = |source| XtaskError::Io { path: folder.clone(), source };
    fs::create_dir_all(&folder).map_err(io)?;
    let names = PROGRAMS.iter().flat_map(|(_, examples)| *examples);
    let examples = names.map(|name| (Path::new("examples").join(name), *name));
    for (built, name) in examples.chain([(COMMAND.into(), COMMAND)]) {
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
    let git = |args: &[&str]| -> Result<String, XtaskError> {
        let output = Command::new("git").current_dir(root).args(args).output();
        let output = output.map_err(|source| XtaskError::Start { command: "git".to_owned(), source })?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(XtaskError::Check(format!("git {}: {why}", args.join(" "))));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changes = git(&["status", "--porcelain", "--", ".", ":(exclude)evidence"])?;
    if !changes.is_empty() {
        return Err(XtaskError::Check(format!(
            "evidence comes from a clean commit; commit or stash:\n{changes}"
        )));
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
