//! Finds circles of imports inside a crate. Modules of one folder may import each other in one direction
//! only, except for the circles that ARCHITECTURE.md lists with their reasons. A folder and its own files may
//! import each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::XtaskError;

/// The heading of the list in ARCHITECTURE.md.
const HEADING: &str = "## Circles inside crates";

/// A module's path inside its crate.
type Module = Vec<String>;
/// The names that a module exports from others, with the modules that define them.
type Exports = BTreeMap<Module, BTreeMap<String, Module>>;

/// A circle: a folder of modules, and those of its modules that import each other.
type Circle = (String, BTreeSet<String>);

/// Compares the circles of all crates with the list.
///
/// # Errors
/// The circles that are not listed, and the listed circles that do not exist.
pub fn check(root: &Path) -> Result<(), XtaskError> {
    let path = root.join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path).map_err(|source| XtaskError::Io { path: path.clone(), source })?;
    let listed = listed(&text);
    let mut found = BTreeSet::new();
    let crates = root.join("crates");
    let entries = fs::read_dir(&crates).map_err(|source| XtaskError::Io { path: crates, source })?;
    for folder in entries.flatten().map(|entry| entry.path()) {
        found.extend(circles_of(&folder)?);
    }
    let mut wrong: Vec<String> =
        found.difference(&listed).map(|circle| format!("not listed: {}", words(circle))).collect();
    wrong.extend(listed.difference(&found).map(|circle| format!("no circle any more: {}", words(circle))));
    if wrong.is_empty() {
        return Ok(());
    }
    let lines = wrong.join("\n  ");
    Err(XtaskError::Check(format!(
        "circles of imports differ from \"{HEADING}\" of ARCHITECTURE.md:\n  {lines}"
    )))
}

fn words((folder, modules): &Circle) -> String {
    let modules: Vec<String> = modules.iter().map(|module| format!("`{module}`")).collect();
    format!("`{folder}`: {}", modules.join(", "))
}

/// The circles of ARCHITECTURE.md, one for each line of its table: "| `folder` | `a`, `b` | why |".
fn listed(text: &str) -> BTreeSet<Circle> {
    let section = text.split(HEADING).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let quoted =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let row = |line: &str| {
        let cells: Vec<&str> = line.strip_prefix('|')?.split('|').collect();
        let [folder] = &quoted(cells.first()?)[..] else { return None };
        Some((folder.clone(), quoted(cells.get(1)?).into_iter().collect()))
    };
    section.lines().filter_map(row).collect()
}

/// The circles of one crate.
fn circles_of(folder: &Path) -> Result<Vec<Circle>, XtaskError> {
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut texts = BTreeMap::new();
    read(&folder.join("src"), &Vec::new(), &mut texts)?;
    let mut exports = Exports::new();
    for (module, text) in &texts {
        for path in uses(text, true) {
            if let Some((target, rest)) = resolve(module, &path, &texts)
                && let Some(item) = rest.last()
            {
                exports.entry(module.clone()).or_default().insert(item.clone(), target);
            }
        }
    }
    // For each folder, the modules that each of its modules imports.
    let mut folders: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, text) in &texts {
        for path in uses(text, false) {
            let Some((mut target, rest)) = resolve(module, &path, &texts) else { continue };
            while let Some(next) = rest.first().and_then(|item| exports.get(&target)?.get(item)) {
                if *next == target {
                    break;
                }
                target.clone_from(next);
            }
            let common = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                let imports = folders.entry(module[..common].to_vec()).or_default();
                imports.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let full = |folder: &Module| {
        std::iter::once(&name).chain(folder).map(String::as_str).collect::<Vec<_>>().join("::")
    };
    let all = folders.iter().flat_map(|(folder, imports)| {
        circles(imports).into_iter().map(|circle| (full(folder), circle)).collect::<Vec<_>>()
    });
    Ok(all.collect())
}

/// The modules below a folder with their texts, without comments and tests.
fn read(folder: &Path, at: &Module, texts: &mut BTreeMap<Module, String>) -> Result<(), XtaskError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| XtaskError::Io { path, source }
    };
    let entries: Vec<PathBuf> =
        fs::read_dir(folder).map_err(io(folder))?.flatten().map(|entry| entry.path()).collect();
    for path in entries {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if stem == "tests" {
            continue;
        }
        let mut module = at.clone();
        if !["mod", "lib", "main"].contains(&stem.as_str()) {
            module.push(stem);
        }
        if path.is_dir() {
            read(&path, &module, texts)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).map_err(io(&path))?;
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            texts.insert(module, code.collect::<Vec<_>>().join("\n"));
        }
    }
    Ok(())
}

