mod ranking;

use crate::Reason;
use kernels::select::Shape;
use problem::{DType, Problem};
use serde_json::{Value, json};

use super::*;
use crate::{Candidate, Finding, KernelText, Language, Outcome, Stage};
use ::check::gate::Verdict;
use host::store::Scratch;

pub fn shape(seq: usize) -> Shape {
    Shape::of(&Problem::new(1, 2, seq, 64, DType::F16))
}

pub fn subject(text: &str) -> Candidate {
    Candidate::Kernel(KernelText { language: Language::Ptx, text: text.to_owned(), launch: String::new() })
}

pub fn begin(ledger: &Ledger) -> RunId {
    let environment = Environment { device: "a device".into(), ..Environment::default() };
    let config = json!({ "seed": 1 });
    ledger.begin_run(&Run { device: "L4".into(), config, environment, price_per_hour: Some(3.6) }).unwrap()
}

pub fn new(run: RunId, text: &str, arm: Arm, parents: &[CandidateId]) -> NewCandidate {
    let operator = if parents.is_empty() { "seed:tuned" } else { "mutate:block_n" };
    NewCandidate {
        run,
        problem: shape(128),
        candidate: subject(text),
        arm,
        operator: operator.into(),
        parents: parents.to_vec(),
        changes: if parents.is_empty() { Value::Null } else { json!({ "block_n": [64, 128] }) },
    }
}

pub fn add(ledger: &Ledger, run: RunId, text: &str, arm: Arm, parents: &[CandidateId]) -> CandidateId {
    ledger.add_candidate(&new(run, text, arm, parents)).unwrap()
}

pub fn outcome(candidate: CandidateId, stage: Stage, finding: Finding) -> Outcome {
    Outcome { candidate, stage, problem: shape(128), seconds: 0.5, device_seconds: 0.25, finding }
}

pub fn screened(ptx: &str, us: f64) -> Finding {
    let screening = Screening {
        ptx_hash: ptx.into(),
        sass_hash: Some(format!("sass {ptx}")),
        registers: Some(128),
        spill_bytes: Some(0),
        shared_bytes: Some(49_152),
        bound: Some("tensor".into()),
        tile: Some("64x64".into()),
    };
    Finding::Screened {
        screening,
        predicted_us: Some([us * 0.8, us, us * 1.2]),
        findings: json!([{ "cause": "serial_reduction" }]),
    }
}

pub fn timed(trial: Trial, us: f64, against: Option<Against>) -> Finding {
    let samples = vec![us, us * 1.01, us * 0.99];
    let kind = TimeKind::Measured;
    let problem = shape(128);
    let measurement =
        MeasurementFact { trial, kind, problem, samples, us, low_us: us * 0.99, high_us: us * 1.01, against };
    Finding::Timed { check: None, measurement }
}

pub fn rejection(stage: Stage, reason: Reason) -> Finding {
    Finding::Rejected(Rejection { stage, reason, detail: format!("it was {reason}") })
}

pub fn judged(verdict: Verdict) -> Finding {
    Finding::Judged(CheckFact {
        judge: Judge::Emulator,
        verdict,
        reasons: vec!["a race".into()],
        hazards: json!([]),
        error_rel: Some(1e-4),
        seconds: 0.1,
    })
}

pub fn scratch() -> (Scratch, PathBuf) {
    let folder = Scratch::new().unwrap();
    let path = folder.path("flashcore.ledger");
    (folder, path)
}

/// A ledger, and its folder.
pub fn opened() -> (Scratch, Ledger) {
    let (folder, path) = scratch();
    (folder, Ledger::open(&path).unwrap())
}

/// A ledger with a run.
pub fn begun() -> (Scratch, Ledger, RunId) {
    let (folder, ledger) = opened();
    let run = begin(&ledger);
    (folder, ledger, run)
}

