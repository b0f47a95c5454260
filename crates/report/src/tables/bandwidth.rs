//! The table and the picture of the suite `decode`: the rate at which a kernel reads its cache, beside that
//! of the card's memory.

use std::path::Path;

use bench::OURS;

use super::TableError;
use super::features::{Newest, newest, rows};
use super::named::{Named, places};
use super::render::{library, line};
use crate::chart::{Bars, Compared, compared, standalone};

/// The name of the table.
pub(super) const SUITE: &str = "bandwidth";
/// The suite of its rows.
const ROWS: &str = "decode";
/// A library with several kernels for a problem, of which the fastest is shown.
const SEVERAL: &str = "flashinfer-";
/// FLOP per byte above which the tensor cores limit a kernel, not the memory.
const RIDGE: f64 = 200.0;
/// Bandwidth of the memory by the card's data sheet, TB/s.
const DATA_SHEETS: [(&str, f64); 2] = [("H200", 4.8), ("H100", 3.35)];

/// The newest run of each problem, and the picture. `None` without rows of a card with a data sheet.
pub(super) fn table(path: &Path) -> Result<Option<(String, String)>, TableError> {
    let all = rows(path)?;
    let limited =
        |own: &Named| own.rate().is_some_and(|rate| own.tflops.is_some_and(|tflops| tflops < RIDGE * rate));
    let found: Vec<Newest<'_>> = newest(&all)
        .into_iter()
        .filter(|problem| problem.own.suite == ROWS && limited(problem.own))
        .collect();
    let device = found.first().map(|problem| problem.own.device());
    let sheet = device.and_then(|device| DATA_SHEETS.into_iter().find(|(name, _)| device.contains(name)));
    let Some((_, full)) = sheet else { return Ok(None) };
    let mut lines = vec![
        line(&["problem", "**FlashCore**, TB/s", "of the memory's", "others, TB/s"]),
        line(&[":--", "--:", "--:", ":--"]),
    ];
    let mut problems = Vec::new();
    for Newest { own, others, .. } in &found {
        let rate = own.rate().unwrap_or_default();
        let (several, others): (Vec<&Named>, Vec<&Named>) =
            others.iter().partition(|row| row.implementation.starts_with(SEVERAL));
        let rate_of = |row: &Named| row.rate().unwrap_or_default();
        let fastest = several.into_iter().max_by(|a, b| rate_of(a).total_cmp(&rate_of(b)));
        let of_others: Vec<(String, f64)> =
            others.into_iter().chain(fastest).filter_map(|row| Some((name(row), row.rate()?))).collect();
        let told: Vec<String> = of_others.iter().map(|(name, rate)| format!("{name} {rate:.2}")).collect();
        let title = own.problem.trim_start_matches("decode ").to_owned();
        let share = format!("{:.0} %", 100.0 * rate / full);
        lines.push(line(&[title.clone(), format!("{rate:.2}"), share, told.join(", ")]));
        // A picture of the table's whole length would be several screens long.
        if of_others.len() > 1 {
            let values = std::iter::once(("FlashCore".to_owned(), rate)).chain(of_others).collect();
            problems.push(Compared { title, values });
        }
    }
    lines.push(String::new());
    lines.extend(places(found.iter().map(|problem| problem.own)));
    Ok(Some((lines.join("\n"), standalone(&compared(&problems, Bars { unit: "TB/s", full: Some(full) })))))
}

/// A contestant's name in the picture.
fn name(row: &Named) -> String {
    if let Some(kind) = row.implementation.strip_prefix(OURS) {
        return format!("FlashCore{}", kind.replace('-', ", "));
    }
    let version = row.implementation.strip_prefix(SEVERAL).and_then(|kind| kind.split_once(' '));
    version.map_or_else(|| library(&row.implementation), |(_, version)| format!("FlashInfer {version}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rates_are_shares_of_the_data_sheet() {
        let row = |suite: &str, name: &str, device: &str, rate: Option<f64>| {
            json!({
                "suite": suite, "problem": format!("{suite} B1 x 8192"), "impl": name, "us_median": 10.0,
                "tflops": 1.0, "tb_per_s": rate, "fault": null, "device": device, "driver": "CUDA 13.0",
                "commit": "abc", "run": "1", "when": "2026-01-01",
            })
            .to_string()
        };
        let scratch = host::store::Scratch::new().unwrap();
        let path = scratch.path("h200.jsonl");
        let of = |device: &str| {
            let rows = [
                row("decode", "flashcore", device, Some(3.6)),
                row("decode", "flashcore-dense", device, Some(4.0)),
                row("decode", "flashinfer-cuda-cores 0.7", device, Some(1.2)),
                row("decode", "flashinfer-tensor-cores 0.7", device, Some(3.0)),
                row("decode", "sdpa-cudnn 2.11.0+cu130", device, Some(2.4)),
                row("softcap", "flashcore", device, None),
            ];
            std::fs::write(&path, rows.join("\n")).unwrap();
            table(&path).unwrap()
        };
        let (text, picture) = of("NVIDIA H200").unwrap();
        let told = "| B1 x 8192 | 3.60 | 75 % | FlashCore, dense 4.00, PyTorch cuDNN 2.11.0 2.40, FlashInfer 0.7 3.00 |";
        assert!(text.contains(told) && !text.contains("softcap"), "{text}");
        assert!(picture.contains("3.60 TB/s") && picture.contains("PyTorch cuDNN 2.11.0"), "{picture}");
        assert!(of("NVIDIA L4").is_none(), "no data sheet");
    }
}
