//! Tests of results that a run uses from earlier runs in the ledger, and of the device's cost.

use super::*;
use ledger::Reason;

/// Runs to the end and passes each task to `see` first.
fn run(page: &Page, config: &Config, landscape: &mut Landscape, mut see: impl FnMut(&Task)) -> Evolution {
    let mut evolution = begin(page, config, Limits::beside_device(2));
    loop {
        match evolution.ask(0.0).unwrap() {
            Ask::Task(task) => {
                see(&task);
                evolution.tell(&landscape.evaluate(&task)).unwrap();
            }
            Ask::Wait | Ask::Propose(_) => panic!("nothing is under way"),
            Ask::Done => return evolution,
        }
    }
}

fn by(program: Option<&str>) -> Config {
    Config { program: program.map(str::to_owned), ..config(&Problem::mission(), 60, 3) }
}

fn count(evolution: &Evolution, what: &str) -> u64 {
    json!(evolution.report())["taken_over"][what].as_u64().unwrap()
}

#[test]
fn no_kernel_is_gated_or_timed_twice_on_a_ledger() {
    let page = Page::new("twice");
    let config = by(Some("this"));
    // Without a model, no candidate is rejected as too slow before the gate.
    let mut landscape = Landscape { predicts: false, ..Landscape::new(3, &config) };
    let first = run(&page, &config, &mut landscape, |_| {});
    assert_eq!((count(&first, "verdicts"), count(&first, "times")), (0, 0));
    drop(first);
    let mut raced = 0;
    let second = run(&page, &config, &mut landscape, |task| raced += usize::from(task.stage == Stage::Race));
    for ((stage, kernel), &looks) in &landscape.seen {
        let is_compared_with = *kernel == landscape.spared;
        if matches!(stage, Stage::Check | Stage::Microbench) && !is_compared_with {
            assert_eq!(looks, 1, "{stage:?} of {kernel}");
        }
    }
    assert!(raced >= 4, "races are run anew: {raced}");
    assert!(
        count(&second, "verdicts") > 20 && count(&second, "times") > 20,
        "{}",
        json!(second.report())["taken_over"]
    );
    // Each result names its origin and has the same ratio to the baseline.
    let ledger = page.open();
    let facts = ledger.resume(second.run()).unwrap();
    let dossiers: Vec<Dossier> =
        facts.candidates.iter().map(|known| ledger.candidate(known.id).unwrap()).collect();
    let taken = |dossier: &&Dossier| dossier.measurements.first().is_some_and(|m| m.samples.is_empty());
    assert_eq!(dossiers.iter().filter(taken).count() as u64, count(&second, "times"));
    let baseline_us = |run: i64| {
        let candidates = ledger.candidates(RunId(run), CandidateId(0), 1).unwrap();
        ledger.candidate(candidates[0].id).unwrap().measurements[0].us
    };
    for dossier in dossiers.iter().filter(taken) {
        let words = dossier.checks.last().unwrap().reasons.join(" ");
        let (origin, run) =
            words.strip_prefix("taken over from candidate ").unwrap().split_once(" of run ").unwrap();
        assert!(run.starts_with("1: "), "{words}");
        let origin = ledger.candidate(CandidateId(origin.parse().unwrap())).unwrap();
        let (then, now) =
            (origin.measurements[0].us / baseline_us(1), dossier.measurements[0].us / baseline_us(2));
        assert!((then / now - 1.0).abs() < 1e-9, "{then} {now}");
    }
    let failed: Vec<&Rejection> =
        dossiers.iter().flat_map(|d| &d.rejections).filter(|r| r.reason == Reason::Failed).collect();
    assert!(!failed.is_empty());
    assert!(failed.iter().all(|r| r.detail.starts_with("taken over from candidate ")), "{failed:?}");
    let soundness = ledger.check().unwrap();
    assert!(soundness.disagreements.is_empty(), "{:?}", soundness.disagreements);
}

#[test]
fn what_another_program_found_is_not_taken_over() {
    for [then, now] in [[Some("one"), Some("other")], [None, Some("one")], [None, None]] {
        let page = Page::new("others");
        let config = by(then);
        let mut landscape = Landscape::new(3, &config);
        drop(run(&page, &config, &mut landscape, |_| {}));
        let second = run(&page, &by(now), &mut landscape, |_| {});
        assert_eq!((count(&second, "verdicts"), count(&second, "times")), (0, 0), "{then:?} {now:?}");
    }
}