#[test]
fn an_answer_that_comes_twice_counts_once() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    let candidate = add(&ledger, run, "a", Arm::Evolution, &[]);
    let answer = outcome(candidate, Stage::Screen, screened("p", 10.0));
    assert!(ledger.tell(&answer).unwrap());
    // A second report of an outcome is ignored, even if another process sends it or its contents differ.
    let other = Ledger::open(&path).unwrap();
    assert!(!other.tell(&answer).unwrap());
    assert!(
        !ledger.tell(&outcome(candidate, Stage::Screen, rejection(Stage::Screen, Reason::Spills))).unwrap()
    );
    for (table, rows) in [("outcome", 1), ("screening", 1), ("forecast", 1), ("rejection", 0)] {
        assert_eq!(ledger.count(&format!("SELECT count(*) FROM {table}")).unwrap(), rows, "{table}");
    }
    // The outcome of this stage on another problem is stored separately.
    let held_out = Outcome {
        problem: shape(256),
        ..outcome(candidate, Stage::HeldOut, rejection(Stage::HeldOut, Reason::Slower))
    };
    assert!(ledger.tell(&held_out).unwrap());
    assert!(ledger.tell(&Outcome { problem: shape(512), ..held_out }).unwrap());
}

#[test]
fn summaries_follow_from_the_facts() {
    let (_folder, ledger, run) = begun();
    let seed = add(&ledger, run, "a", Arm::Evolution, &[]);
    let child = add(&ledger, run, "b", Arm::Evolution, &[seed]);
    for (candidate, us) in [(seed, 10.0), (child, 8.0)] {
        ledger.tell(&outcome(candidate, Stage::Screen, screened("p", us))).unwrap();
        ledger.tell(&outcome(candidate, Stage::Check, judged(Verdict::Passed))).unwrap();
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
    }
    ledger.tell(&outcome(child, Stage::Race, rejection(Stage::Race, Reason::Slower))).unwrap();
    let promoted = Decision { what: "promoted".into(), candidate: Some(child), why: Value::Null };
    ledger.decided(run, &promoted).unwrap();
    let row = |sql: &str| -> String {
        ledger.connection.query_row(sql, [], |row| row.get(0)).unwrap_or_else(|e| panic!("{sql}: {e}"))
    };
    let tally =
        "SELECT concat_ws(' ', candidates, screened, passed, timed, raced, rejected, promoted) FROM tally";
    assert_eq!(row(tally), "2 2 2 2 0 1 1");
    let earned =
        "SELECT concat_ws(' ', timed, promoted, gain) FROM operator_tally WHERE operator = 'mutate:block_n'";
    assert_eq!(row(earned), "1 1 1.25");
    assert_eq!(row("SELECT group_concat(us, ' ') FROM progress"), "10.0 8.0");
    assert_eq!(row("SELECT concat_ws(' ', timed, candidate, us) FROM niche"), "2 2 8.0");
    assert_eq!(row("SELECT group_concat(measured_us, ' ') FROM pair"), "10.0 8.0");
    let standing =
        "SELECT concat_ws(' ', stage, trial, us, rejected, promoted) FROM standing WHERE candidate = 2";
    assert_eq!(row(standing), "race microbench 8.0 slower 1");
    assert_eq!(row("SELECT concat_ws(' ', sum(tasks), sum(device_seconds)) FROM cost"), "7 1.75");
}

