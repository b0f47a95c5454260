//! The table of the kernels that quantise tensors, from rows of `python -m flashcore_bench quantize`.

use std::path::Path;

use super::named::Named;
use super::render::line;
use super::{TableError, parsed};

/// The suite of the rows, and the name of the table.
pub(super) const SUITE: &str = "quantize";

/// The newest run, in the order of its rows. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let rows: Vec<Named> = parsed(path, |row| row["suite"] == SUITE)?;
    let Some(newest) = rows.iter().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let mut lines =
        vec![line(&["problem", "µs", "GB/s", "of the copy's rate"]), line(&[":--", "--:", "--:", "--:"])];
    let number = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
    for row in rows.iter().filter(|row| row.run == newest.run) {
        let name = if row.is_ours() { "" } else { ": a copy of as many bytes" };
        lines.push(line(&[
            format!("{}{name}", row.problem),
            row.time(|us| number(us, 0)),
            number(row.gbps, 0),
            number(row.of_copy, 2),
        ]));
    }
    lines.push(String::new());
    lines.push(newest.place());
    Ok(Some(lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_is_shown_with_its_copies() {
        let row = |name: &str, when: &str, us: f64, of_copy: Option<f64>| {
            json!({
                "suite": "quantize", "problem": "B1", "impl": name, "us_median": us, "gbps": 4000.0,
                "of_copy": of_copy, "fault": null, "device": "NVIDIA H200", "driver": "CUDA 13.0",
                "commit": "abc", "run": when, "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row("flashcore", "2026-01-01", 9.0, Some(0.5)),
            row("flashcore", "2026-01-02", 5.0, Some(0.9)),
            row("copy", "2026-01-02", 4.5, None),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(
            text.contains("| B1 | 5 | 4000 | 0.90 |\n| B1: a copy of as many bytes | 4 | 4000 | – |"),
            "{text}"
        );
        assert!(!text.contains("0.50"), "{text}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
