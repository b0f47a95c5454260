//! The public functions of the crates that bridges/mistralrs replaces, and those of the crates there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::XtaskError;

/// The crates that are replaced: name, version, and the folder of the sources that `[patch]` puts in its
/// place.
const REPLACED: [(&str, &str, &str); 3] = [
    ("mistralrs-paged-attn", "0.8.1", "bridges/mistralrs/paged-attn/src"),
    ("candle-flash-attn", "0.10.2", "bridges/candle/src"),
    ("candle-flash-attn-v3", "0.10.2", "bridges/candle/src"),
];

/// A line for each function: the crate, and the signature.
const RECORD: &str = "bridges/mistralrs/signatures.txt";

/// Compares the functions of the bridges with those that were recorded.
///
/// # Errors
/// When a function is missing or has another signature.
fn check(root: &Path) -> Result<(), XtaskError> {
    let recorded = fs::read_to_string(root.join(RECORD)).map_err(|error| failed(&error))?;
    for (name, _, folder) in REPLACED {
        let ours = of_folder(&root.join(folder), name)?;
        let mut wanted = 0;
        for line in recorded.lines() {
            let Some(signature) = line.strip_prefix(&format!("{name}: ")) else { continue };
            wanted += 1;
            if !ours.contains(signature) {
                return Err(failed(&format!("{folder} has no `{signature}`, a function of {name}")));
            }
        }
        if wanted == 0 {
            return Err(failed(&format!("{RECORD} has no function of {name}")));
        }
    }
    Ok(())
}

/// Compares the record with the crates in the registry, and writes the record again if it differs.
///
/// # Errors
/// When a crate cannot be fetched, or the record has differed.
pub fn record(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    let found = registry(root, cargo)?;
    let path = root.join(RECORD);
    if fs::read_to_string(&path).is_ok_and(|recorded| recorded == found) {
        return check(root);
    }
    fs::write(&path, found).map_err(|error| failed(&error))?;
    Err(failed(&format!(
        "{RECORD} was not that of the registry, and is now: look at the change, and run again"
    )))
}

/// The record of the crates as the registry has them.
fn registry(root: &Path, cargo: impl Fn() -> Command) -> Result<String, XtaskError> {
    let folder = root.join("target/signatures");
    let dependencies = REPLACED.map(|(name, version, _)| format!("{name} = \"={version}\"\n")).concat();
    let package = "[package]\nname = \"signatures\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n";
    fs::create_dir_all(folder.join("src"))
        .and_then(|()| fs::write(folder.join("src/lib.rs"), ""))
        .and_then(|()| fs::write(folder.join("Cargo.toml"), format!("{package}{dependencies}")))
        .map_err(|error| failed(&error))?;
    let output = cargo()
        .current_dir(&folder)
        .args(["metadata", "--format-version", "1", "--quiet"])
        .output()
        .map_err(|error| failed(&error))?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|error| failed(&error))?;
    let mut record = String::new();
    for (name, ..) in REPLACED {
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let manifest =
            packages.filter(|package| package["name"] == name).find_map(|p| p["manifest_path"].as_str());
        let manifest = manifest.ok_or_else(|| failed(&format!("the registry has no {name}")))?;
        // mistralrs-paged-attn has its functions for Metal in another folder.
        let sources = Path::new(manifest).with_file_name("src");
        let cuda = sources.join("cuda/backend");
        let exported = exported(&sources)?;
        for signature in of_folder(if cuda.exists() { &cuda } else { &sources }, "")? {
            if exported.is_empty() || exported.contains(function(&signature)) {
                record += &format!("{name}: {signature}\n");
            }
        }
    }
    Ok(record)
}

/// The functions that `cuda/mod.rs` exports from its module `backend`; none if there is no such file.
fn exported(sources: &Path) -> Result<BTreeSet<String>, XtaskError> {
    let path = sources.join("cuda/mod.rs");
    if !path.exists() {
        return Ok(BTreeSet::new());
    }
    let text = fs::read_to_string(path).map_err(|error| failed(&error))?;
    let list = text.split_once("pub use backend::{").and_then(|(_, rest)| rest.split_once('}'));
    let (list, _) = list.ok_or_else(|| failed(&"cuda/mod.rs exports no list of functions"))?;
    Ok(list.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect())
}

/// The name of the function that a signature is of.
fn function(signature: &str) -> &str {
    let name = signature.split_once("fn ").map_or(signature, |(_, rest)| rest);
    name.split(['(', '<']).next().unwrap_or(name)
}

/// The public functions of all files in a folder, for the crate `name`.
fn of_folder(folder: &Path, name: &str) -> Result<BTreeSet<String>, XtaskError> {
    let mut all = BTreeSet::new();
    let entries = fs::read_dir(folder).map_err(|error| failed(&format!("{}: {error}", folder.display())))?;
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| is_source(path)) {
        let text = fs::read_to_string(&path).map_err(|error| failed(&error))?;
        let is_v3 = path.file_name().is_some_and(|file| file == "v3.rs");
        if is_v3 {
            if name == "candle-flash-attn-v3" {
                all.extend(of_macro(&text));
            }
        } else {
            all.extend(signatures(&text));
        }
    }
    Ok(all)
}

fn is_source(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

/// The public functions at the top of a source text, without line breaks and comments.
fn signatures(text: &str) -> Vec<String> {
    let starts = text.match_indices("\npub ").map(|(start, _)| &text[start + 1..]);
    let functions = starts.filter(|text| text.starts_with("pub fn ") || text.starts_with("pub unsafe fn "));
    functions.filter_map(|text| text.split_once(" {\n")).map(|(signature, _)| plain(signature)).collect()
}

/// The functions that the macro of v3.rs makes: each has one more argument.
fn of_macro(text: &str) -> Vec<String> {
    let list = text.split_once("\nforward! {").map_or("", |(_, list)| list);
    let calls = list.split(';').filter_map(|call| call.trim().strip_suffix(')'));
    let whole = |call: &str| {
        format!("pub fn {}, use_gqa_packing: bool) -> Result<Tensor>", call.trim_end().trim_end_matches(','))
    };
    calls.map(|call| plain(&whole(call))).collect()
}

/// A signature on one line.
fn plain(signature: &str) -> String {
    let lines = signature.lines().map(|line| line.split("//").next().unwrap_or(line));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    words.join(" ").replace("( ", "(").replace(", )", ")").replace(",)", ")").replace("candle_core::", "")
}

fn failed(error: &impl ToString) -> XtaskError {
    XtaskError::Check(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bridges_have_the_recorded_functions() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn signatures_are_on_one_line_and_without_comments() {
        let text = "
pub fn one(
    a: &Tensor, // [rows]
    b: Option<&candle_core::Tensor>,
) -> Result<()> {
}
fn other() {
}
pub unsafe fn two(a: Tensor) -> Result<()> {
";
        let expected = [
            "pub fn one(a: &Tensor, b: Option<&Tensor>) -> Result<()>",
            "pub unsafe fn two(a: Tensor) -> Result<()>",
        ];
        assert_eq!(signatures(text), expected);
        assert_eq!(function(expected[1]), "two");
    }
}
