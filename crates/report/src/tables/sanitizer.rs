//! The tables that compare `flashcore check` with compute-sanitizer, from rows of
//! `xtask/sanitizer/compare.py`.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;

use super::render::{line, place_of};
use super::{TableError, parsed};

/// The suite of the findings, and the name of their table.
pub(super) const SUITE: &str = "sanitizer";

/// The suite of the times of larger kernels, and the name of their table.
pub(super) const TIMES: &str = "sanitizer_time";

/// The tools that are compared; `none` is the kernel alone.
const TOOLS: [&str; 5] = ["racecheck", "memcheck", "synccheck", "initcheck", "check"];

#[derive(Clone, Debug, Deserialize)]
struct Row {
    kernel: String,
    #[serde(default)]
    entry: String,
    tool: String,
    #[serde(default)]
    announced: Vec<Announced>,
    #[serde(default)]
    found: Vec<Found>,
    outcome: String,
    seconds: f64,
    /// The times of the launches, in milliseconds.
    #[serde(default)]
    ms: Vec<f64>,
    sanitizer: String,
    device: String,
    driver: String,
    commit: Option<String>,
    run: String,
    when: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Announced {
    kind: String,
    line: u32,
}

#[derive(Clone, Debug, Deserialize)]
struct Found {
    lines: Vec<u32>,
}

/// The findings of a tool on a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// A finding that names an announced line.
    Line,
    /// Findings on other lines, or without a line.
    Elsewhere,
    Nothing,
    /// The kernel was stopped after the limit, and nothing had been found.
    NoEnd,
    NotRun,
}

impl Row {
    fn answer(&self) -> Answer {
        let lines: BTreeSet<u32> = self.announced.iter().map(|announced| announced.line).collect();
        let named = self.found.iter().any(|found| found.lines.iter().any(|line| lines.contains(line)));
        match (named, self.found.is_empty(), self.outcome.as_str()) {
            (true, ..) => Answer::Line,
            (_, false, _) => Answer::Elsewhere,
            (.., "no_end") => Answer::NoEnd,
            (.., "ended" | "passed" | "failed") => Answer::Nothing,
            _ => Answer::NotRun,
        }
    }

    fn source(&self) -> String {
        let place = place_of(&self.device, &self.driver, self.commit.as_deref(), &self.when);
        format!("compute-sanitizer {}; {place}", self.sanitizer.trim_start_matches("Version "))
    }

    /// The shortest launch, ms.
    fn least(&self) -> Option<f64> {
        self.ms.iter().copied().min_by(f64::total_cmp)
    }
}

/// The rows of a suite's newest run.
fn newest(path: &Path, suite: &str) -> Result<Vec<Row>, TableError> {
    let mut rows: Vec<Row> = parsed(path, |row| row["suite"] == suite)?;
    let newest = rows.iter().max_by(|a, b| a.when.cmp(&b.when)).map(|row| row.run.clone());
    rows.retain(|row| Some(&row.run) == newest.as_ref());
    Ok(rows)
}

fn kernels(rows: &[Row]) -> Vec<&str> {
    let names: BTreeSet<&str> = rows.iter().map(|row| row.kernel.as_str()).collect();
    names.into_iter().collect()
}

/// The tools' answers on each kernel with a fault, with sums of both twins. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<String>, TableError> {
    let rows = newest(path, SUITE)?;
    let Some(first) = rows.first() else { return Ok(None) };
    let of = |kernel: &str, entry: &str, tool: &str| {
        rows.iter().find(|row| (&*row.kernel, &*row.entry, &*row.tool) == (kernel, entry, tool))
    };
    let answer = |kernel: &str, entry: &str, tool: &str| of(kernel, entry, tool).map(Row::answer);
    let header: Vec<&str> = ["kernel", "fault"].into_iter().chain(TOOLS).collect();
    let mut lines = vec![line(&header), line(&header.iter().map(|_| ":--").collect::<Vec<_>>())];
    let kernels = kernels(&rows);
    // A kernel whose twin has only what `check` notes has no fault to find.
    let faults = |kernel: &str| -> BTreeSet<&str> {
        let wrong = rows.iter().find(|row| row.kernel == kernel && row.entry == "wrong");
        wrong.into_iter().flat_map(|row| &row.announced).map(|announced| announced.kind.as_str()).collect()
    };
    let faulty: Vec<&str> = kernels.iter().copied().filter(|kernel| !faults(kernel).is_empty()).collect();
    for kernel in &faulty {
        let cells = TOOLS.map(|tool| match answer(kernel, "wrong", tool) {
            Some(Answer::Line) => "**line**",
            Some(Answer::Elsewhere) => "finding",
            Some(Answer::Nothing) => "–",
            Some(Answer::NoEnd) => "no end",
            Some(Answer::NotRun) | None => "n/a",
        });
        let kinds: Vec<&str> = faults(kernel).into_iter().collect();
        let head = [format!("`{kernel}`"), kinds.join(", ")];
        lines.push(line(&head.into_iter().chain(cells.map(str::to_owned)).collect::<Vec<_>>()));
    }
    let sum = |name: String, count: &dyn Fn(&str) -> usize| {
        let counts = TOOLS.map(|tool| format!("**{}**", count(tool)));
        line(&[name, String::new()].into_iter().chain(counts).collect::<Vec<_>>())
    };
    let wrong = |tool: &str, answers: &[Answer]| {
        let given = faulty.iter().filter_map(|kernel| answer(kernel, "wrong", tool));
        given.filter(|given| answers.contains(given)).count()
    };
    lines.push(sum(format!("named the line, of {}", faulty.len()), &|tool| wrong(tool, &[Answer::Line])));
    lines.push(sum("found something".to_owned(), &|tool| wrong(tool, &[Answer::Line, Answer::Elsewhere])));
    lines.push(sum(format!("findings on the right twin, of {}", kernels.len()), &|tool| {
        let right = |kernel: &&&str| answer(kernel, "right", tool) == Some(Answer::Elsewhere);
        kernels.iter().filter(right).count()
    }));
    let seconds = |tool: &str| {
        let mut times: Vec<f64> = rows.iter().filter(|row| row.tool == tool).map(|row| row.seconds).collect();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).map_or("–".to_owned(), |time| format!("{time:.2} s"))
    };
    lines.push(String::new());
    lines.push(format!(
        "Median time of a process: alone {},\n{}.\n{}",
        seconds("none"),
        TOOLS.map(|tool| format!("{tool} {}", seconds(tool))).join(", "),
        first.source()
    ));
    Ok(Some(lines.join("\n")))
}

