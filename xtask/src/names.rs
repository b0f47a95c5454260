//! Names that a reader searches for: a type's name stands in few files, and a crate's folder has the name of
//! its package.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::XtaskError;

/// The largest number of files in which types of one name may stand.
const MOST: usize = 3;

/// Refuses a type name, public outside of its module, that stands in more than [`MOST`] source files, and a
/// package whose name is not that of its folder.
///
/// # Errors
/// The names with their files.
pub fn check(root: &Path) -> Result<(), XtaskError> {
    let mut files = Vec::new();
    for folder in folders(&root.join("crates"))? {
        is_named(&folder)?;
        sources(&folder.join("src"), &mut files)?;
    }
    let mut types: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for path in files {
        let text =
            fs::read_to_string(&path).map_err(|source| XtaskError::Io { path: path.clone(), source })?;
        let file = path.strip_prefix(root).unwrap_or(&path);
        for name in text.lines().filter_map(declared) {
            types.entry(name.to_owned()).or_default().insert(file.to_owned());
        }
    }
    let common: Vec<String> = types.iter().filter(|(_, files)| files.len() > MOST).map(told).collect();
    if common.is_empty() {
        eprintln!("xtask: {} names of types, each in at most {MOST} files", types.len());
        return Ok(());
    }
    let expected = format!("expected at most {MOST}; name the type by its subject");
    Err(XtaskError::Check(format!("{}\n{expected}", common.join("\n"))))
}

/// The package of the folder `crates/NAME` is `flashcore-NAME`: on a package index, the short name could
/// belong to another project. The crate of the users is `flashcore`. Code imports a crate by its folder's
/// name.
fn is_named(folder: &Path) -> Result<(), XtaskError> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).map_err(|source| XtaskError::Io { path: path.clone(), source })?;
    let manifest: toml::Table =
        toml::from_str(&text).map_err(|error| XtaskError::Check(format!("{}: {error}", path.display())))?;
    let package = manifest["package"]["name"].as_str().unwrap_or_default();
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let expected = if name == "flashcore" { name.into_owned() } else { format!("flashcore-{name}") };
    if package == expected {
        return Ok(());
    }
    Err(XtaskError::Check(format!("{}: package {package}; expected {expected}", path.display())))
}

fn told((name, files): (&String, &BTreeSet<PathBuf>)) -> String {
    let list: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    format!("types called {name} stand in {} files: {}", files.len(), list.join(", "))
}

/// The name of the type that a line declares, if code outside of its module can see the type. The types of a
/// trait or an implementation have no `pub`.
fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let rest = rest.trim_start();
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (keyword, rest) = rest.split_once(' ')?;
    if !["struct", "enum", "union", "trait", "type"].contains(&keyword) {
        return None;
    }
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// The folders directly in a folder.
fn folders(folder: &Path) -> Result<Vec<PathBuf>, XtaskError> {
    let entries =
        fs::read_dir(folder).map_err(|source| XtaskError::Io { path: folder.to_owned(), source })?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}

/// The Rust files below a folder.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), XtaskError> {
    let entries =
        fs::read_dir(folder).map_err(|source| XtaskError::Io { path: folder.to_owned(), source })?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            sources(&path, files)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_stands_in_few_files() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn a_line_declares_a_type() {
        for (line, name) in [
            ("pub struct Plan;", Some("Plan")),
            ("    pub(super) enum Step<'a> {", Some("Step")),
            ("pub(in crate::a) type Words = Vec<u32>;", Some("Words")),
            ("pub unsafe trait Raw: Sized {", Some("Raw")),
            ("struct Private {", None),
            ("pub fn plan() -> Plan {", None),
            ("    type Error = ();", None),
            ("/// pub struct Plan", None),
        ] {
            assert_eq!(declared(line), name, "{line}");
        }
    }

    #[test]
    fn a_fourth_file_is_refused() {
        let root = std::env::temp_dir().join(format!("flashcore-names-{}", std::process::id()));
        for (at, of) in ["a", "b", "c", "d"].into_iter().enumerate() {
            let folder = root.join("crates").join(of).join("src/deep");
            fs::create_dir_all(&folder).unwrap();
            let manifest = root.join("crates").join(of).join("Cargo.toml");
            fs::write(manifest, format!("[package]\nname = \"flashcore-{of}\"\n")).unwrap();
            fs::write(folder.join("x.rs"), "pub struct Row;\n").unwrap();
            let checked = check(&root);
            assert_eq!(checked.is_err(), at == MOST, "{at}");
            if let Err(error) = checked {
                assert!(
                    error.to_string().contains("Row stand in 4 files: crates/a/src/deep/x.rs"),
                    "{error}"
                );
            }
        }
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_package_has_the_name_of_its_folder() {
        let folder = std::env::temp_dir().join(format!("flashcore-package-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("Cargo.toml"), "[package]\nname = \"flashcore-other\"\n").unwrap();
        let error = is_named(&folder).unwrap_err().to_string();
        assert!(error.contains("package flashcore-other; expected flashcore-flashcore-package"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