/// A timed candidate that is rejected later loses its niche and its corners of the progress curve. The next
/// best candidates take its places.
#[test]
fn who_is_out_leaves_niche_and_curve() {
    let (_folder, ledger, run) = begun();
    let time = |text: &str, us: f64| {
        let candidate = add(&ledger, run, text, Arm::Evolution, &[]);
        ledger.tell(&outcome(candidate, Stage::Screen, screened(text, us))).unwrap();
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
        candidate
    };
    let (first, cheat, middle, sound) = (time("a", 10.0), time("b", 0.1), time("c", 9.0), time("d", 8.0));
    let niche = || ledger.niches(run, &shape(128)).unwrap().iter().map(|n| n.candidate).collect::<Vec<_>>();
    let corners = || {
        let corners = ledger.progress(run, &shape(128)).unwrap();
        corners.iter().map(|c| (c.candidate, c.timed, c.candidates)).collect::<Vec<_>>()
    };
    assert_eq!((niche(), corners()), (vec![cheat], vec![(first, 1, 1), (cheat, 2, 2)]));
    ledger.tell(&outcome(cheat, Stage::Race, rejection(Stage::Race, Reason::Fault))).unwrap();
    assert_eq!((niche(), corners()), (vec![sound], vec![(first, 1, 1), (middle, 3, 3), (sound, 4, 4)]));
    let later = time("e", 7.0);
    assert_eq!((niche(), corners().last().copied()), (vec![later], Some((later, 5, 5))));
    // A candidate that is rejected as slower than the baseline keeps its valid time.
    ledger.tell(&outcome(later, Stage::Race, rejection(Stage::Race, Reason::Slower))).unwrap();
    assert_eq!(niche(), [later]);
    for candidate in [first, middle, sound, later] {
        ledger.rejected(candidate, &no(Stage::Race, Reason::Wrong)).unwrap();
    }
    assert_eq!((niche(), corners()), (Vec::new(), Vec::new()));
    assert!(ledger.check().unwrap().is_sound());
}

/// A time from an earlier run was known before the forecast, so it does not form a pair with the forecast.
#[test]
fn a_time_that_was_taken_over_is_no_pair() {
    let (_folder, ledger, run) = begun();
    let candidate = add(&ledger, run, "a", Arm::Evolution, &[]);
    ledger.tell(&outcome(candidate, Stage::Screen, screened("p", 9.0))).unwrap();
    let mut known = timed(Trial::Microbench, 10.0, None);
    if let Finding::Timed { measurement, .. } = &mut known {
        measurement.samples.clear();
    }
    ledger.tell(&outcome(candidate, Stage::Microbench, known)).unwrap();
    let pairs = || ledger.pairs_of_run(run, "model", 9).unwrap();
    assert_eq!(pairs(), []);
    // The ranking says whether a time comes from an earlier run.
    let is_taken_over = || ledger.topk(&shape(128), "L4", 1).unwrap()[0].taken_over;
    assert!(is_taken_over());
    ledger.tell(&outcome(candidate, Stage::Race, timed(Trial::Race, 11.0, None))).unwrap();
    assert!(!is_taken_over());
    assert_eq!(pairs().iter().map(|pair| pair.measured_us).collect::<Vec<_>>(), [11.0]);
}

fn no(stage: Stage, reason: Reason) -> Rejection {
    Rejection { stage, reason, detail: String::new() }
}

#[test]
fn what_fails_leaves_nothing_behind() {
    let (_folder, ledger, run) = begun();
    let candidate = add(&ledger, run, "a", Arm::Evolution, &[]);
    let bad = outcome(candidate, Stage::Microbench, timed(Trial::Microbench, f64::NAN, None));
    assert!(matches!(ledger.tell(&bad), Err(LedgerError::Value { what: "low_us", .. })));
    let nobody = outcome(CandidateId(99), Stage::Screen, screened("p", 1.0));
    assert!(matches!(ledger.tell(&nobody), Err(LedgerError::Unknown { .. })));
    assert!(matches!(ledger.event(RunId(7), RunEvent::Finished), Err(LedgerError::Unknown { .. })));
    let orphan = NewCandidate {
        run,
        problem: shape(64),
        candidate: subject("b"),
        arm: Arm::Random,
        operator: "random".into(),
        parents: vec![CandidateId(50)],
        changes: Value::Null,
    };
    assert!(ledger.add_candidate(&orphan).unwrap_err().to_string().contains("candidate 50"));
    let failed: Result<(), LedgerError> = ledger.together(|l| {
        l.add_candidate(&NewCandidate { parents: vec![], ..orphan.clone() })?;
        l.event(RunId(7), RunEvent::Stopped)
    });
    assert!(failed.is_err());
    for (table, rows) in [("outcome", 0), ("candidate", 1), ("standing", 1), ("problem", 1), ("subject", 1)] {
        assert_eq!(ledger.count(&format!("SELECT count(*) FROM {table}")).unwrap(), rows, "{table}");
    }
    // The ledger still accepts writes.
    assert!(ledger.tell(&outcome(candidate, Stage::Screen, screened("p", 1.0))).unwrap());
}