/// Times are used relative to the baseline's kernel. A kernel that was not timed in a run with the baseline's
/// kernel is timed again.
#[test]
fn a_time_without_the_baselines_is_none() {
    let page = Page::new("beside");
    let config = by(Some("this"));
    let mut landscape = Landscape::new(3, &config);
    drop(run(&page, &config, &mut landscape, |_| {}));
    let mut other = config.clone();
    let plan = |candidate: &Candidate| match candidate {
        Candidate::Gpu(Plan::Mma(plan)) => plan.clone(),
        _ => panic!("a plan of the mma family"),
    };
    let mut slow = plan(&other.cases[0].baseline);
    (slow.block_m, slow.kv_warps, slow.stages, slow.products, slow.block_n) =
        (64, 1, 1, attend::Order::InTurn, 48);
    other.cases[0].baseline = Candidate::Gpu(Plan::Mma(slow));
    landscape.spared = Landscape::identity(&other.cases[0].baseline);
    let was_timed = landscape.seen.contains_key(&(Stage::Microbench, landscape.spared.clone()));
    let second = run(&page, &other, &mut landscape, |_| {});
    assert!(count(&second, "verdicts") > 0);
    assert_eq!(count(&second, "times") > 0, was_timed);
}

#[test]
fn a_run_that_takes_over_goes_on_as_if_it_had_not_stopped() {
    let (config, mut reports) = (by(Some("this")), Vec::new());
    for cut in [usize::MAX, 1, 9, 31] {
        let page = Page::new("over-cut");
        let mut landscape = Landscape { noise: 0.0, ..Landscape::new(3, &config) };
        let mut small = config.clone();
        small.candidates = Some(30);
        drop(run(&page, &small, &mut landscape, |_| {}));
        let mut evolution = begin(&page, &config, Limits::ALONE);
        drive(&mut evolution, &mut landscape, 0, cut);
        let number = evolution.run();
        drop(evolution);
        let mut evolution = Evolution::resume(page.open(), number, Limits::ALONE).unwrap();
        drive(&mut evolution, &mut landscape, 0, usize::MAX);
        assert!(count(&evolution, "times") > 5);
        reports.push(essence(&evolution));
    }
    assert!(reports.iter().all(|report| *report == reports[0]));
}

/// The device is held from its first use to its last. All of this time costs, whether tasks used it or not.
#[test]
fn held_time_is_kept_and_costs() {
    let page = Page::new("held");
    let config = by(None);
    let mut landscape = Landscape::new(3, &config);
    let (ledger, environment) = (page.open(), Environment::default());
    let mut evolution = Evolution::begin(ledger, config, environment, Some(7.2), Limits::ALONE).unwrap();
    let (mut now, mut first, mut last) = (0.0, None, 0.0);
    loop {
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => {
                let is_of_device = task.stage.is_of_device();
                first = first.or(is_of_device.then_some(now));
                now += 3.0;
                evolution.at(now);
                let outcome = landscape.evaluate(&task);
                let device_seconds = if is_of_device { 2.0 } else { 0.0 };
                last = if is_of_device { now } else { last };
                evolution.tell(&Outcome { device_seconds, ..outcome }).unwrap();
            }
            Ask::Wait | Ask::Propose(_) => panic!("nothing is under way"),
            Ask::Done => break,
        }
    }
    let held = last - first.unwrap();
    let cost = page.open().cost(evolution.run()).unwrap();
    assert!((cost.device_seconds - held).abs() < 1e-6, "{} of {held}", cost.device_seconds);
    assert!((cost.price.unwrap() - held * 7.2 / 3600.0).abs() < 1e-9);
    assert!(cost.items.iter().any(|item| item.what == "between tasks"), "{:?}", cost.items);
    let told = &json!(evolution.report())["cost"];
    assert_eq!(told["price"].as_f64(), cost.price);
    assert_eq!(told["device_seconds"].as_f64(), Some(cost.device_seconds));
}
