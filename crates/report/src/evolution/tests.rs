//! Pages of whole ledgers.

use kernels::select::Shape;
use ledger::{Against, Arm, Stage, TimeKind};
use problem::{DType, Problem};
use serde_json::json;

use super::live::{candidate, candidates, live_run, runs};
use super::*;
use bench::SpeedVerdict;
use host::store::Scratch;
use ledger::{Candidate, Finding, KernelText, Language, Outcome, Reason};
use ledger::{Environment, Ledger, MeasurementFact, NewCandidate, Rejection, Run, RunId};

const HOSTILE: &str = "<script>alert('x')</script>";

fn begin(ledger: &Ledger, device: &str) -> RunId {
    let environment = Environment { driver: HOSTILE.into(), ..Environment::default() };
    let run = Run { device: device.into(), config: json!({}), environment, price_per_hour: None };
    ledger.begin_run(&run).unwrap()
}

fn add(ledger: &Ledger, run: RunId, seq: usize, operator: &str) -> CandidateId {
    add_to(ledger, run, seq, operator, Arm::Evolution)
}

fn add_to(ledger: &Ledger, run: RunId, seq: usize, operator: &str, arm: Arm) -> CandidateId {
    let text = format!("{operator} {seq}");
    let source = KernelText { language: Language::Ptx, text, launch: HOSTILE.into() };
    let new = NewCandidate {
        run,
        problem: Shape::of(&Problem::new(1, 2, seq, 64, DType::F16)),
        candidate: Candidate::Kernel(source),
        arm,
        operator: operator.into(),
        parents: Vec::new(),
        changes: json!({}),
    };
    ledger.add_candidate(&new).unwrap()
}

fn ledger() -> (Scratch, Ledger) {
    let folder = Scratch::new().unwrap();
    let ledger = Ledger::open(&folder.path("pages.ledger")).unwrap();
    (folder, ledger)
}

/// A problem without any data.
pub(super) fn empty() -> ProblemView {
    ProblemView {
        problem: Shape::of(&Problem::mission()),
        baseline: None,
        reference: None,
        best: None,
        chance: None,
        drawn: None,
        curves: Vec::new(),
        lineage: Vec::new(),
        niches: Vec::new(),
        top: Vec::new(),
        control: None,
        races: Vec::new(),
        noise_floor: None,
        conclusion: (false, String::new()),
    }
}

#[test]
fn a_run_that_has_nothing_yet_has_a_page() {
    let (_folder, ledger) = ledger();
    let empty = RunView::of(&ledger, begin(&ledger, "H200")).unwrap();
    assert!(page(&empty, &[]).contains("no times yet"));
    let run = begin(&ledger, "Voodoo 2");
    add(&ledger, run, 128, "seed:tuned");
    let view = RunView::of(&ledger, run).unwrap();
    let page = page(&view, &[]);
    for words in [
        "No candidate has a time yet",
        "No cell is filled yet",
        "The peaks of Voodoo 2",
        "No candidate was rejected yet",
    ] {
        assert!(page.contains(words), "{words}");
    }
    assert!(RunView::of(&ledger, RunId(9)).is_err());
}

/// A native kernel has no PTX, so its page has no sections of lines.
#[test]
fn a_native_plan_has_no_section_of_lines() {
    let (_folder, ledger) = ledger();
    let view = RunView::of(&ledger, begin(&ledger, "a processor")).unwrap();
    let analysed = [1, 2].map(|id| AnalysedKernel {
        id: CandidateId(id),
        name: "native".into(),
        candidate: Candidate::Cpu(cpu::CpuPlan::for_problem(&Problem::mission())),
        time: None,
        anatomy: std::sync::Arc::new(Err("no PTX".into())),
    });
    let page = page(&view, &analysed);
    assert!(page.contains("The best beside the baseline"), "{page}");
    assert!(!page.contains("line by line") && !page.contains("#kernel-"), "{page}");
}

#[test]
fn a_list_of_candidates_says_where_its_times_come_from() {
    let (_folder, ledger) = ledger();
    let measured = begin(&ledger, "H200");
    let config = json!({ "target": { "model": { "machine": "h200" } } });
    let environment = Environment::default();
    let run = Run { device: "H200".into(), config, environment, price_per_hour: None };
    let predicted = ledger.begin_run(&run).unwrap();
    let page = |run| pages::candidates(&ledger, run, None).unwrap();
    assert!(page(measured).contains(">measured µs</th>"), "{}", page(measured));
    assert!(page(predicted).contains(">µs, predicted</th>"), "{}", page(predicted));
    assert!(!page(predicted).contains("measured µs"), "{}", page(predicted));
}