#[test]
fn forecasts_are_in_order_and_come_out_once() {
    let (_folder, ledger) = opened();
    let idea = Forecast {
        candidate: None,
        hypothesis: "two stages are enough".into(),
        author: "ada".into(),
        device: "L4".into(),
        problem: Some(shape(128)),
        low_us: 10.0,
        us: 12.0,
        high_us: 15.0,
    };
    let number = ledger.forecast(&idea).unwrap();
    assert!(matches!(
        ledger.forecast(&Forecast { low_us: 13.0, ..idea.clone() }),
        Err(LedgerError::Value { .. })
    ));
    assert!(matches!(
        ledger.forecast(&Forecast { us: 0.0, low_us: 0.0, ..idea.clone() }),
        Err(LedgerError::Value { .. })
    ));
    let came = ForecastOutcome { forecast: number, us: 13.0, note: String::new() };
    ledger.forecast_outcome(&came).unwrap();
    let again = ledger.forecast_outcome(&came).unwrap_err().to_string();
    assert!(again.contains("forecast 1 of") && again.contains("already has an outcome, 13 µs"), "{again}");
    let none = ledger.forecast_outcome(&ForecastOutcome { forecast: 40, ..came.clone() });
    assert!(matches!(none, Err(LedgerError::Unknown { .. })));
    // A candidate's forecast gets the candidate's device and problem. Its outcome is the candidate's
    // measurement.
    let run = begin(&ledger);
    let candidate = Some(add(&ledger, run, "a", Arm::Evolution, &[]));
    let device = "H200".to_owned();
    let number = ledger.forecast(&Forecast { candidate, device, problem: None, ..idea }).unwrap();
    let kept = &ledger.candidate(CandidateId(1)).unwrap().forecasts[0];
    assert_eq!((kept.device.as_str(), kept.problem), ("L4", Some(shape(128))));
    assert_eq!(ledger.devices().unwrap(), ["L4"]);
    let refused = ledger.forecast_outcome(&ForecastOutcome { forecast: number, ..came }).unwrap_err();
    assert!(refused.to_string().contains("of candidate 1"), "{refused}");
}

#[test]
fn everyone_whose_forecasts_came_out_is_found_on_each_device() {
    let (_folder, ledger) = opened();
    for (author, device) in [("bob", "L4"), ("ada", "L4"), ("ada", "A100"), ("bob", "L4"), ("carol", "A100")]
    {
        let (candidate, hypothesis, problem) = (None, "it is".into(), None);
        let (author, device, [low_us, us, high_us]) = (author.into(), device.into(), [1.0, 2.0, 3.0]);
        let forecast = ledger.forecast(&Forecast {
            candidate,
            hypothesis,
            author,
            device,
            problem,
            low_us,
            us,
            high_us,
        });
        let came = ForecastOutcome { forecast: forecast.unwrap(), us: 2.5, note: String::new() };
        ledger.forecast_outcome(&came).unwrap();
    }
    let found = ledger.forecasters().unwrap();
    let found: Vec<(&str, &str)> = found.iter().map(|(a, d)| (a.as_str(), d.as_str())).collect();
    assert_eq!(found, [("ada", "L4"), ("ada", "A100"), ("bob", "L4"), ("carol", "A100")]);
    let counts: Vec<usize> = ledger.scores().unwrap().iter().map(|score| score.count).collect();
    assert_eq!(counts, [1, 1, 2, 1]);
}

