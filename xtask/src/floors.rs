//! Checks the crates of the workspace against the layers of `ARCHITECTURE.md`: a crate may use only the
//! crates on lines below its own, in its tests and build scripts too. It follows that no two crates use each
//! other.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::XtaskError;

/// The heading of the layer diagram, and the heading of the section after it.
const SECTION: [&str; 2] = ["\n## Crate layers\n", "\n## "];

/// The crates outside of `crates/`.
const PYTHON: [&str; 2] = ["python", "python/bench"];

/// The parts of a `Cargo.toml` that are read here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Manifest {
    dependencies: BTreeMap<String, toml::Value>,
    dev_dependencies: BTreeMap<String, toml::Value>,
    build_dependencies: BTreeMap<String, toml::Value>,
    target: BTreeMap<String, Manifest>,
}

impl Manifest {
    /// The names of all dependencies.
    fn names(&self) -> Vec<&str> {
        let own = [&self.dependencies, &self.dev_dependencies, &self.build_dependencies];
        let own = own.into_iter().flat_map(|list| list.keys().map(String::as_str));
        own.chain(self.target.values().flat_map(Manifest::names)).collect()
    }
}

/// Compares the manifests of all crates with the diagram.
///
/// # Errors
/// Crates that the diagram lacks or contains twice, and dependencies that do not point downwards.
pub fn check(root: &Path) -> Result<(), XtaskError> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|source| XtaskError::Io { path: path.to_path_buf(), source })
    };
    let folder = root.join("crates");
    let io = |source| XtaskError::Io { path: folder.clone(), source };
    let mut manifests = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        manifests.insert(name, entry.path().join("Cargo.toml"));
    }
    for python in PYTHON {
        manifests.insert(python.to_owned(), root.join(python).join("Cargo.toml"));
    }
    let mut crates = BTreeMap::new();
    for (name, path) in manifests {
        let manifest: Manifest = toml::from_str(&read(&path)?)
            .map_err(|error| XtaskError::Check(format!("{}: {error}", path.display())))?;
        crates.insert(name, manifest);
    }
    let faults = faults(&read(&root.join("ARCHITECTURE.md"))?, &crates);
    if !faults.is_empty() {
        return Err(XtaskError::Check(format!("ARCHITECTURE.md, crate layers: {}", faults.join("; "))));
    }
    eprintln!("xtask: {} crates use only the layers below them", crates.len());
    Ok(())
}

/// The line of each crate in the diagram, counted from the top.
fn lines(architecture: &str) -> Vec<(&str, usize)> {
    let section = architecture.split_once(SECTION[0]).map_or("", |(_, rest)| rest);
    let section = section.split_once(SECTION[1]).map_or(section, |(section, _)| section);
    let picture = section.lines().filter(|line| line.starts_with("    "));
    let crates = picture.enumerate().flat_map(|(at, line)| {
        let words = line.split_whitespace();
        words.filter_map(move |word| {
            let python = PYTHON.into_iter().find(|python| word.strip_suffix('/') == Some(python));
            python.or_else(|| word.strip_prefix("crates/")).map(|name| (name, at))
        })
    });
    crates.collect()
}

/// Imports that disagree with the diagram.
fn faults(architecture: &str, crates: &BTreeMap<String, Manifest>) -> Vec<String> {
    let lines = lines(architecture);
    let line = |name: &str| lines.iter().find(|(other, _)| *other == name).map(|(_, at)| *at);
    let mut faults = Vec::new();
    for name in crates.keys() {
        match lines.iter().filter(|(other, _)| other == name).count() {
            0 => faults.push(format!("{name} is missing")),
            1 => {}
            count => faults.push(format!("{name} occurs {count} times")),
        }
    }
    for (name, _) in lines.iter().filter(|(name, _)| !crates.contains_key(*name)) {
        faults.push(format!("{name} is no crate"));
    }
    for (name, manifest) in crates {
        let upward = |used: &&str| crates.contains_key(*used) && line(used) <= line(name);
        faults.extend(
            manifest
                .names()
                .iter()
                .filter(|used| upward(used))
                .map(|used| format!("{name} uses {used}, which is not below it")),
        );
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_is_true() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn what_disagrees_is_named() {
        let picture = "# A\n\n## Crate layers\n\nText of crates/z.\n\n    crates/a python/  top\n    crates/b\n\n\
                       ## B\n\n    crates/x\n";
        let crates = |list: &[(&str, &str)]| {
            list.iter().map(|(name, text)| ((*name).to_owned(), toml::from_str(text).unwrap())).collect()
        };
        let a = ("a", "[dependencies]\nb.workspace = true\nserde = \"1\"");
        let python = ("python", "[features]\nx = []");
        assert_eq!(faults(picture, &crates(&[a, ("b", ""), python])), [""; 0]);
        for (b, fault) in [
            ("[dev-dependencies]\na.workspace = true", "b uses a, which is not below it"),
            ("[target.'cfg(unix)'.dependencies]\na.workspace = true", "b uses a, which is not below it"),
            ("[build-dependencies]\npython = {}", "b uses python, which is not below it"),
        ] {
            assert_eq!(faults(picture, &crates(&[a, ("b", b), python])), [fault]);
        }
        assert_eq!(faults(picture, &crates(&[("b", ""), python])), ["a is no crate"]);
        assert_eq!(faults(picture, &crates(&[a, ("b", ""), ("c", ""), python])), ["c is missing"]);
        let twice = picture.replace("python/", "python/ crates/b");
        assert_eq!(faults(&twice, &crates(&[("a", ""), ("b", ""), python])), ["b occurs 2 times"]);
    }
}
