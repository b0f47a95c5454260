//! The documents: the book under `docs/`, which mdBook builds, and the pages at the root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tools::Tools;
use crate::{XtaskError, columns, links, run};

/// The folder of the book's pages, relative to the root.
const BOOK: &str = "docs/src";

/// Documents outside the book, relative to the root.
const DOCUMENTS: [&str; 10] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "python/README.md",
    "python/bench/README.md",
    "evidence/notes/hopper.md",
    "evidence/tables.md",
    "xtask/corpus/findings.md",
];

/// Checks the links and the line lengths of the documents, then builds the book into `target/book`.
///
/// # Errors
/// The faults of the documents, or a build that fails.
pub fn check(root: &Path, tools: &Tools) -> Result<(), XtaskError> {
    let mut pages = files(root, BOOK, &["md"])?;
    for document in DOCUMENTS {
        pages.push(file(root, document)?);
    }
    let mut faults = links::faults(root, &pages);
    faults.extend(columns::faults(root)?);
    if !faults.is_empty() {
        return Err(XtaskError::Check(faults.join("\n")));
    }
    run(Command::new(&tools.mdbook).current_dir(root).args(["build", "docs"]))
}

/// A file of the repository.
pub struct File {
    /// The path relative to the root, with `/` between folders.
    pub path: String,
    pub text: String,
}

impl File {
    pub fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }
}

/// Reads one file.
///
/// # Errors
/// When the file cannot be read.
pub fn file(root: &Path, path: &str) -> Result<File, XtaskError> {
    let io = |source| XtaskError::Io { path: root.join(path), source };
    Ok(File { path: path.to_owned(), text: fs::read_to_string(root.join(path)).map_err(io)? })
}

/// The files below `folder` with one of these extensions, sorted by path. Hidden folders are left out.
///
/// # Errors
/// When a folder or file cannot be read.
pub fn files(root: &Path, folder: &str, extensions: &[&str]) -> Result<Vec<File>, XtaskError> {
    let (mut found, mut open) = (Vec::new(), vec![root.join(folder)]);
    while let Some(dir) = open.pop() {
        let io = |source| XtaskError::Io { path: dir.clone(), source };
        for entry in fs::read_dir(&dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
            let wanted = path.extension().is_some_and(|e| extensions.iter().any(|w| e == *w));
            if path.is_dir() && !hidden {
                open.push(path);
            } else if wanted {
                found.push(path);
            }
        }
    }
    found.sort();
    found.iter().map(|path| file(root, &relative(root, path))).collect()
}

/// The path relative to the root, with `/` between folders.
fn relative(root: &Path, path: &Path) -> String {
    let short: PathBuf = path.strip_prefix(root).unwrap_or(path).into();
    short.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}
