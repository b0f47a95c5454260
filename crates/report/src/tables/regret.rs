//! The table of chosen plans beside the fastest measured ones, from rows of `cargo xtask measure plans
//! regret`.

use std::path::Path;

use serde::Deserialize;

use super::render::{line, place_of};
use super::{TableError, parsed};

/// The suite of the rows, and the name of the table.
pub(super) const SUITE: &str = "regret";

#[derive(Deserialize)]
struct Row {
    measure: String,
    problems: usize,
    mean: f64,
    worst: f64,
    device: String,
    driver: String,
    #[serde(default)]
    commit: Option<String>,
    run: String,
    when: String,
}

/// The newest run. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let rows: Vec<Row> = parsed(path, |row| row["suite"] == SUITE)?;
    let Some(newest) = rows.iter().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let titles = ["plan", "problems", "longer in the mean", "longer at worst"];
    let mut lines = vec![line(&titles), line(&[":--", "--:", "--:", "--:"])];
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    for row in rows.iter().filter(|row| row.run == newest.run) {
        let name =
            if row.measure == "predicted" { "of shortest predicted time" } else { "of the nearest row" };
        lines.push(line(&[name.to_owned(), row.problems.to_string(), percent(row.mean), percent(row.worst)]));
    }
    lines.push(String::new());
    lines.push(place_of(&newest.device, &newest.driver, newest.commit.as_deref(), &newest.when));
    Ok(Some(lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_is_shown() {
        let row = |measure: &str, when: &str, mean: f64| {
            json!({
                "suite": SUITE, "measure": measure, "problems": 20, "mean": mean, "worst": 0.125,
                "device": "NVIDIA H200", "driver": "CUDA 13.0", "commit": "abc", "run": when, "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row("predicted", "2026-01-01", 0.07),
            row("predicted", "2026-01-02", 0.02),
            row("nearest_row", "2026-01-02", 0.09),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(text.contains("predicted time | 20 | 2.0 % | 12.5 % |"), "{text}");
        assert!(text.contains("nearest row | 20 | 9.0 % |") && !text.contains("7.0 %"), "{text}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