#[test]
fn a_device_is_called_by_its_name_or_the_only_part_of_one() {
    let (_folder, ledger) = opened();
    for device in ["H200", "NVIDIA H200", "NVIDIA L4"] {
        ledger.together(|l| l.device(device)).unwrap();
    }
    for (said, device) in [("h200", "H200"), ("nvidia h200", "NVIDIA H200"), ("l4", "NVIDIA L4")] {
        assert_eq!(ledger.device_called(said).unwrap(), device);
    }
    for (said, part) in [("nvidia", "NVIDIA H200; NVIDIA L4"), ("a100", "its devices: H200; ")] {
        let refused = ledger.device_called(said).unwrap_err().to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

fn race(incumbent: CandidateId, ratio: f64) -> Option<Against> {
    let verdict = if ratio > 1.0 { bench::SpeedVerdict::Faster } else { bench::SpeedVerdict::Slower };
    Some(Against { incumbent, ratio, low: ratio * 0.98, high: ratio * 1.02, noise: 0.01, verdict })
}

/// A run with a seed, a child that wins its race, a wrong grandchild, a crossover and a control.
pub fn story(ledger: &Ledger) -> (RunId, [CandidateId; 5], Vec<Outcome>) {
    let run = begin(ledger);
    let seed = add(ledger, run, "a", Arm::Baseline, &[]);
    let child = add(ledger, run, "b", Arm::Evolution, &[seed]);
    let wrong = add(ledger, run, "c", Arm::Evolution, &[child]);
    let crossing = add(ledger, run, "d", Arm::Evolution, &[child, wrong]);
    let control = add(ledger, run, "a", Arm::Control, &[]);
    let mut outcomes = Vec::new();
    for (candidate, us) in [(seed, 10.0), (child, 8.0), (wrong, 5.0), (crossing, 9.0), (control, 4.0)] {
        outcomes.push(outcome(candidate, Stage::Screen, screened(&format!("p{us}"), us * 1.1)));
        outcomes.push(outcome(candidate, Stage::Check, judged(Verdict::Passed)));
        outcomes.push(outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None)));
    }
    outcomes.push(outcome(child, Stage::Race, timed(Trial::Race, 8.5, race(seed, 1.2))));
    outcomes.push(outcome(wrong, Stage::Race, rejection(Stage::Race, Reason::Wrong)));
    outcomes.iter().for_each(|outcome| assert!(ledger.tell(outcome).unwrap()));
    (run, [seed, child, wrong, crossing, control], outcomes)
}

/// An operator's gain is counted once, not again after a race. The control never becomes an elite.
#[test]
fn a_step_of_an_operator_counts_once() {
    let (_folder, ledger, run) = begun();
    let seed = add(&ledger, run, "a", Arm::Evolution, &[]);
    let child = add(&ledger, run, "b", Arm::Evolution, &[seed]);
    let control = add(&ledger, run, "a", Arm::Control, &[]);
    for (stage, trial) in [(Stage::Microbench, Trial::Microbench), (Stage::Race, Trial::Race)] {
        for (candidate, us) in [(seed, 10.0), (child, 8.0), (control, 2.0)] {
            if stage == Stage::Microbench {
                ledger.tell(&outcome(candidate, Stage::Screen, screened("p", us))).unwrap();
            }
            ledger.tell(&outcome(candidate, stage, timed(trial, us, None))).unwrap();
        }
    }
    let operators = ledger.operators(run).unwrap();
    assert!(
        operators.iter().any(|o| o.operator == MadeBy::from("mutate:block_n") && o.gain == 1.25),
        "{operators:?}"
    );
    let niches = ledger.niches(run, &shape(128)).unwrap();
    assert_eq!(niches.iter().map(|niche| niche.candidate).collect::<Vec<_>>(), [child]);
}