/// The times of larger kernels, alone and under each tool. `None` without rows.
pub(super) fn times(path: &Path) -> Result<Option<String>, TableError> {
    let rows = newest(path, TIMES)?;
    let Some(first) = rows.first() else { return Ok(None) };
    let header = [
        "kernel",
        "alone",
        "racecheck",
        "memcheck",
        "synccheck",
        "initcheck",
        "check, full",
        "check --quick",
    ];
    let mut lines =
        vec![line(&header), line(&header.map(|name| if name == "kernel" { ":--" } else { "--:" }))];
    for kernel in kernels(&rows) {
        let of = |tool: &str| rows.iter().find(|row| row.kernel == kernel && row.tool == tool);
        let alone = of("none").and_then(Row::least);
        let mut cells = vec![format!("`{kernel}`"), alone.map_or("–".to_owned(), |ms| format!("{ms:.2} ms"))];
        for tool in &TOOLS[..4] {
            let under = of(tool).and_then(Row::least);
            cells.push(match (under, alone) {
                (Some(under), Some(alone)) => format!("{under:.1} ms ({:.0}×)", under / alone),
                _ => of(tool)
                    .map_or("–", |row| if row.outcome == "no_end" { "no end" } else { "–" })
                    .to_owned(),
            });
        }
        for tool in ["check", "check_quick"] {
            let run = of(tool).filter(|row| row.outcome == "passed");
            cells.push(run.map_or("–".to_owned(), |row| format!("{:.1} s", row.seconds)));
        }
        lines.push(line(&cells));
    }
    lines.push(String::new());
    lines.push(first.source());
    Ok(Some(lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn row(suite: &str, entry: &str, tool: &str, more: Value) -> String {
        let mut row = json!({
            "suite": suite, "kernel": "sum", "entry": entry, "tool": tool, "outcome": "ended", "seconds": 1.5,
            "sanitizer": "Version 2026.1", "device": "NVIDIA H200", "driver": "580", "commit": "abc", "run": "1",
            "when": "2026-01-01",
        });
        if entry == "wrong" {
            row["announced"] = json!([{ "kind": "race", "line": 7 }]);
        }
        row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        row.to_string()
    }

    #[test]
    fn a_finding_counts_by_the_line_that_it_names() {
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let found = |line: u32| json!({ "found": [{ "kind": "Race", "lines": [line] }] });
        let rows = [
            row(SUITE, "wrong", "none", json!({})),
            row(SUITE, "wrong", "racecheck", found(7)),
            row(SUITE, "wrong", "memcheck", found(8)),
            row(SUITE, "wrong", "synccheck", json!({ "outcome": "no_end" })),
            row(SUITE, "wrong", "initcheck", json!({ "outcome": "not_run" })),
            row(SUITE, "wrong", "check", json!({ "outcome": "failed", "found": [{ "lines": [7] }] })),
            row(SUITE, "right", "racecheck", found(9)),
            row(SUITE, "right", "check", json!({ "outcome": "passed" })),
            row(SUITE, "wrong", "check", json!({ "run": "0", "when": "2025-01-01", "kernel": "old" })),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = table(&path).unwrap().unwrap();
        for part in [
            "| `sum` | race | **line** | finding | no end | n/a | **line** |",
            "| named the line, of 1 |  | **1** | **0** | **0** | **0** | **1** |",
            "| found something |  | **1** | **1** | **0** | **0** | **1** |",
            "| findings on the right twin, of 1 |  | **1** | **0** | **0** | **0** | **0** |",
            "compute-sanitizer 2026.1",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("old"), "{text}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }

    #[test]
    fn times_are_the_shortest_launches() {
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let rows = [
            row(TIMES, "", "none", json!({ "ms": [0.5, 0.25] })),
            row(TIMES, "", "racecheck", json!({ "ms": [9.0, 5.0] })),
            row(TIMES, "", "memcheck", json!({ "outcome": "no_end" })),
            row(TIMES, "", "check", json!({ "outcome": "passed" })),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let text = times(&path).unwrap().unwrap();
        assert!(text.contains("| `sum` | 0.25 ms | 5.0 ms (20×) | no end | – | – | 1.5 s | – |"), "{text}");
    }
}
