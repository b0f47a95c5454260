//! Collects the licence texts that the wheel carries: FlashCore's own two, those of every crate that is
//! linked into the extension module, and those of Rust's standard library.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::dependencies::{self, Package};
use crate::{XtaskError, run};

/// A wheel: the crate that is linked into it, its features, and the folder of its pyproject.toml. This module
/// writes all files in the folder `licenses` there, which `license-files` of the pyproject.toml names.
#[derive(Clone, Copy, Debug)]
pub struct Linked {
    pub package: &'static str,
    pub features: &'static str,
    pub folder: &'static str,
}

/// The wheel of the command.
pub const COMMAND: Linked = Linked { package: "flashcore-cli", features: "search", folder: "crates/cli" };
const CRATES: &str = "third-party.txt";
const STANDARD_LIBRARY: &str = "rust-standard-library.html";

const INTRODUCTION: &str = "\
The program of this wheel has the crates below linked into it, and Rust's standard library, whose notices are in
rust-standard-library.html. Each text is given once; the number in brackets behind a crate leads to it. The code of SQLite,
which libsqlite3-sys contains, is in the public domain.
";

/// Writes the licence texts of a wheel.
///
/// # Errors
/// When a crate or the standard library comes without a licence text, or a file cannot be read or written.
pub fn write(root: &Path, linked: Linked) -> Result<(), XtaskError> {
    let crates = dependencies::linked(root, linked.package, linked.features)?;
    let folder = root.join(linked.folder).join("licenses");
    std::fs::create_dir_all(&folder).map_err(|source| XtaskError::Io { path: folder.clone(), source })?;
    let ours = read(&root.join("LICENSE-MIT"))?;
    let (path, text) = (folder.join(CRATES), notices(&crates, &ours)?);
    std::fs::write(&path, text).map_err(|source| XtaskError::Io { path, source })?;
    let own = ["LICENSE-MIT", "LICENSE-APACHE"].map(|name| (root.join(name), name));
    for (from, name) in own.into_iter().chain([(standard_library(root)?, STANDARD_LIBRARY)]) {
        std::fs::copy(&from, folder.join(name)).map_err(|source| XtaskError::Io { path: from, source })?;
    }
    Ok(())
}

/// Checks that a wheel contains the texts of everything that is linked into it.
///
/// # Errors
/// The texts that are missing.
pub fn check(root: &Path, python: &Path, wheel: &Path, linked: Linked) -> Result<(), XtaskError> {
    let folder = root.join("target/wheels/opened");
    let io = |source| XtaskError::Io { path: folder.clone(), source };
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(io)?;
    }
    run(Command::new(python).args(["-m", "zipfile", "-e"]).arg(wheel).arg(&folder))?;
    let is_info = |path: &PathBuf| path.extension().is_some_and(|end| end == "dist-info");
    let info = std::fs::read_dir(&folder).map_err(io)?.flatten().map(|entry| entry.path()).find(is_info);
    let licences = info.map(|info| info.join("licenses/licenses"));
    let licences =
        licences.ok_or_else(|| XtaskError::Check(format!("{} has no dist-info", wheel.display())))?;
    for (name, needed) in [
        ("LICENSE-MIT", "Permission is hereby granted"),
        ("LICENSE-APACHE", "Apache License"),
        (STANDARD_LIBRARY, "The Rust Standard Library"),
    ] {
        if !read(&licences.join(name))?.contains(needed) {
            return Err(XtaskError::Check(format!("{name} in {} is another text", wheel.display())));
        }
    }
    let text = read(&licences.join(CRATES))?;
    let unnamed: Vec<String> = dependencies::linked(root, linked.package, linked.features)?
        .iter()
        .filter(|package| !is_told(&text, package))
        .map(Package::spec)
        .collect();
    if unnamed.is_empty() {
        return Ok(());
    }
    Err(XtaskError::Check(format!("{} has no licence text of {}", wheel.display(), unnamed.join(", "))))
}

/// Whether the list contains a crate, and every text that its line refers to is present.
fn is_told(text: &str, package: &Package) -> bool {
    let name = format!("{} {}, ", package.name, package.version);
    let Some(line) = text.lines().find(|line| line.starts_with(&name)) else { return false };
    let texts: Vec<&str> = line.split('[').skip(1).filter_map(|part| part.split(']').next()).collect();
    let is_there = |number: &&str| text.contains(&format!("\n{}\n", heading(number)));
    !texts.is_empty() && texts.iter().all(is_there)
}

fn heading(number: &str) -> String {
    format!("======== [{number}] ========")
}

