//! The table and the picture of chosen plans beside the fastest measured ones, from rows of `cargo xtask
//! measure plans regret`.

use std::path::Path;

use maud::Markup;
use serde::Deserialize;

use super::render::{day_of, line};
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
    #[serde(default)]
    commit: Option<String>,
    when: String,
}

impl Row {
    fn choice(&self) -> &'static str {
        match self.measure.as_str() {
            "predicted" => "of shortest predicted time",
            "folds" => "of shortest predicted time, six folds",
            _ => "of the nearest row",
        }
    }
}

/// The newest row of each measure and their picture. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<(String, String)>, TableError> {
    let rows: Vec<Row> = parsed(path, |row| row["suite"] == SUITE)?;
    let Some(newest) = rows.iter().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let of =
        |measure: &&str| rows.iter().filter(|row| row.measure == *measure).max_by(|a, b| a.when.cmp(&b.when));
    let shown: Vec<&Row> = ["folds", "predicted", "nearest_row"].iter().filter_map(of).collect();
    let titles = ["plan", "problems", "longer in the mean", "longer at worst", "commit"];
    let mut lines = vec![line(&titles), line(&[":--", "--:", "--:", "--:", ":--"])];
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    for row in &shown {
        let worst = row.longer.first().copied().unwrap_or_default();
        let commit = format!("{}, {}", row.commit.as_deref().unwrap_or("none"), day_of(&row.when));
        let cells = [row.longer.len().to_string(), percent(row.mean), percent(worst), commit];
        lines.push(line(&[vec![row.choice().to_owned()], cells.to_vec()].concat()));
    }
    lines.push(String::new());
    lines.push(format!("{}.  ", newest.device));
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
    fn the_newest_row_of_each_measure_is_shown() {
        let row = |measure: &str, when: &str, mean: f64| {
            json!({
                "suite": SUITE, "measure": measure, "mean": mean, "longer": [0.125, 0.0],
                "device": "NVIDIA H200", "commit": "abc", "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row("predicted", "2026-01-01", 0.07),
            row("predicted", "2026-01-02", 0.02),
            row("nearest_row", "2026-01-02", 0.09),
            row("folds", "2026-01-03", 0.03),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let (text, picture) = table(&path).unwrap().unwrap();
        assert!(text.contains("predicted time | 2 | 2.0 % | 12.5 % | abc, 2026-01-02 |"), "{text}");
        assert!(
            text.contains("nearest row | 2 | 9.0 % |")
                && text.contains("folds | 2 | 3.0 %")
                && !text.contains("7.0 %"),
            "{text}"
        );
        assert!(picture.contains("plan of the nearest row, 1: 12.5 %"), "{picture}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