#[test]
fn a_run_as_csv_and_two_runs_side_by_side() {
    let (_folder, ledger) = ledger();
    let runs = [begin(&ledger, "H200"), begin(&ledger, "L4")];
    add(&ledger, runs[0], 128, "mutate:a+\"b\"");
    let csv = pages::csv(&ledger, runs[0]).unwrap();
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("candidate,group,operator"), "{csv}");
    assert!(lines[1].starts_with("1,\"evolution\",\"mutate:a+\"\"b\"\"\""), "{csv}");
    assert!(pages::compare(&ledger, runs[0], runs[1]).unwrap().contains("searched different problems"));
    add(&ledger, runs[1], 128, "mutate:a");
    let page = pages::compare(&ledger, runs[0], runs[1]).unwrap();
    assert!(page.contains("different devices") && !page.contains("different problems"), "{page}");
    for words in ["Run 1 and run 2", "H200", "L4", "f16 B1 H2 S128 D64", "noise floor", "no times yet"] {
        assert!(page.contains(words), "{words}");
    }
    assert!(!page.contains(HOSTILE));
    assert!(pages::compare(&ledger, runs[0], RunId(9)).is_err() && pages::csv(&ledger, RunId(9)).is_err());
}

/// Baseline and control pass the stages but are not candidates: the funnel and the operators' table do
/// not count them, the cost does.
#[test]
fn the_baseline_and_the_control_are_not_counted_as_candidates() {
    let (_folder, ledger) = ledger();
    let run = begin(&ledger, "H200");
    let arms = [Arm::Baseline, Arm::Control, Arm::Evolution, Arm::Evolution, Arm::Random];
    for (i, arm) in arms.into_iter().enumerate() {
        let operator = ["baseline", "control", "mutate:stages", "mutate:stages", "random"][i];
        let candidate = add_to(&ledger, run, 128, operator, arm);
        let rejection =
            Rejection { stage: Stage::Screen, reason: Reason::Spills, detail: format!("of {operator}") };
        let outcome = Outcome {
            candidate,
            stage: Stage::Screen,
            problem: Shape::of(&Problem::new(1, 2, 128, 64, DType::F16)),
            seconds: 1.0,
            device_seconds: 0.0,
            finding: Finding::Rejected(rejection),
        };
        ledger.tell(&outcome).unwrap();
    }
    let view = RunView::of(&ledger, run).unwrap();
    assert_eq!(view.candidates, 3);
    let screened = view.funnel.iter().find(|passage| passage.stage == Stage::Screen).unwrap();
    assert_eq!((screened.entered, screened.rejected), (3, 3));
    let reasons: Vec<(i64, &str)> =
        view.rejections.iter().map(|found| (found.count, found.example.1.as_str())).collect();
    assert_eq!(reasons, [(3, "of random")]);
    let mut operators: Vec<(String, i64)> =
        view.operators.iter().map(|o| (o.operator.to_string(), o.candidates)).collect();
    operators.sort_unstable();
    assert_eq!(operators, [("mutate:stages".to_owned(), 2), ("random".to_owned(), 1)]);
    assert_eq!(view.cost.items[0].tasks, 5);
}

/// The faster plan has the smaller ratio, because its incumbent was faster. The page names the incumbent.
#[test]
fn the_fastest_plans_say_what_their_ratios_are_over() {
    let (_folder, ledger) = ledger();
    for (us, ratio) in [(400.0, 4.0), (90.0, 1.5)] {
        let run = begin(&ledger, "H200");
        let [incumbent, candidate] = ["baseline", "mutate:stages"].map(|operator| {
            let arm = if operator == "baseline" { Arm::Baseline } else { Arm::Evolution };
            add_to(&ledger, run, 128, &format!("{operator} {us}"), arm)
        });
        let told = |candidate, stage, trial, us, against| Outcome {
            candidate,
            stage,
            problem: Shape::of(&Problem::new(1, 2, 128, 64, DType::F16)),
            seconds: 1.0,
            device_seconds: 1.0,
            finding: Finding::Timed {
                check: None,
                measurement: MeasurementFact {
                    trial,
                    kind: TimeKind::Measured,
                    problem: Shape::of(&Problem::new(1, 2, 128, 64, DType::F16)),
                    samples: vec![us],
                    us,
                    low_us: us,
                    high_us: us,
                    against,
                },
            },
        };
        let (low, high) = (ratio, ratio);
        let against = Against { incumbent, ratio, low, high, noise: 1.0, verdict: SpeedVerdict::Faster };
        ledger.tell(&told(incumbent, Stage::Microbench, Trial::Microbench, us, None)).unwrap();
        ledger.tell(&told(candidate, Stage::Race, Trial::Race, us / ratio, Some(against))).unwrap();
    }
    let page = pages::top(&ledger, None, Some("H200")).unwrap().unwrap();
    let compared = pages::compare(&ledger, RunId(1), RunId(2)).unwrap();
    assert_eq!(compared.matches("<td>measured</td>").count(), 2, "{compared}");
    let rows: Vec<&str> = page.split("<tr>").skip(2).collect();
    assert!(page.contains("over the plan it raced") && rows.len() == 2, "{page}");
    assert!(
        rows[0].contains("60.00") && rows[0].contains("1.50× FASTER over") && rows[0].contains("90.00 µs"),
        "{page}"
    );
    assert!(
        rows[1].contains("100.0") && rows[1].contains("4.00× FASTER over") && rows[1].contains("400.0 µs"),
        "{page}"
    );
}

