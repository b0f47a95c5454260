//! The table and the picture of chosen plans beside the fastest measured ones, from rows of `cargo xtask
//! measure plans regret`.

use std::path::Path;

use maud::Markup;
use serde::Deserialize;

use super::render::{line, place_of};
use super::{TableError, parsed};
use crate::chart::standalone;
use crate::panels::{Panel, Scale, panels};

/// The suite of the rows, and the name of the table.
pub(super) const SUITE: &str = "regret";

#[derive(Deserialize)]
struct Row {
    measure: String,
    mean: f64,
    /// How much longer the chosen plan takes than the fastest one, for each problem, the most first.
    longer: Vec<f64>,
    device: String,
    driver: String,
    #[serde(default)]
    commit: Option<String>,
    run: String,
    when: String,
}

impl Row {
    fn choice(&self) -> &'static str {
        if self.measure == "predicted" { "of shortest predicted time" } else { "of the nearest row" }
    }
}

/// The newest run and its picture. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<(String, String)>, TableError> {
    let rows: Vec<Row> = parsed(path, |row| row["suite"] == SUITE)?;
    let Some(newest) = rows.iter().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let shown: Vec<&Row> = rows.iter().filter(|row| row.run == newest.run).collect();
    let titles = ["plan", "problems", "longer in the mean", "longer at worst"];
    let mut lines = vec![line(&titles), line(&[":--", "--:", "--:", "--:"])];
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    for row in &shown {
        let worst = row.longer.first().copied().unwrap_or_default();
        let cells = [row.longer.len().to_string(), percent(row.mean), percent(worst)];
        lines.push(line(&[vec![row.choice().to_owned()], cells.to_vec()].concat()));
    }
    lines.push(String::new());
    lines.push(place_of(&newest.device, &newest.driver, newest.commit.as_deref(), &newest.when));
    Ok(Some((lines.join("\n"), standalone(&chart(&shown)))))
}

/// Each plan's excess over the fastest one, the problems in order of it.
fn chart(rows: &[&Row]) -> Markup {
    let points =
        |row: &Row| (1..).zip(&row.longer).map(|(rank, share)| (f64::from(rank), 100.0 * share)).collect();
    let lines = rows.iter().enumerate().map(|(number, row)| (number, points(row))).collect();
    let title = "% longer than the fastest plan, the worst problem first".to_owned();
    let legend: Vec<String> = rows.iter().map(|row| format!("plan {}", row.choice())).collect();
    panels(&[Panel { title, lines }], &legend, "%", Scale::Linear)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_is_shown() {
        let row = |measure: &str, when: &str, mean: f64| {
            json!({
                "suite": SUITE, "measure": measure, "mean": mean, "longer": [0.125, 0.0],
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
        let (text, picture) = table(&path).unwrap().unwrap();
        assert!(text.contains("predicted time | 2 | 2.0 % | 12.5 % |"), "{text}");
        assert!(text.contains("nearest row | 2 | 9.0 % |") && !text.contains("7.0 %"), "{text}");
        assert!(picture.contains("plan of the nearest row, 1: 12.5 %"), "{picture}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
