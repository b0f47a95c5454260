//! What the README says of the time model is what the rows give.

use flashcore_lab::bench::median;
use flashcore_lab::climb::rank_correlation;
use serde_json::Value;

fn root(path: &str) -> String {
    std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Rank correlation and median error, in per cent, of a run's forecasts of these parts.
fn score(rows: &[Value], parts: &[&str]) -> (usize, f64, f64) {
    let counts = |row: &&Value| row["part"].as_str().is_some_and(|part| parts.contains(&part));
    let pair = |row: &Value| (row["forecast_us"][1].as_f64().unwrap(), row["us"].as_f64().unwrap());
    let pairs: Vec<(f64, f64)> = rows.iter().filter(counts).map(pair).collect();
    let errors: Vec<f64> = pairs.iter().map(|(forecast, us)| 100.0 * (forecast / us - 1.0).abs()).collect();
    (pairs.len(), rank_correlation(&pairs), median(&errors))
}

#[test]
fn the_time_model_s_figures_are_the_newest_run_s() {
    let rows: Vec<Value> =
        root("evidence/model.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let newest = rows.iter().rev().find(|row| row["part"] == "test").unwrap()["run"].clone();
    let rows: Vec<Value> = rows.into_iter().filter(|row| row["run"] == newest).collect();
    let (rungs, rungs_rank, rungs_error) = score(&rows, &["rung"]);
    let (plans, ..) = score(&rows, &["test"]);
    let (_, rank, error) = score(&rows, &["rung", "test"]);
    let said = root("README.md").split_whitespace().collect::<Vec<_>>().join(" ");
    for figure in [
        format!("the {rungs} rungs and {plans} plans"),
        format!("the rank correlation is {rank:.3} and the median error {error:.0} %"),
        format!("(the rungs alone: {rungs_rank:.3} and {rungs_error:.0} %)"),
    ] {
        assert!(said.contains(&figure), "the README lacks: {figure}");
    }
}
