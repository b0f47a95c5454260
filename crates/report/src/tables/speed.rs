//! The table of whole checks in the emulator, from rows of `cargo xtask measure check_time … --evidence`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::render::{line, place_of};
use super::{TableError, parsed};

/// The suite of the rows, and the name of the table.
pub(super) const SUITE: &str = "speed";

#[derive(Clone, Debug, Deserialize)]
struct Row {
    kernel: String,
    size: String,
    options: Vec<String>,
    verdict: String,
    runs: u32,
    seconds: f64,
    cpu_seconds: f64,
    steps: u64,
    /// Warp instructions and warp accesses of one run.
    run_instructions: u64,
    run_accesses: u64,
    device: String,
    driver: String,
    commit: Option<String>,
    when: String,
}

/// The newest row of each check. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let mut rows: Vec<Row> = parsed(path, |row| row["suite"] == SUITE)?;
    rows.sort_by(|a, b| a.when.cmp(&b.when));
    let named = |row: &Row| -> (String, String, Vec<String>) {
        let options = row.options.iter().filter(|option| !option.starts_with("--"));
        (row.kernel.clone(), row.size.clone(), options.cloned().collect())
    };
    let newest: BTreeMap<_, Row> = rows.into_iter().map(|row| (named(&row), row)).collect();
    let Some(last) = newest.values().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let header = [
        "`check_time`",
        "verdict",
        "runs",
        "s",
        "s of CPU time",
        "M warp instructions/s",
        "M warp accesses/s",
    ];
    let mut lines = vec![line(&header), line(&[":--", ":--", "--:", "--:", "--:", "--:", "--:"])];
    for ((kernel, size, options), row) in &newest {
        let a_second = row.steps as f64 / row.cpu_seconds / 1e6;
        let accesses = row.run_accesses as f64 / row.run_instructions.max(1) as f64;
        let arguments: Vec<&str> = [kernel, size].into_iter().chain(options).map(String::as_str).collect();
        lines.push(line(&[
            format!("`{}`", arguments.join(" ")),
            row.verdict.clone(),
            row.runs.to_string(),
            format!("{:.1}", row.seconds),
            format!("{:.1}", row.cpu_seconds),
            format!("{a_second:.2}"),
            format!("{:.2}", a_second * accesses),
        ]));
    }
    lines.push(String::new());
    lines.push(format!(
        "Rates are for a second of CPU time; the cores were shared with other work. {}",
        place_of(&last.device, &last.driver, last.commit.as_deref(), &last.when)
    ));
    Ok(Some(lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_row_of_a_check_is_shown() {
        let row = |options: &[&str], seconds: f64, when: &str| {
            json!({
                "suite": "speed", "kernel": "mma", "size": "1,8,512,64", "options": options, "verdict": "passed",
                "runs": 4, "seconds": seconds, "cpu_seconds": 2.0 * seconds, "steps": 40_000_000,
                "run_instructions": 10_000_000, "run_accesses": 2_000_000, "device": "CPU", "driver": "linux",
                "commit": "abc", "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("emulator.jsonl");
        let rows = [
            row(&["quick", "--evidence"], 5.0, "2026-01-02"),
            row(&["quick", "--evidence"], 9.0, "2026-01-01"),
            row(&["--evidence"], 7.0, "2026-01-01"),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(
            text.contains("| `mma 1,8,512,64 quick` | passed | 4 | 5.0 | 10.0 | 4.00 | 0.80 |"),
            "{text}"
        );
        assert!(
            text.contains("| `mma 1,8,512,64` | passed | 4 | 7.0 |") && !text.contains("9.0 |"),
            "{text}"
        );
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