/// The paths that a text imports or names in full; with `exported` those of `pub use` alone.
fn uses(text: &str, exported: bool) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for statement in text.split_inclusive(';') {
        let statement = statement.trim_end_matches(';');
        let Some((before, tree)) = statement.rsplit_once("use ") else { continue };
        let line = before.rsplit('\n').next().unwrap_or_default().trim();
        let is_public = line.starts_with("pub");
        if is_public || line.is_empty() && !exported {
            expand(&[], tree, &mut paths);
        }
    }
    if !exported {
        for root in ["crate::", "super::", "self::"] {
            for (at, _) in text.match_indices(root) {
                let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
                if !text[..at].ends_with(is_part) {
                    let end = text[at..].find(|c| !is_part(c)).map_or(text.len(), |end| at + end);
                    paths.push(parts(&text[at..end]));
                }
            }
        }
    }
    paths
}

fn parts(path: &str) -> Vec<String> {
    path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Appends the paths of a tree such as `a::{b, c::d}`.
fn expand(before: &[String], tree: &str, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        if !path.is_empty() {
            paths.push(before.iter().cloned().chain(parts(path)).collect());
        }
        return;
    };
    let before: Vec<String> = before.iter().cloned().chain(parts(head)).collect();
    let rest = rest.trim_end().trim_end_matches('}');
    let (mut depth, mut start) = (0, 0);
    for (at, c) in rest.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&before, &rest[start..at], paths);
                start = at + 1;
            }
            _ => {}
        }
    }
    expand(&before, &rest[start..], paths);
}

/// The module of this crate to which a path leads, and the names after it.
fn resolve(
    module: &Module,
    path: &[String],
    texts: &BTreeMap<Module, String>,
) -> Option<(Module, Vec<String>)> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    let (mut at, mut rest) = match path.first()?.as_str() {
        "crate" => (Vec::new(), &path[1..]),
        "self" => (module.clone(), &path[1..]),
        "super" => (module[..module.len().checked_sub(ups)?].to_vec(), &path[ups..]),
        first => {
            let child: Module = module.iter().cloned().chain([first.to_owned()]).collect();
            texts.contains_key(&child).then(|| (module.clone(), path))?
        }
    };
    while let Some((first, after)) = rest.split_first() {
        at.push(first.clone());
        if !texts.contains_key(&at) {
            at.pop();
            break;
        }
        rest = after;
    }
    Some((at, rest.to_vec()))
}

/// The largest sets of modules in which each module reaches every other one.
fn circles(imports: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<BTreeSet<String>> {
    let reached = |from: &String| {
        let (mut all, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(module) = open.pop() {
            for next in imports.get(module).into_iter().flatten() {
                if all.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        all
    };
    let reach: BTreeMap<&String, BTreeSet<String>> =
        imports.keys().map(|module| (module, reached(module))).collect();
    let circle = |module: &String| -> BTreeSet<String> {
        let others = reach[module].iter();
        others.filter(|other| reach.get(other).is_some_and(|all| all.contains(module))).cloned().collect()
    };
    imports.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn trees_are_paths() {
        let mut paths = Vec::new();
        expand(&[], "crate::{a::{B, c::D as E}, f}", &mut paths);
        assert_eq!(
            paths.iter().map(|path| path.join("::")).collect::<Vec<_>>(),
            ["crate::a::B", "crate::a::c::D", "crate::f"]
        );
    }

    #[test]
    fn what_imports_itself_in_turn_is_a_circle() {
        let imports = [("a", set(&["b"])), ("b", set(&["c"])), ("c", set(&["a", "d"])), ("d", set(&["e"]))];
        let imports = imports.into_iter().map(|(from, to)| (from.to_owned(), to)).collect();
        assert_eq!(circles(&imports), BTreeSet::from([set(&["a", "b", "c"])]));
    }

    #[test]
    fn imports_are_found_in_code_alone() {
        let text = "use crate::a::B;\npub use super::c::D;\nfn f() { crate::e::g() }\n";
        let found: Vec<String> = uses(text, false).iter().map(|path| path.join("::")).collect();
        assert_eq!(found, ["crate::a::B", "super::c::D", "crate::a::B", "crate::e::g", "super::c::D"]);
        assert_eq!(uses(text, true), [["super", "c", "D"]]);
    }

    #[test]
    fn the_list_is_a_table() {
        let text = format!(
            "x\n{HEADING}\n\n| folder | modules | why |\n|--|--|--|\n| `cpu` | `a`, `b` | `c` |\n\n## y\n"
        );
        assert_eq!(listed(&text), BTreeSet::from([("cpu".to_owned(), set(&["a", "b"]))]));
    }
}