/// Baseline and control pass through the stages but are not counted as candidates. Each reason shows its
/// latest rejection.
#[test]
fn what_is_compared_with_is_counted_by_itself() {
    let (_folder, ledger) = opened();
    let (run, [_, _, wrong, crossing, control], _) = story(&ledger);
    let entered = ledger.entered(run).unwrap();
    let of = |arm: Arm| -> Vec<(Stage, i64)> {
        entered.iter().filter(|e| e.arm == arm).map(|e| (e.stage, e.count)).collect()
    };
    let once = [(Stage::Check, 1), (Stage::Microbench, 1), (Stage::Screen, 1)];
    assert_eq!((of(Arm::Baseline), of(Arm::Control)), (once.to_vec(), once.to_vec()));
    let all = [(Stage::Check, 3), (Stage::Microbench, 3), (Stage::Race, 2), (Stage::Screen, 3)];
    assert_eq!(of(Arm::Evolution), all);
    let fault = Rejection { stage: Stage::Race, reason: Reason::Wrong, detail: "the later one".into() };
    ledger.rejected(crossing, &fault).unwrap();
    ledger.rejected(control, &fault).unwrap();
    let deaths = ledger.rejections_by_reason(run).unwrap();
    let told = |arm: Arm| {
        let death = deaths.iter().find(|death| death.arm == arm).unwrap();
        (death.candidates, death.latest, death.detail.as_str())
    };
    assert_eq!(told(Arm::Evolution), (2, crossing, "the later one"));
    assert_eq!(told(Arm::Control), (1, control, "the later one"));
    // The baseline and the control share an operator name with candidates; only the candidates are counted.
    let seed = add(&ledger, run, "h", Arm::Evolution, &[]);
    ledger.tell(&outcome(seed, Stage::Microbench, timed(Trial::Microbench, 11.0, None))).unwrap();
    let counts = |e: &Earnings| (e.candidates, e.timed, e.faster, e.rejected);
    let operators = ledger.operators(run).unwrap();
    let earned: Vec<_> = operators.iter().map(|e| (e.operator.clone(), counts(e))).collect();
    let of = |name: &str, counts| (MadeBy::from(name), counts);
    assert_eq!(earned, [of("mutate:block_n", (3, 3, 1, 2)), of("seed:tuned", (1, 1, 0, 0))]);
    assert!(ledger.check().unwrap().is_sound() && wrong < crossing);
}

#[test]
fn a_run_is_resumed_from_what_was_told_in_order() {
    let (_folder, path) = scratch();
    let (run, [_, child, wrong, crossing, _], outcomes) = story(&Ledger::open(&path).unwrap());
    let ledger = Ledger::read(&path).unwrap();
    let resumed = ledger.resume(run).unwrap();
    assert_eq!(resumed.outcomes, outcomes);
    assert_eq!(resumed.run.config, json!({ "seed": 1 }));
    assert_eq!(resumed.candidates.len(), 5);
    assert_eq!(resumed.candidates[3].id, crossing);
    assert_eq!(resumed.candidates[3].new.parents, [child, wrong]);
    assert_eq!(resumed.candidates[1].new.candidate, subject("b"));
    assert_eq!(resumed.candidates[1].new.changes, json!({ "block_n": [64, 128] }));
    let last = ledger.outcomes(run, 16, 10).unwrap();
    assert_eq!(last, [(17, outcomes[16].clone())]);
    assert!(matches!(ledger.resume(RunId(9)), Err(LedgerError::Unknown { .. })));
    assert!(ledger.event(run, RunEvent::Stopped).is_err(), "opened to read");
}

