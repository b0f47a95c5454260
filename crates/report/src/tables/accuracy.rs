//! The curves of 8-bit attention's error over the number of keys, and the errors at some numbers of keys,
//! from rows of `flashcore accuracy --evidence`.

use std::path::Path;

use check::accuracy::{Draw, Point, Scheme};
use serde::Deserialize;

use super::render::{day_of, line};
use super::{TableError, parsed};
use crate::accuracy::chart;
use crate::chart::standalone;

/// The suite of the rows, and the name of the table.
pub(super) const SUITE: &str = "accuracy";

/// Numbers of keys in the table, besides the largest one.
const SHOWN: [usize; 2] = [8 << 10, 128 << 10];

#[derive(Clone, Debug, Deserialize)]
struct Row {
    distribution: Draw,
    #[serde(flatten)]
    point: Point,
    commit: Option<String>,
    run: String,
    when: String,
}

/// The table of the newest run, and its picture. `None` without rows.
pub(super) fn table(path: &Path) -> Result<Option<(String, String)>, TableError> {
    let rows: Vec<Row> = parsed(path, |row| row["suite"] == SUITE)?;
    let Some(newest) = rows.iter().max_by(|a, b| a.when.cmp(&b.when)) else { return Ok(None) };
    let curves = Draw::ALL.map(|draw| {
        let of_draw = rows.iter().filter(|row| row.run == newest.run && row.distribution == draw);
        (draw, of_draw.map(|row| row.point).collect::<Vec<Point>>())
    });
    let names = Scheme::ALL.map(Scheme::name);
    let header: Vec<&str> = ["inputs", "keys"].into_iter().chain(names).collect();
    let mut lines = vec![line(&header), line(&[":--", "--:", "--:", "--:", "--:", "--:"])];
    for (draw, points) in &curves {
        let of = |keys: usize, scheme: Scheme| {
            let point = points.iter().find(|point| (point.keys, point.scheme) == (keys, scheme));
            point.map(|point| format!("{:.2} %", 100.0 * point.relative))
        };
        let most = points.iter().map(|point| point.keys).max();
        for keys in SHOWN.into_iter().chain(most.filter(|most| !SHOWN.contains(most))) {
            let errors = Scheme::ALL.map(|scheme| of(keys, scheme));
            if errors.iter().all(Option::is_none) {
                continue;
            }
            let errors = errors.map(|error| error.unwrap_or("–".to_owned()));
            let cells = [draw.name().to_owned(), keys.to_string()].into_iter().chain(errors);
            lines.push(line(&cells.collect::<Vec<_>>()));
        }
    }
    lines.push(String::new());
    let commit = newest.commit.as_deref().unwrap_or("none");
    lines.push(format!(
        "Computed by the emulator's model of sm_90, commit {commit}, {}.  ",
        day_of(&newest.when)
    ));
    Ok(Some((lines.join("\n"), standalone(&chart(&curves)))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_run_is_shown_at_most_keys() {
        let row = |scheme: &str, keys: usize, when: &str, relative: f64| {
            json!({
                "suite": "accuracy", "distribution": "heavy_tailed", "scheme": scheme, "keys": keys,
                "relative": relative, "commit": "abc", "run": when, "when": when,
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("emulator.jsonl");
        let rows = [
            row("by_block", 1024, "2026-01-01", 0.5),
            row("by_block", 512, "2026-01-02", 0.02),
            row("by_block", 1024, "2026-01-02", 0.03),
            row("exact", 1024, "2026-01-02", 0.0299),
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let (text, picture) = table(&path).unwrap().unwrap();
        assert!(text.contains("| heavy-tailed | 1024 | 3.00 % | – | – | 2.99 % |"), "{text}");
        assert!(!text.contains("50.00") && text.contains("commit abc, 2026-01-02"), "{text}");
        assert!(picture.contains("two-level sums, 512: 2.00 %"), "{picture}");
        assert!(table(&scratch.path("none.jsonl")).unwrap().is_none());
    }
}
