//! The table of first calls with new programs. Its rows come from `python -m flashcore_bench first`.

use std::collections::BTreeMap;
use std::path::Path;

use super::named::{Named, places};
use super::render::line;
use super::{TableError, parsed};

/// The suite of the rows.
const ROWS: &str = "first-call";

/// The name of the table.
pub(super) const SUITE: &str = "first_call";

/// The newest run of each kind of call: FlashCore and the others, in milliseconds. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let rows: Vec<Named> = parsed(path, |row| row["problem"].is_string() && row["suite"] == ROWS)?;
    let mut newest: BTreeMap<&str, &Named> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.is_ours()) {
        let counts = newest.entry(&row.problem).or_insert(row);
        if row.when > counts.when {
            *counts = row;
        }
    }
    if newest.is_empty() {
        return Ok(None);
    }
    let mut lines = vec![line(&["call", "**FlashCore**, ms", "others, ms"]), line(&[":--", "--:", ":--"])];
    for own in newest.values() {
        let of_run = |row: &&Named| row.run == own.run && row.problem == own.problem && !row.is_ours();
        let others: Vec<String> = rows
            .iter()
            .filter(of_run)
            .map(|row| format!("{} {}", row.implementation, row.time(milliseconds)))
            .collect();
        lines.push(line(&[own.problem.clone(), own.time(milliseconds), others.join(", ")]));
    }
    lines.push(String::new());
    lines.extend(places(newest.into_values()));
    Ok(Some(lines.join("\n")))
}

fn milliseconds(us: Option<f64>) -> String {
    us.map_or(
        "–".into(),
        |us| if us >= 1e5 { format!("{:.0}", us / 1e3) } else { format!("{:.1}", us / 1e3) },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_counts() {
        let row = |name: &str, when: &str, us: f64, fault: Option<&str>| {
            json!({
                "suite": ROWS, "problem": "mask program, new", "impl": name, "us_median": us, "fault": fault,
                "device": "NVIDIA H200", "driver": "CUDA 13.0", "commit": "abc", "run": when, "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row("flashcore", "2026-01-02", 612_345.0, None),
            row("flex 2.11", "2026-01-02", 1_337_000.0, None),
            row("flashcore", "2026-01-01", 7_201.5, None),
            row("flex 2.11", "2026-01-01", 303.0, Some("wrong")),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(text.contains("| mask program, new | 612 | flex 2.11 1337 |"), "{text}");
        std::fs::write(&path, rows[2..].join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(text.contains("| mask program, new | 7.2 | flex 2.11 n/a |"), "{text}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