#[test]
fn what_is_counted_and_where_it_came_from() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, wrong, crossing, _], _) = story(&ledger);
    let line: Vec<(CandidateId, usize)> =
        ledger.lineage(crossing, 9).unwrap().iter().map(|a| (a.candidate, a.parents.len())).collect();
    assert_eq!(line, [(crossing, 2), (child, 1), (seed, 0)]);
    assert_eq!(ledger.lineage(crossing, 2).unwrap().len(), 2);
    let deaths = ledger.rejections_by_reason(run).unwrap();
    assert_eq!((deaths.len(), deaths[0].reason, deaths[0].stage), (1, Reason::Wrong, Stage::Race));
    ledger.spent(run, 1000.0, "warming").unwrap();
    let cost = ledger.cost(run).unwrap();
    assert_eq!(cost.device_seconds, 17.0 * 0.25 + 1000.0);
    // No evaluator worked while the device was warmed.
    assert_eq!(cost.items.iter().map(|item| item.seconds).sum::<f64>(), 17.0 * 0.5);
    assert!((cost.price.unwrap() - 3.6 * 1004.25 / 3600.0).abs() < 1e-12);
    ledger.event(run, RunEvent::Finished).unwrap();
    let runs = ledger.runs().unwrap();
    assert_eq!((runs[0].candidates, runs[0].timed, runs[0].rejected), (3, 3, 1));
    assert_eq!(runs[0].last.map(|(_, event)| event), Some(RunEvent::Finished));
    let best: Vec<f64> = ledger
        .progress(run, &shape(128))
        .unwrap()
        .iter()
        .filter(|c| (c.arm, c.trial) == (Arm::Evolution, Trial::Microbench))
        .map(|c| c.us)
        .collect();
    assert_eq!(best, [8.0], "5 µs were wrong");
    assert_eq!(ledger.tallies(run).unwrap().iter().map(|t| t.candidates).sum::<i64>(), 5);
    assert_eq!(ledger.operators(run).unwrap()[0].operator, MadeBy::from("mutate:block_n"));
    assert_eq!(ledger.niches(run, &shape(128)).unwrap()[0].timed, 5);
    // The race's time replaces that of the short timing.
    let pairs = ledger.pairs_of_run(run, "model", 10).unwrap();
    let of_child = pairs.iter().find(|p| p.candidate == Some(child)).unwrap();
    assert_eq!((pairs.len(), of_child.measured_us), (5, 8.5));
    assert_eq!(ledger.pairs("model", "L4", 2).unwrap().len(), 2);
    let dossier = ledger.candidate(child).unwrap();
    assert_eq!((dossier.measurements.len(), dossier.checks.len(), dossier.forecasts.len()), (2, 1, 1));
    assert_eq!(dossier.children, [wrong, crossing]);
    assert_eq!(dossier.measurements[0].samples, [8.0, 8.08, 7.92]);
    let before = ledger.state().unwrap();
    ledger.event(run, RunEvent::Resumed).unwrap();
    assert!(ledger.state().unwrap() > before);
}

