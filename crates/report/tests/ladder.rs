//! Tests that the ladder's kernels get the expected verdicts, reasons and root causes, without hints.

use bench::gpu::Workbench;
use check::gate::Settings;
use climb::{Climb, Options, Rung, Score, climb, rungs};
use kernels::Arch;
use problem::{DType, Problem};
use rayon::prelude::*;

fn small_climb() -> Climb {
    let problem = Problem::new(1, 8, 128, 64, DType::F16);
    let settings = Settings::quick().first_run();
    let machines = Options::machines_for(None);
    let options = Options { problem: problem.clone(), settings, ptxas: None, cpu_seconds: None, machines };
    climb(&options, rungs(&problem, &Arch::SM_89).unwrap(), None::<&mut Workbench>, |_| {}).unwrap()
}

#[test]
fn every_rung_gets_its_verdict_and_its_cause() {
    let climb = small_climb();
    assert_eq!(climb.surprises(), [""; 0]);
    let finding = |rung: &str, name: &str| {
        let rung = climb.rungs.iter().find(|r| r.rung.name == rung).unwrap_or_else(|| panic!("no {rung}"));
        let found = rung.study.findings.iter().find(|f| f.name.name() == name);
        let names: Vec<_> = rung.study.findings.iter().map(|f| f.name.name()).collect();
        found.cloned().ok_or_else(|| format!("{}: {names:?} lacks {name}", rung.rung.name))
    };
    // The actual problem of each rung, which the original kernels do not name.
    for (rung, cause) in [
        ("minimal", "uncoalesced global accesses"),
        ("phase1", "serial reduction"),
        ("phase1", "uncoalesced global accesses"),
        ("phase3", "bank conflicts"),
        ("phase1", "tensor cores unused"),
        ("phase3", "idle warps"),
        ("phase4", "idle warps"),
        ("phase6_it1", "local memory"),
        ("phase6_it2", "idle warps"),
        ("p1_wmma", "serial reduction"),
        ("p1_wmma", "tensor cores hardly used"),
        ("u8_baseline", "local memory"),
        ("u8_baseline", "tensor cores unused"),
        ("u8_stage_a", "bank conflicts"),
    ] {
        let finding = finding(rung, cause).unwrap_or_else(|e| panic!("{e}"));
        assert!(!finding.lines.is_empty() && finding.expected_gain > 1.0, "{rung}: {finding:?}");
        assert!((0.0..=1.0).contains(&finding.share), "{rung}: {finding:?}");
    }
    // The fused kernel has none of these.
    for cause in ["serial reduction", "idle warps", "bank conflicts", "tensor cores unused", "local memory"] {
        assert!(finding("fused", cause).is_err(), "{cause}");
    }
    let json = climb.json();
    for key in ["name", "verdict", "hazards", "max_diff", "us", "us_kind", "bound", "findings"] {
        assert!(json["rungs"][0].get(key).is_some(), "{key} is missing");
    }
    let page = flashcore_report::page(&climb);
    assert!(page.contains("<svg") && !page.contains("http://") && !page.contains("https://"));
    assert!(!page.contains("NaN µs") && page.contains("phase4_race"));
    // Times of the log that are of a batch of two are marked in their rows.
    let of_two =
        climb.rungs.iter().filter(|r| r.rung.quoted.as_ref().is_some_and(|quoted| quoted.batch == 2));
    let of_two = of_two.count();
    assert!(of_two > 0 && page.matches("<span class=\"soft\">for a batch of 2</span>").count() == of_two);
    assert!(page.contains("versions of the kernel pass the check") && page.contains("times as fast"));
    assert!(page.contains("<dt>error / allowed</dt>"), "the columns are explained");
    // Each entry of the contents leads to its heading.
    assert_eq!(page.matches("<li><a href=\"#").count(), page.matches("<h2 id=").count());
}

/// Compares the log's measured table with the model of an L4, each time for the problem that was timed.
#[test]
fn the_model_orders_the_times_of_the_log() {
    let problem = Problem::new(1, 8, 512, 64, DType::F16);
    let predict = |rung: &Rung| {
        let quoted = rung.quoted.as_ref()?;
        let kernel = &rung.head.kernel;
        let recorded = &check::study::record(&rung.head, 2).unwrap()[0];
        let resources = predict::resources::estimate(&kernel.module, &kernel.entry).unwrap();
        let launch = quoted.launch.as_ref().unwrap();
        let l4 = &predict::machine::L4;
        let predicted = check::study::forecast(kernel, launch, &recorded.traces, &resources, l4).unwrap();
        Some((predicted.us, quoted.us))
    };
    let rungs = rungs(&problem, &Arch::SM_89).unwrap();
    let pairs: Vec<(f64, f64)> = rungs.par_iter().filter_map(predict).collect();
    let score = Score::of(&pairs);
    assert_eq!(score.rungs, 11);
    assert!(score.spearman >= 0.85 && score.median_error < 0.35, "{score:?}: {pairs:?}");
}
