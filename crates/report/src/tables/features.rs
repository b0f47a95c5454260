//! The table of features such as softcap and packed batches. Its rows come from `python -m
//! flashcore_bench --suite softcap` and similar suites, and name their problems.

use std::collections::BTreeMap;
use std::path::Path;

use bench::OURS;

use super::named::{Named, places};
use super::render::line;
use super::{TableError, parsed};

/// The suites with such rows.
const SUITES: [&str; 13] = [
    "features",
    "random-cpu",
    "rows-cpu",
    "softcap",
    "sinks",
    "packed",
    "documents",
    "bias",
    "decode",
    "backward",
    "random-backward",
    "step",
    "gpt",
];

/// The name of a table that shows all of [`SUITES`].
pub(super) const SUITE: &str = "features";

/// The newest run of a problem.
pub(super) struct Newest<'a> {
    pub(super) own: &'a Named,
    pub(super) others: Vec<&'a Named>,
    /// The fastest peer's time as a multiple of FlashCore's, with the ends of its interval.
    pub(super) against: Option<(f64, f64, f64)>,
}

/// The rows of these suites.
pub(super) fn rows(path: &Path) -> Result<Vec<Named>, TableError> {
    let known = |suite: &str| SUITES.contains(&suite);
    parsed(path, |row| row["problem"].is_string() && row["suite"].as_str().is_some_and(known))
}

/// The newest run of each problem, in the order of the suites.
pub(super) fn newest(rows: &[Named]) -> Vec<Newest<'_>> {
    let mut newest: BTreeMap<(usize, &str), &Named> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.is_ours()) {
        let suite = SUITES.iter().position(|suite| *suite == row.suite).unwrap_or(SUITES.len());
        let counts = newest.entry((suite, &row.problem)).or_insert(row);
        if row.when > counts.when {
            *counts = row;
        }
    }
    let compared = newest.into_values().map(|own| {
        let of_run = |row: &&Named| row.run == own.run && row.problem == own.problem;
        let timed = |row: &&Named| !row.is_ours() && row.fault.is_none() && row.us_median.is_some();
        let others: Vec<&Named> = rows.iter().filter(of_run).filter(timed).collect();
        let best = others
            .iter()
            .filter(|row| !row.implementation.starts_with(OURS))
            .min_by(|a, b| a.us_median.partial_cmp(&b.us_median).unwrap_or(std::cmp::Ordering::Equal));
        let against = best.and_then(|row| Some((row.ratio?, row.ratio_low?, row.ratio_high?)));
        Newest { own, others, against }
    });
    compared.collect()
}

/// The newest run of each problem: FlashCore, its variants, and every peer with its ratio. `None` without
/// rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let rows = rows(path)?;
    let newest = newest(&rows);
    if newest.is_empty() {
        return Ok(None);
    }
    let mut lines = vec![
        line(&["problem", "**FlashCore**, µs", "TFLOP/s", "others, µs", "against the best [95 %]"]),
        line(&[":--", "--:", "--:", ":--", "--:"]),
    ];
    for Newest { own, others, against } in &newest {
        let names: Vec<String> =
            others.iter().map(|row| format!("{} {}", row.implementation, time(row.us_median))).collect();
        lines.push(line(&[
            own.problem.clone(),
            own.time(time),
            own.tflops.map_or("–".into(), rate),
            names.join(", "),
            against.map_or("–".into(), |(ratio, low, high)| format!("{ratio:.2}× [{low:.2}, {high:.2}]")),
        ]));
    }
    lines.push(String::new());
    lines.extend(places(newest.iter().map(|problem| problem.own)));
    Ok(Some(lines.join("\n")))
}

fn rate(tflops: f64) -> String {
    if tflops >= 10.0 { format!("{tflops:.0}") } else { format!("{tflops:.2}") }
}

fn time(us: Option<f64>) -> String {
    us.map_or("–".into(), |us| if us >= 100.0 { format!("{us:.0}") } else { format!("{us:.2}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_counts_and_the_fastest_peer_is_compared() {
        let row = |name: &str, when: &str, us: f64, ratio: Option<f64>| {
            json!({
                "suite": "softcap", "problem": "softcap 50", "impl": name, "us_median": us, "tflops": 500.0,
                "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio, "fault": null, "device": "NVIDIA H200",
                "driver": "CUDA 13.0", "commit": "abc", "run": when, "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row("flashcore", "2026-01-02", 50.0, None),
            row("fa3 1.0", "2026-01-02", 75.0, Some(1.5)),
            row("flex", "2026-01-02", 200.0, Some(4.0)),
            row("flashcore", "2026-01-01", 60.0, None),
            row("fa3 1.0", "2026-01-01", 66.0, Some(1.1)),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert!(
            text.contains("| softcap 50 | 50.00 | 500 | fa3 1.0 75.00, flex 200 | 1.50× [1.50, 1.50] |"),
            "{text}"
        );
        assert!(text.ends_with("NVIDIA H200, CUDA 13.0, commit abc, 2026-01-02.  "), "{text}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