#[test]
fn facts_leave_as_json_lines_and_as_parquet() {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    let (folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let (run, _, _) = story(&ledger);
    ledger.event(run, RunEvent::Finished).unwrap();
    let lines = folder.path("facts.jsonl");
    let exported = ledger.export(&lines, Format::JsonLines).unwrap();
    let text = std::fs::read_to_string(&lines).unwrap();
    let objects: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(exported.iter().map(|e| e.rows).sum::<u64>(), objects.len() as u64);
    let of = |table: &str| objects.iter().filter(|o| o["table"] == table).cloned().collect::<Vec<_>>();
    assert_eq!(of("measurement")[5]["samples"], json!([8.5, 8.5 * 1.01, 8.5 * 0.99]));
    assert_eq!(of("measurement")[0]["ratio"], Value::Null);
    assert_eq!(of("candidate")[1]["changes"], json!({ "block_n": [64, 128] }));
    assert_eq!(of("problem")[0]["shape"]["seq_q"], 128);
    let tables = folder.path("tables");
    assert_eq!(ledger.export(&tables, Format::Parquet).unwrap(), exported);
    for Exported { table, rows, .. } in exported {
        let file = std::fs::File::open(tables.join(format!("{table}.parquet"))).unwrap();
        let reader = SerializedFileReader::new(file).unwrap();
        let read: Vec<_> = reader.get_row_iter(None).unwrap().map(Result::unwrap).collect();
        assert_eq!(read.len() as u64, rows, "{table}");
        if table == "measurement" {
            let row = read[5].to_string();
            assert!(row.contains("samples: [8.5, 8.585, 8.415]") && row.contains("ratio: 1.2"), "{row}");
            assert!(read[0].to_string().contains("ratio: null"));
        }
    }
    assert!(ledger.export(&folder.path("no/folder.jsonl"), Format::JsonLines).is_err());
}

#[test]
fn a_check_counts_the_summaries_after() {
    let (_folder, ledger) = opened();
    let (run, [_, child, ..], _) = story(&ledger);
    ledger
        .decided(run, &Decision { what: "promoted".into(), candidate: Some(child), why: Value::Null })
        .unwrap();
    ledger.spent(run, 2.0, "warming").unwrap();
    let found = ledger.check().unwrap();
    assert!(found.is_sound(), "{found:?}");
    assert!(found.facts.contains(&("candidate", 5)) && found.facts.contains(&("outcome", 17)));
    ledger
        .connection
        .execute("UPDATE tally SET candidates = candidates + 1 WHERE arm = 'control'", [])
        .unwrap();
    let found = ledger.check().unwrap();
    assert_eq!(found.disagreements, [Disagreement { what: "candidates", facts: 5, summary: 6 }]);
}

/// The model's forecasts are 1.5 times too long. After the recalibration, each later forecast is stored
/// twice: uncorrected and corrected.
#[test]
fn a_recalibration_is_kept_and_used_by_later_forecasts() {
    let (_folder, ledger, run) = begun();
    let one = |i: i32| {
        let us = 10.0 + f64::from(i * 7 % 40);
        let candidate = add(&ledger, run, &format!("{i}"), Arm::Evolution, &[]);
        ledger.tell(&outcome(candidate, Stage::Screen, screened(&format!("p{i}"), us * 1.5))).unwrap();
        let dossier = ledger.candidate(candidate).unwrap();
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
        dossier.forecasts
    };
    assert_eq!(ledger.recalibrate("model", "L4").ok().flatten(), None, "nothing came out yet");
    (0..40).for_each(|i| assert_eq!(one(i).len(), 1));
    let map = ledger.recalibrate("model", "L4").unwrap().unwrap();
    assert!(map.adopted && (map.before.bias - 1.5).abs() < 1e-9, "{map:?}");
    let kept = ledger.recalibration("model", "L4").unwrap().unwrap();
    assert_eq!((kept.slope, kept.high, kept.adopted), (map.slope, map.high, true));
    assert!((kept.after.bias - map.after.bias).abs() < 1e-12);
    let told = one(3);
    assert_eq!(told[1].author, "model:recalibrated");
    assert!((told[1].us - 31.0).abs() < 0.01, "{told:?}");
    let scores = ledger.scores().unwrap();
    let counts: Vec<(&str, usize)> = scores.iter().map(|s| (s.author.as_str(), s.count)).collect();
    assert_eq!(counts, [("model", 41), ("model:recalibrated", 1)]);
    // A forecast after the measurement is rejected.
    let late = Forecast { author: "ada".into(), ..told[0].clone() };
    assert!(matches!(ledger.forecast(&late), Err(LedgerError::Value { .. })));
    let number = ledger.forecast(&Forecast { candidate: None, ..late }).unwrap();
    ledger.forecast_outcome(&ForecastOutcome { forecast: number, us: 30.0, note: "so so".into() }).unwrap();
    let by_hand = ledger.by_hand(10).unwrap();
    assert_eq!(
        (by_hand.len(), by_hand[0].measured_us, by_hand[0].note.as_deref()),
        (1, Some(30.0), Some("so so"))
    );
}
