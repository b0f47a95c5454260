//! Removes superseded rows from `evidence/`; git's history has them.
//!
//! Two rows measure one thing if they agree in all fields of [`IDENTITY`]. Of the runs that measured a thing,
//! the newest two keep their rows. The newest two runs keep them, too, in which FlashCore and a peer computed
//! the problem: tables show such a run before a newer one without peers. All rows of `changes.jsonl` stay,
//! because each of its runs measures one change of the code, and sentences cite them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::XtaskError;

/// The fields that say what a row measures, as JSON pointers. A row without a field has null.
const IDENTITY: [&str; 21] = [
    "/suite",
    "/mode",
    "/pass",
    "/impl",
    "/problem",
    "/device",
    "/check",
    "/instruction",
    "/probe",
    "/kernel",
    "/entry",
    "/tool",
    "/part",
    "/measure",
    "/threads",
    "/ctas",
    "/scheme",
    "/distribution",
    "/keys",
    "/bytes",
    "/baseline/candidate",
];

/// Those of a race, whose implementations differ.
const RACE: [&str; 5] = ["/suite", "/mode", "/pass", "/problem", "/device"];

const RUNS: usize = 2;
const CHANGES: &str = "changes.jsonl";

/// Removes the superseded rows of every file.
///
/// # Errors
/// When a file cannot be read or written, a line is no row, or rows of one run have equal identities.
pub fn prune(root: &Path) -> Result<(), XtaskError> {
    let folder = root.join("evidence");
    let io = |path: &Path| {
        let path = path.to_path_buf();
        |source| XtaskError::Io { path, source }
    };
    for entry in fs::read_dir(&folder).map_err(io(&folder))? {
        let path = entry.map_err(io(&folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".jsonl") || name == CHANGES {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(io(&path))?;
        let kept = pruned(&text).map_err(|why| XtaskError::Check(format!("{name}, {why}")))?;
        let (before, after) = (text.lines().count(), kept.lines().count());
        if after < before {
            fs::write(&path, kept).map_err(io(&path))?;
            println!("{name}: {after} of {before} rows stay");
        }
    }
    Ok(())
}

/// A row with the fields that decide whether it stays.
struct Row<'a> {
    line: &'a str,
    identity: String,
    race: String,
    run: String,
    when: String,
    is_peer: bool,
}

impl Row<'_> {
    fn of(line: &str) -> Result<Row<'_>, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let text = |name: &str| value[name].as_str();
        let when = text("when").ok_or("a row without `when`")?.to_owned();
        // A search numbers its runs by its own ledger, so only its time distinguishes it.
        let run = text("run").map_or_else(|| when.clone(), str::to_owned);
        let fields = |pointers: &[&str]| {
            let fields: Vec<Option<&Value>> = pointers.iter().map(|field| value.pointer(field)).collect();
            serde_json::to_string(&fields).map_err(|error| error.to_string())
        };
        let is_peer = text("impl").is_some_and(|name| !name.starts_with("flashcore"));
        Ok(Row { line, identity: fields(&IDENTITY)?, race: fields(&RACE)?, run, when, is_peer })
    }
}

/// The text without superseded rows.
fn pruned(text: &str) -> Result<String, String> {
    let rows = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let rows = rows.map(|(line, number)| Row::of(line).map_err(|why| format!("line {number}: {why}")));
    let rows: Vec<Row> = rows.collect::<Result<_, _>>()?;
    let peers: BTreeSet<(&str, &str)> =
        rows.iter().filter(|row| row.is_peer).map(|row| (&*row.race, &*row.run)).collect();
    // For each identity its runs, with their times and whether a peer took part.
    let mut runs: BTreeMap<&str, Vec<(&str, &str, bool)>> = BTreeMap::new();
    for row in &rows {
        let own = runs.entry(&row.identity).or_default();
        if own.iter().any(|(_, run, _)| *run == row.run) {
            return Err(format!(
                "run {}: two rows with the identity {}; name the field that distinguishes them in IDENTITY",
                row.run, row.identity
            ));
        }
        own.push((&row.when, &row.run, peers.contains(&(&*row.race, &*row.run))));
    }
    runs.values_mut().for_each(|own| own.sort_unstable());
    let stays = |row: &&Row| {
        let own = &runs[&*row.identity];
        let is_row = |run: &(&str, &str, bool)| run.1 == row.run;
        own.iter().rev().take(RUNS).any(is_row) || own.iter().rev().filter(|run| run.2).take(RUNS).any(is_row)
    };
    Ok(rows.iter().filter(stays).map(|row| format!("{}\n", row.line)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, run: &str, more: &str) -> String {
        format!(
            "{{\"suite\":\"small\",\"impl\":\"{name}\",\"mode\":\"warm\",\"run\":\"{run}\",\"when\":\"2026-01-0{run}\"{more}}}\n"
        )
    }

    #[test]
    fn the_newest_two_runs_of_a_row_stay() {
        let (old, middle, new) =
            (row("flashcore", "1", ""), row("flashcore", "2", ""), row("flashcore", "3", ""));
        // The lines of a file need not be in the order of their times.
        let text = format!("{new}{old}{middle}");
        assert_eq!(pruned(&text).unwrap(), format!("{new}{middle}"));
        // Each of these is measured once.
        for more in [",\"problem\":{\"batch\":1}", ",\"threads\":2", ",\"baseline\":{\"candidate\":1}"] {
            let other = row("flashcore", "1", more);
            assert_eq!(pruned(&format!("{text}{other}")).unwrap(), format!("{new}{middle}{other}"));
        }
    }

    #[test]
    fn the_newest_races_stay() {
        let ours = |run: &str| row("flashcore", run, "");
        let race = |run: &str| ours(run) + &row("cudnn", run, "");
        let text = ["1", "2", "3"].map(race).concat() + &["4", "5", "6"].map(ours).concat();
        let wanted = ["2", "3"].map(race).concat() + &["5", "6"].map(ours).concat();
        assert_eq!(pruned(&text).unwrap(), wanted);
        assert_eq!(pruned(&wanted).unwrap(), wanted, "a second time");
    }

    #[test]
    fn searches_are_distinguished_by_their_time() {
        let search = |day: u32| {
            format!(
                "{{\"suite\":\"evolution\",\"run\":1,\"when\":\"2026-01-0{day}\",\"baseline\":{{\"candidate\":1}}}}\n"
            )
        };
        assert_eq!(pruned(&[1, 2, 3].map(search).concat()).unwrap(), [2, 3].map(search).concat());
    }

    #[test]
    fn rows_that_cannot_be_told_apart_are_refused() {
        let twice = row("flashcore", "1", ",\"pages\":1") + &row("flashcore", "1", ",\"pages\":2");
        assert!(pruned(&twice).unwrap_err().contains("two rows with the identity"));
        assert!(pruned("{}\n").unwrap_err().contains("line 1: a row without `when`"));
        assert!(pruned("\n{").unwrap_err().starts_with("line 2: "));
    }

    /// `evidence/` has no superseded rows, and each row there has its own identity.
    #[test]
    fn the_evidence_is_pruned() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for entry in fs::read_dir(root.join("evidence")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "jsonl") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let kept = pruned(&text).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
            let is_pruned = kept.lines().count() == text.lines().count() || path.ends_with(CHANGES);
            assert!(is_pruned, "{}: run `cargo xtask evidence prune`", path.display());
        }
    }
}
