//! Updates the tables and pictures of the documents. `flashcore lab tables` makes them from the rows in
//! `evidence/`.

use std::path::Path;
use std::process::Command;

use crate::{XtaskError, run, target, wheel};

/// Documents with tables, relative to the root.
const DOCUMENTS: [&str; 6] = [
    "README.md",
    "docs/src/benchmarks.md",
    "docs/src/guide/caches.md",
    "docs/src/guide/sanitizer.md",
    "docs/src/how/pipeline.md",
    "evidence/tables.md",
];

/// Updates the tables, or with `check` only compares them with their rows.
///
/// # Errors
/// When a table is stale, or the rows cannot be read.
pub fn make(root: &Path, check: bool) -> Result<(), XtaskError> {
    let mut build = Command::new(env!("CARGO"));
    run(build.current_dir(root).args(wheel::CARGO_BUILD).args(["--bin", "flashcore"]))?;
    let mut command = Command::new(target(root)?.join("debug/flashcore"));
    command.current_dir(root).args(["lab", "tables"]).args(DOCUMENTS).args(check.then_some("--check"));
    run(&mut command)
}
