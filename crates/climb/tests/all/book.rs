//! Tests that the book agrees with the code and the evidence rows: figures of the time model, genes and
//! hazards.

use check::forecast::Fit;
use cpu::CpuPlan;
use kernels::{Arch, Family};
use problem::{Pass, PassKind, Problem};
use serde_json::Value;

fn root(path: &str) -> String {
    std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Number of forecasts, rank correlation and median error (per cent) for these parts of a run.
fn score(rows: &[Value], parts: &[&str]) -> (usize, f64, f64) {
    let counts = |row: &&Value| row["part"].as_str().is_some_and(|part| parts.contains(&part));
    let pair = |row: &Value| (row["forecast_us"][1].as_f64().unwrap(), row["us"].as_f64().unwrap());
    let pairs: Vec<(f64, f64)> = rows.iter().filter(counts).map(pair).collect();
    let fit = Fit::of(&pairs);
    (fit.count, fit.spearman, 100.0 * fit.median_error)
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
    let said = root("docs/src/guide/climb.md").split_whitespace().collect::<Vec<_>>().join(" ");
    for figure in [
        format!("the {rungs} versions and {plans} held-out plans"),
        format!("the rank correlation is {rank:.3} and the median error {error:.0} %"),
        format!("(the versions alone: {rungs_rank:.3} and {rungs_error:.0} %)"),
    ] {
        assert!(said.contains(&figure), "the chapter lacks: {figure}");
    }
}

/// The text between a second-level heading and the next one.
fn section<'p>(page: &'p str, heading: &str) -> &'p str {
    let after =
        page.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading}")).1;
    after.split("\n## ").next().unwrap_or_default()
}

/// Asserts that every gene of a plan is in the first column of its family's table.
fn has_every_gene(page: &str, family: &str, plan: &Value) {
    let table = section(page, family);
    for gene in plan.as_object().unwrap().keys().filter(|key| *key != "family") {
        assert!(table.contains(&format!("\n| `{gene}` |")), "the table of {family} lacks {gene}");
    }
}

#[test]
fn every_gene_is_in_the_reference() {
    let page = root("docs/src/reference/genes.md");
    let problem = Problem::mission();
    for family in Family::ALL {
        let pass = if family.pass() == PassKind::Forward { Pass::default() } else { Pass::BACKWARD };
        let plan = family.default_for(&problem.clone().with_pass(pass), &Arch::SM_90).unwrap();
        has_every_gene(&page, family.name(), &serde_json::to_value(plan).unwrap());
    }
    has_every_gene(&page, "cpu", &serde_json::to_value(CpuPlan::for_problem(&problem)).unwrap());
}

#[test]
fn every_hazard_of_a_filetest_is_in_the_reference() {
    let page = root("docs/src/reference/hazards.md");
    let folder = format!("{}/../../filetests/hazard", env!("CARGO_MANIFEST_DIR"));
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for kind in
            text.lines().filter_map(|line| line.split_once("// hazard: ")).flat_map(|(_, k)| k.split(' '))
        {
            let (row, example) = (format!("\n| `{kind}` |"), format!("\n### {kind}\n"));
            assert!(page.contains(&row) && page.contains(&example), "the page lacks {kind}");
        }
    }
}
