//! One line for each suite of a file of rows and each mode: FlashCore's time against the best peer's, over
//! the problems of the suite. The tables of the single suites show the problems.

use std::collections::BTreeMap;
use std::path::Path;

use bench::suites::OTHER;
use bench::{Comparison, Mode, RANDOM, SpeedVerdict, Suite};

use super::render::{day_of, line, mean_and_least};
use super::{Row, TableError, entries, features, parsed};

/// The name of the table.
pub(super) const SUITE: &str = "suites";

/// Suites of CPUs, whose names are in no [`Suite`].
const CPU: [&str; 2] = ["cpu", "model"];

/// The verdicts that a line counts, in the order of its columns.
const VERDICTS: [SpeedVerdict; 3] = [SpeedVerdict::Faster, SpeedVerdict::Undecided, SpeedVerdict::Slower];

/// The lines of all suites with a comparison. `None` without one.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let timed: Vec<Row> = parsed(path, |value| {
        value["problem"].is_object() && value.get("mode").is_some() && value.get("us_median").is_some()
    })?;
    let mut suites: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for row in timed {
        suites.entry(row.suite().to_owned()).or_default().push(row);
    }
    let mut lines = Vec::new();
    for name in Suite::ALL.map(Suite::name).into_iter().chain(CPU).chain([RANDOM, OTHER]) {
        let entries = suites.get(name).map(|rows| entries(rows)).unwrap_or_default();
        for mode in Mode::ALL {
            let of_mode = entries.iter().map(|entry| &entry.ours).filter(|row| row.mode == mode.name());
            let compared: Vec<(&Row, Comparison)> =
                of_mode.filter_map(|row| Some((row, row.against_best()?.1))).collect();
            let count = |verdict: SpeedVerdict| {
                compared.iter().filter(|(_, c)| c.verdict == verdict).count().to_string()
            };
            let sources = compared.iter().map(|(row, _)| (row.when.as_str(), row.commit.as_deref()));
            let ratios: Vec<f64> = compared.iter().map(|(_, c)| c.ratio).collect();
            lines.extend(suite_line([name, mode.name()], &ratios, VERDICTS.map(count), sources));
        }
    }
    let named = features::rows(path)?;
    for group in features::newest(&named).chunk_by(|a, b| a.own.suite == b.own.suite) {
        let compared = || group.iter().filter_map(|problem| Some((problem.own, problem.against?.0)));
        let ratios: Vec<f64> = compared().map(|(_, ratio)| ratio).collect();
        let sources = compared().map(|(own, _)| (own.when.as_str(), own.commit.as_deref()));
        let none = VERDICTS.map(|_| "–".to_owned());
        lines.extend(suite_line([&group[0].own.suite, "–"], &ratios, none, sources));
    }
    if lines.is_empty() {
        return Ok(None);
    }
    let names = VERDICTS.map(SpeedVerdict::name);
    let header = ["suite", "mode", "problems", "× the best peer, mean", "least"];
    let align = [":--", ":--", "--:", "--:", "--:", "--:", "--:", "--:", ":--"];
    let head = [line(&[&header[..], &names, &["newest rows"]].concat()), line(&align)];
    Ok(Some(head.into_iter().chain(lines).collect::<Vec<_>>().join("\n")))
}

/// A line of the table, whose source is the newest of the rows. `None` without ratios.
fn suite_line<'a>(
    title: [&str; 2],
    ratios: &[f64],
    verdicts: [String; 3],
    sources: impl Iterator<Item = (&'a str, Option<&'a str>)>,
) -> Option<String> {
    let (when, commit) = sources.max()?;
    let (mean, least) = mean_and_least(ratios);
    let figures = [ratios.len().to_string(), format!("{mean:.2}×"), format!("{least:.2}×")];
    let source = format!("{}, {}", commit.unwrap_or("none"), day_of(when));
    Some(line(&[&title.map(str::to_owned)[..], &figures, &verdicts, &[source]].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn row(suite: &str, problem: Value, run: &str, ratio: f64, verdict: &str) -> String {
        let comparison = json!({
            "ratio": ratio, "low": ratio, "high": ratio, "noise": 1.01, "verdict": verdict,
        });
        json!({
            "suite": suite, "impl": "flashcore", "mode": "warm", "us_median": 5.0, "problem": problem,
            "ratio_vs": { "peer": "cudnn", "comparison": comparison }, "device": "NVIDIA H200",
            "driver": "CUDA 13.0", "commit": format!("commit{run}"), "run": run, "when": run,
        })
        .to_string()
    }

    fn dense(heads: usize, dtype: &str) -> Value {
        json!({
            "batch": 1, "heads_q": heads, "heads_kv": heads, "seq_q": 512, "seq_kv": 512, "head_dim": 64,
            "head_dim_v": 64, "dtype": dtype, "mask": "none",
        })
    }

    #[test]
    fn a_suite_is_a_line_of_its_newest_runs() {
        let softcap = |name: &str, ratio: Option<f64>| {
            json!({
                "suite": "softcap", "problem": "softcap 50", "impl": name, "us_median": 50.0, "ratio": ratio,
                "ratio_low": ratio, "ratio_high": ratio, "device": "NVIDIA H200", "driver": "CUDA 13.0",
                "commit": "abc", "run": "1", "when": "2026-01-01",
            })
            .to_string()
        };
        let rows = [
            row("mission", dense(8, "f16"), "2026-01-01", 9.0, "FASTER"),
            row("mission", dense(8, "f16"), "2026-01-02", 2.0, "FASTER"),
            row("mission", dense(8, "bf16"), "2026-01-03", 0.5, "SLOWER"),
            // A problem that is not in the suite of its row's name counts as `other`.
            row("mission", dense(7, "f16"), "2026-01-01", 1.0, "UNDECIDED"),
            row("ideas_wgmma", dense(8, "f16"), "2026-01-01", 7.0, "FASTER"),
            softcap("flashcore", None),
            softcap("fa3", Some(1.25)),
        ];
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        assert_eq!(
            text.lines().skip(2).collect::<Vec<_>>(),
            [
                "| mission | warm | 2 | 1.00× | 0.50× | 1 | 0 | 1 | commit2026-01-03, 2026-01-03 |",
                "| other | warm | 1 | 1.00× | 1.00× | 0 | 1 | 0 | commit2026-01-01, 2026-01-01 |",
                "| softcap | – | 1 | 1.25× | 1.25× | – | – | – | abc, 2026-01-01 |",
            ]
        );
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
