//! The table of searches, generated from rows of evidence.

use std::path::Path;

use serde::Deserialize;

use super::render::{line, place_of, title};
use super::{Problem, TableError, parsed};
use bench::SpeedVerdict;

/// The suite of rows that `evolve --evidence` writes: a report with its origin.
pub(super) const SUITE: &str = "evolution";

/// The table's fields of a report. A run over several problems has no single problem and is skipped.
#[derive(Debug, Deserialize)]
struct Row {
    problem: Problem,
    /// `None` for a run without a time, which has no best candidate either.
    kind: Option<String>,
    baseline: Timed,
    best: Option<Timed>,
    speedup: Option<f64>,
    interval: Option<[f64; 2]>,
    verdict: Option<SpeedVerdict>,
    random_arm: Arm,
    candidates: Counts,
    device: String,
    driver: String,
    commit: Option<String>,
    when: String,
}

#[derive(Debug, Deserialize)]
struct Timed {
    us: Option<f64>,
    #[serde(default)]
    candidate: serde_json::Value,
}

#[derive(Debug, Deserialize)]
struct Arm {
    at_equal_budget: Option<Equal>,
}

/// The best of equal numbers of candidates of each arm.
#[derive(Debug, Deserialize)]
struct Equal {
    candidates: u64,
    evolution_us: Option<f64>,
    random_us: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct Counts {
    total: u64,
}

/// The table of a file's rows, one line for the newest row of each problem and baseline. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let mut rows: Vec<Row> = parsed(path, |value| value["suite"] == SUITE && value["problem"].is_object())?;
    let key = |row: &Row| (row.problem.clone(), row.baseline.candidate.to_string());
    rows.sort_by_cached_key(|row| (key(row), std::cmp::Reverse(row.when.clone())));
    rows.dedup_by_key(|row| key(row));
    if rows.is_empty() {
        return Ok(None);
    }
    let header = [
        "problem",
        "begun from, µs",
        "found, µs",
        "faster by [95 %]",
        "verdict",
        "candidates",
        "at equal numbers: random samples, evolution; short timings, µs",
    ];
    let mut lines = vec![line(&header), line(&[":--", "--:", "--:", "--:", ":--", "--:", ":--"])];
    lines.extend(rows.iter().map(|row| line(&cells(row))));
    lines.push(String::new());
    let mut places: Vec<String> =
        rows.iter().map(|row| place_of(&row.device, &row.driver, row.commit.as_deref(), &row.when)).collect();
    places.sort();
    places.dedup();
    lines.extend(places);
    Ok(Some(lines.join("\n")))
}

fn cells(row: &Row) -> Vec<String> {
    let time = |us: Option<f64>| us.map_or("–".into(), |us| format!("{us:.2}"));
    let begun = match row.baseline.candidate["gpu"]["rung"].as_str() {
        Some(rung) => format!("{} ({rung})", time(row.baseline.us)),
        None => time(row.baseline.us),
    };
    let faster = match (row.speedup, row.interval) {
        (Some(ratio), Some([low, high])) => format!("{ratio:.2}× [{low:.2}, {high:.2}]"),
        _ => "–".into(),
    };
    // The time from the race. Old rows have the short timing, which has a selection bias.
    let found = row.baseline.us.zip(row.speedup).map(|(begun, ratio)| begun / ratio);
    let found = found.or(row.best.as_ref().and_then(|best| best.us));
    let blind = row.random_arm.at_equal_budget.as_ref().map_or("–".into(), |equal| {
        format!("{}: {} and {}", equal.candidates, time(equal.random_us), time(equal.evolution_us))
    });
    let verdict = row.verdict.map_or("–", SpeedVerdict::name);
    let predicted = if row.kind.as_deref() == Some("predicted") { ", predicted" } else { "" };
    vec![
        title(&row.problem) + predicted,
        begun,
        time(found),
        faster,
        verdict.to_owned(),
        row.candidates.total.to_string(),
        blind,
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use host::store::Scratch;

    fn row(when: &str, us: f64) -> String {
        json!({
            "suite": SUITE, "kind": "measured", "when": when, "commit": "abc", "device": "H", "driver": "CUDA",
            "problem": { "batch": 1, "heads_q": 8, "heads_kv": 8, "seq_q": 512, "seq_kv": 512, "head_dim": 64,
                         "head_dim_v": 64, "dtype": "f16", "mask": "none" },
            "baseline": { "us": 471.5, "candidate": { "gpu": { "family": "ladder", "rung": "phase4" } } },
            "best": { "us": 0.9 * us, "candidate": {} }, "speedup": 471.5 / us, "interval": [100.0, 120.0],
            "verdict": "FASTER", "candidates": { "total": 2450 },
            "random_arm": { "at_equal_budget": { "candidates": 368, "evolution_us": us, "random_us": 4.64 } },
        })
        .to_string()
    }

    #[test]
    fn the_newest_search_of_a_problem_is_a_line() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path("rows.jsonl");
        let others = r#"{"suite":"mission","problem":{}}"#;
        std::fs::write(&path, [&row("2026-01-01", 9.0), others, &row("2026-01-02", 4.25)].join("\n"))
            .unwrap();
        let table = table(&path).unwrap().unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| f16 B1 H8 S512 D64 | 471.50 (phase4) | 4.25 | 110.94× [100.00, 120.00] | FASTER | 2450 | 368: 4.64 and 4.25 |"
        );
        assert_eq!(lines.len(), 5, "{table}");
        // A run without a time is a line of dashes.
        let mut nothing: serde_json::Value = serde_json::from_str(&row("2026-01-03", 1.0)).unwrap();
        for key in ["kind", "best", "speedup", "interval", "verdict"] {
            nothing[key] = serde_json::Value::Null;
        }
        nothing["baseline"]["us"] = serde_json::Value::Null;
        nothing["random_arm"]["at_equal_budget"] = serde_json::Value::Null;
        std::fs::write(&path, nothing.to_string()).unwrap();
        let line = super::table(&path).unwrap().unwrap().lines().nth(2).unwrap().to_owned();
        assert_eq!(line, "| f16 B1 H8 S512 D64 | – (phase4) | – | – | – | 2450 | – |");
        assert_eq!(super::table(&scratch.path("none.jsonl")).unwrap(), None);
    }
}