/// A run whose best candidate has this race against the baseline, and a control that shows this noise.
fn compared(ledger: &Ledger, kind: TimeKind, ratio: f64, noise: f64) -> RunId {
    let run = begin(ledger, "H200");
    let problem = Shape::of(&Problem::new(1, 2, 128, 64, DType::F16));
    let arms = [Arm::Baseline, Arm::Evolution, Arm::Random, Arm::Control];
    let [baseline, best, drawn, control] = arms.map(|arm| {
        add_to(ledger, run, 128, &format!("{}", arms.iter().position(|a| *a == arm).unwrap()), arm)
    });
    let tell = |candidate, trial, us, against| {
        let measurement = MeasurementFact {
            trial,
            kind,
            problem,
            samples: vec![us],
            us,
            low_us: us * 0.6,
            high_us: us * 1.4,
            against,
        };
        let stage = if trial == Trial::Race { Stage::Race } else { Stage::Microbench };
        let finding = Finding::Timed { check: None, measurement };
        let told = Outcome { candidate, stage, problem, seconds: 1.0, device_seconds: 1.0, finding };
        ledger.tell(&told).unwrap();
    };
    let race = |ratio: f64, verdict| {
        Some(Against {
            incumbent: baseline,
            ratio,
            low: ratio - 0.001,
            high: ratio + 0.001,
            noise: 1.001,
            verdict,
        })
    };
    tell(baseline, Trial::Microbench, 10.0, None);
    for candidate in [best, drawn, control] {
        tell(candidate, Trial::Microbench, 9.0, None);
    }
    tell(best, Trial::Race, 10.0 / ratio, race(ratio, SpeedVerdict::Faster));
    tell(drawn, Trial::Race, 10.0 / 1.01, race(1.01, SpeedVerdict::Faster));
    tell(control, Trial::Race, 10.0 / noise, race(noise, SpeedVerdict::Undecided));
    let ours = Against {
        incumbent: baseline,
        ratio,
        low: ratio,
        high: ratio,
        noise: 1.0,
        verdict: SpeedVerdict::Faster,
    };
    let found = ledger::gain(&ours, &Against { ratio: 1.01, low: 1.01, high: 1.01, ..ours }, noise);
    let why = json!({ (ledger::CHANCE): { "gain": found, "says": found.says() } });
    ledger.decided(run, &ledger::Decision { what: "stop".into(), candidate: Some(best), why }).unwrap();
    run
}

/// The page, the list of runs, the fastest plans and the comparison have one verdict: a gain below the
/// noise of the run is UNDECIDED, although the race alone says FASTER.
#[test]
fn a_gain_below_the_noise_is_undecided_wherever_it_stands() {
    let (_folder, ledger) = ledger();
    let run = compared(&ledger, TimeKind::Measured, 1.05, 1.09);
    let verdict = "No plan found that beats the noise of 9.0 %: try a quiet machine.";
    let shown = page(&RunView::of(&ledger, run).unwrap(), &[]);
    for words in [verdict, "no gain found", "UNDECIDED", "as many random samples do as well"] {
        assert!(shown.contains(words), "{words}");
    }
    let pages = [
        shown,
        pages::runs(&ledger, None).unwrap(),
        pages::top(&ledger, None, None).unwrap().unwrap(),
        pages::compare(&ledger, run, run).unwrap(),
    ];
    for page in &pages {
        assert!(page.contains("1.050×") && page.contains("UNDECIDED") && !page.contains("FASTER"), "{page}");
    }
    assert!(pages[1].contains(verdict) && pages[3].contains(verdict));
    // The chart of the fastest, too, where a ratio stands alone.
    assert!(pages[0].contains(">1.050× UNDECIDED</text>"), "{}", pages[0]);
}