/// The list of the crates, one per line, followed by the texts.
fn notices(crates: &[Package], mit: &str) -> Result<String, XtaskError> {
    let (mut list, mut texts) = (String::new(), Texts::default());
    for package in crates {
        let found = texts_of(package)?;
        let found = if found.is_empty() { vec![stated(package, mit)?] } else { found };
        let numbers: Vec<String> =
            found.into_iter().map(|text| format!("[{}]", texts.number(text))).collect();
        let licence = package.license.as_deref().unwrap_or("no licence stated");
        // Writing to a `String` does not fail.
        let _ = writeln!(list, "{} {}, {licence} {}", package.name, package.version, numbers.join(" "));
    }
    let mut all = format!("{INTRODUCTION}\n{list}");
    for (at, text) in texts.in_order.iter().enumerate() {
        let _ = write!(all, "\n{}\n\n{}\n", heading(&(at + 1).to_string()), text.trim_end());
    }
    Ok(all)
}

/// Each text once. Texts that differ in white space only are one text.
#[derive(Default)]
struct Texts {
    in_order: Vec<String>,
    known: BTreeMap<String, usize>,
}

impl Texts {
    fn number(&mut self, text: String) -> usize {
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        *self.known.entry(words).or_insert_with(|| {
            self.in_order.push(text);
            self.in_order.len()
        })
    }
}

/// The files of a crate that hold licences or notices.
fn texts_of(package: &Package) -> Result<Vec<String>, XtaskError> {
    const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
    let folder = package.folder();
    let io = |source| XtaskError::Io { path: folder.to_path_buf(), source };
    let files = std::fs::read_dir(folder).map_err(io)?.flatten().map(|entry| entry.path());
    let holds_a_text = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().to_uppercase()).unwrap_or_default();
        path.is_file() && NAMES.iter().any(|begin| name.starts_with(begin))
    };
    let mut files: Vec<PathBuf> = files.filter(holds_a_text).collect();
    files.sort();
    files.iter().map(|path| read(path)).collect()
}

/// The text for a crate that ships none: the MIT licence, if the manifest of the crate states it.
fn stated(package: &Package, mit: &str) -> Result<String, XtaskError> {
    let is_mit =
        package.license.as_deref().is_some_and(|licence| licence.split([' ', '/']).any(|word| word == "MIT"));
    let permission = mit.find("Permission is hereby granted").filter(|_| is_mit);
    let permission = permission.and_then(|at| mit.get(at..)).ok_or_else(|| {
        XtaskError::Check(format!("{} ships no licence text and does not state MIT", package.spec()))
    })?;
    let authors = match package.authors.as_slice() {
        [] => format!("the authors of {}", package.name),
        authors => authors.join(", "),
    };
    Ok(format!(
        "MIT License, as the manifest of {} states\n\nCopyright (c) {authors}\n\n{permission}",
        package.name
    ))
}

/// The notices of the standard library of the compiler that is in use.
fn standard_library(root: &Path) -> Result<PathBuf, XtaskError> {
    let mut rustc = Command::new("rustc");
    let found = rustc.current_dir(root).args(["--print", "sysroot"]).output();
    let found =
        found.map_err(|source| XtaskError::Start { command: "rustc --print sysroot".into(), source })?;
    let sysroot = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
    Ok(sysroot.join("share/doc/rust/COPYRIGHT-library.html"))
}

fn read(path: &Path) -> Result<String, XtaskError> {
    let bytes = std::fs::read(path).map_err(|source| XtaskError::Io { path: path.to_path_buf(), source })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_linked_crate_is_told_with_its_text() {
        let root = crate::root();
        let linked = |wheel: crate::wheel::Extension| {
            let Linked { package, features, .. } = wheel.linked;
            dependencies::linked(&root, package, features).unwrap()
        };
        let crates = linked(crate::wheel::SEARCH);
        let names: Vec<&str> = crates.iter().map(|package| package.name.as_str()).collect();
        assert!(names.contains(&"pyo3") && names.contains(&"rusqlite"), "{names:?}");
        // The ordinary wheel has neither the ledger nor the pages.
        let ordinary = linked(crate::wheel::ATTENTION);
        let stores = |package: &Package| ["rusqlite", "parquet", "maud"].contains(&package.name.as_str());
        assert!(!ordinary.iter().any(stores) && ordinary.iter().any(|package| package.name == "pyo3"));
        // Procedural macros, test tools and workspace crates are not linked third-party crates.
        assert!(
            !names.iter().any(|name| ["serde_derive", "proptest", "flashcore-ptx"].contains(name)),
            "{names:?}"
        );
        let text = notices(&crates, &read(&root.join("LICENSE-MIT")).unwrap()).unwrap();
        for package in &crates {
            assert!(is_told(&text, package), "{}", package.spec());
        }
        assert!(text.contains("Apache License") && text.contains("Permission is hereby granted"));
        let cut = text.replace(&format!("\n{}\n", heading("1")), "\n");
        assert!(
            !crates.iter().all(|package| is_told(&cut, package)),
            "a text that is missing goes unnoticed"
        );
    }
}