/// Two runs on one problem are drawn over each other, and the list offers to compare them.
#[test]
fn two_runs_of_one_problem_are_compared() {
    let (_folder, ledger) = ledger();
    let runs = [1.25, 1.4].map(|ratio| compared(&ledger, TimeKind::Measured, ratio, 1.02));
    let page = pages::compare(&ledger, runs[0], runs[1]).unwrap();
    assert!(
        page.contains("Best times so far of both runs") && page.matches("class=\"step ").count() == 4,
        "{page}"
    );
    let other = begin(&ledger, "H200");
    add(&ledger, other, 256, "seed:tuned");
    let list = pages::runs(&ledger, None).unwrap();
    assert!(list.contains("/compare?a=1&amp;b=2"), "{list}");
}

/// The page of a candidate begins its times with the one figure that the other pages show.
#[test]
fn a_candidate_has_one_figure() {
    let (_folder, ledger) = ledger();
    let run = compared(&ledger, TimeKind::Measured, 1.25, 1.02);
    let best = RunView::of(&ledger, run).unwrap().problems[0].best.clone().unwrap();
    let page = pages::candidate(&ledger, best.candidate).unwrap();
    assert!(page.contains("Ranked at <b>8.000 µs</b>: 10.00 µs of "), "{page}");
}

/// Predictions are compared, not raced; they have no noise and no samples.
#[test]
fn a_predicted_run_has_its_own_words() {
    let (_folder, ledger) = ledger();
    let run = compared(&ledger, TimeKind::Predicted, 1.05, 1.431);
    let page = page(&RunView::of(&ledger, run).unwrap(), &[]);
    for words in [
        "the model can tell from the baseline",
        "Compared with the baseline",
        "the model cannot tell differences below 1.43× apart",
    ] {
        assert!(page.contains(words), "{words}");
    }
    for words in [
        "aced against",
        "in its race",
        "short timing",
        "are noise",
        "this machine",
        "class=\"span evolution\"",
    ] {
        assert!(!page.contains(words), "{words}: {page}");
    }
    let top = pages::top(&ledger, None, None).unwrap().unwrap();
    assert!(top.contains(">predicted comparison</td>"), "{top}");
    assert!(!top.contains("raced") && !top.contains("short timing"), "{top}");
}

#[test]
fn a_second_race_is_on_the_candidate_s_own_problem() {
    let shape = |seq| Shape::of(&Problem::new(1, 2, seq, 64, DType::F16));
    let raced = [128, 256].map(|seq| MeasurementFact {
        trial: Trial::HeldOut,
        kind: TimeKind::Measured,
        problem: shape(seq),
        samples: vec![4.0],
        us: 4.0,
        low_us: 4.0,
        high_us: 4.0,
        against: None,
    });
    let rows = live::times(&[], &raced, &shape(128)).into_string();
    let rows: Vec<&str> = rows.split("<tr>").skip(2).collect();
    assert!(rows[0].contains("second race") && rows[1].contains("held-out race"), "{rows:?}");
}

#[test]
fn what_others_wrote_is_text() {
    let (_folder, ledger) = ledger();
    let run = begin(&ledger, HOSTILE);
    let id = add(&ledger, run, 128, HOSTILE);
    let rejection = Rejection { stage: Stage::Screen, reason: Reason::Plan, detail: HOSTILE.into() };
    ledger.rejected(id, &rejection).unwrap();
    let view = RunView::of(&ledger, run).unwrap();
    let rows: Vec<RunRow> =
        ledger.runs().unwrap().into_iter().map(|line| RunRow::of(&ledger, line).unwrap()).collect();
    let pages = [
        page(&view, &[]),
        live_run(&view, &sections(&view, Links::Live)),
        runs(HOSTILE, &rows, None),
        candidates(run, TimeKind::Measured, &ledger.lines(run, None, 9).unwrap(), None),
        candidate(&ledger.candidate(id).unwrap(), HOSTILE, ledger.standing(id).unwrap().as_ref()),
        failure("404", HOSTILE, HOSTILE),
    ];
    for page in pages {
        let page = page.replace(&format!("<script src=\"{SCRIPT}\" defer></script>"), "");
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"), "{page}");
    }
}

#[test]
fn several_problems_have_sections_of_their_own() {
    let (_folder, ledger) = ledger();
    let run = begin(&ledger, "H200");
    for seq in [128, 256] {
        add(&ledger, run, seq, "seed:tuned");
    }
    let sections = sections(&RunView::of(&ledger, run).unwrap(), Links::Live);
    let titles: Vec<&str> = sections.iter().filter_map(|s| s.title.as_deref()).collect();
    assert!(titles.contains(&"Best so far: f16 B1 H2 S128 D64"), "{titles:?}");
    assert!(titles.contains(&"Best so far: f16 B1 H2 S256 D64"), "{titles:?}");
    let mut ids: Vec<&str> = sections.iter().map(|s| s.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), sections.len());
}
