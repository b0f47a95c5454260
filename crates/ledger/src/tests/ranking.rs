//! Tests of the ranking of candidates and of wins.

use super::*;

#[test]
fn the_best_are_ranked_by_the_better_trial_and_without_the_wrong() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, _, crossing, _], _) = story(&ledger);
    ledger
        .decided(run, &Decision { what: "promoted".into(), candidate: Some(child), why: Value::Null })
        .unwrap();
    let top = ledger.topk(&shape(128), "l4", 10).unwrap();
    let order: Vec<CandidateId> = top.iter().map(|r| r.candidate).collect();
    // The baseline is not ranked.
    assert_eq!(order, [child, crossing]);
    // The time is the incumbent's time divided by the ratio of the race.
    assert_eq!((top[0].us, top[0].trial, top[0].promoted), (10.0 / 1.2, Trial::Race, true));
    assert_eq!(top[0].against.map(|a| (a.incumbent, a.ratio)), Some((seed, 1.2)));
    assert_eq!((top[0].incumbent_us, top[1].incumbent_us), (Some(10.0), None));
    assert_eq!(top[1].predicted_us, Some(9.0 * 1.1));
    assert_eq!(ledger.topk(&shape(128), "L4", 1).unwrap().len(), 1);
    assert!(ledger.topk(&shape(64), "L4", 1).unwrap().is_empty());
    let other = ledger.topk(&shape(128), "L40", 1).unwrap_err().to_string();
    assert!(other.contains("its devices: L4"), "{other}");
    assert_eq!(ledger.best_of_problems("L4").unwrap().len(), 1);
    // The plan occurs in another run too, and is listed once.
    let again = begin(&ledger);
    let copy = add(&ledger, again, "b", Arm::Evolution, &[]);
    ledger.tell(&outcome(copy, Stage::Microbench, timed(Trial::Microbench, 8.6, None))).unwrap();
    assert_eq!(ledger.topk(&shape(128), "L4", 10).unwrap().len(), 2);
    // The plan also occurs on another device with this name, measured or predicted, and is listed once.
    let environment = Environment::default();
    let other = Run { device: "NVIDIA L4".into(), config: json!({}), environment, price_per_hour: None };
    let other = ledger.begin_run(&other).unwrap();
    for kind in [TimeKind::Measured, TimeKind::Predicted] {
        let copy = add(&ledger, other, "b", Arm::Evolution, &[]);
        let Finding::Timed { check, measurement } = timed(Trial::Microbench, 3.0, None) else {
            unreachable!()
        };
        let finding = Finding::Timed { check, measurement: MeasurementFact { kind, ..measurement } };
        ledger.tell(&outcome(copy, Stage::Microbench, finding)).unwrap();
    }
    let top = ledger.topk(&shape(128), "L4", 10).unwrap();
    assert_eq!(top.iter().map(|r| r.candidate).collect::<Vec<_>>(), [child, crossing]);
}

/// A candidate that raced is ranked before a candidate with a faster short timing. A lost race still gives a
/// valid time; a wrong candidate has none.
#[test]
fn a_lucky_short_timing_is_not_the_best_and_what_lost_is_told_as_that() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, _, crossing, _], _) = story(&ledger);
    let [lucky, lost, faulty] = ["e", "f", "g"].map(|text| add(&ledger, run, text, Arm::Evolution, &[child]));
    for (candidate, us) in [(lucky, 1.0), (lost, 2.0), (faulty, 3.0)] {
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
    }
    ledger.tell(&outcome(lost, Stage::Race, timed(Trial::Race, 9.5, race(seed, 0.9)))).unwrap();
    let rejected = Rejection { stage: Stage::Race, reason: Reason::Slower, detail: String::new() };
    ledger.rejected(lost, &rejected).unwrap();
    ledger.tell(&outcome(faulty, Stage::Race, rejection(Stage::Race, Reason::Fault))).unwrap();
    let top = ledger.topk(&shape(128), "L4", 10).unwrap();
    let order: Vec<CandidateId> = top.iter().map(|r| r.candidate).collect();
    assert_eq!(order, [child, lost, lucky, crossing]);
    // Candidates of the random arm are ranked together with the others. A plan of both arms is listed once.
    let [drawn, again] = ["i", "b"].map(|text| add(&ledger, run, text, Arm::Random, &[]));
    for (candidate, us) in [(drawn, 8.9), (again, 1.5)] {
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
    }
    let both: Vec<CandidateId> =
        ledger.best_of_run(run, &shape(128), 9).unwrap().iter().map(|r| r.candidate).collect();
    assert_eq!(both, [child, lost, lucky, drawn, crossing]);
    assert_eq!((top[1].us, top[1].rejected), (10.0 / 0.9, Some(Reason::Slower)));
    let of_run = ledger.best_of_run(run, &shape(128), 2).unwrap();
    assert_eq!(of_run.iter().map(|r| r.candidate).collect::<Vec<_>>(), [child, lost]);
    // A search starts from race winners, not from candidates with a fast short timing.
    assert_eq!(ledger.winners("L4").unwrap(), [(shape(128), subject("b"))]);
    assert_eq!(ledger.winners("L40").unwrap(), []);
    for (of, index) in [
        ("problem = 1 AND device = 1 AND kind = 'measured'", "standing_by_rank"),
        ("run = 1 AND problem = 1 AND arm = 'evolution'", "standing_of_run"),
    ] {
        let sql = format!(
            "EXPLAIN QUERY PLAN SELECT us FROM standing s WHERE {of} AND us IS NOT NULL AND {} ORDER BY grade DESC, us, candidate",
            rank::sound()
        );
        let plan: Vec<String> = ledger.rows(&sql, [], |row| row.get(3)).unwrap();
        assert!(plan.len() == 1 && plan[0].contains(index), "{plan:?}");
    }
}

/// Candidates are ranked by ratios, not by the medians of races at different times. A win in a second race
/// comes before any first race.
#[test]
fn who_raced_is_ranked_by_its_last_race() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, ..], _) = story(&ledger);
    let [slow_hour, lucky, twice] =
        ["e", "f", "g"].map(|text| add(&ledger, run, text, Arm::Evolution, &[child]));
    for (candidate, us, ratio) in [(slow_hour, 20.0, 1.3), (lucky, 1.0, 1.25), (twice, 9.0, 1.4)] {
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, 9.0, None))).unwrap();
        ledger.tell(&outcome(candidate, Stage::Race, timed(Trial::Race, us, race(seed, ratio)))).unwrap();
    }
    let order = || -> Vec<CandidateId> {
        ledger.best_of_run(run, &shape(128), 4).unwrap().iter().map(|r| r.candidate).collect()
    };
    assert_eq!(order(), [twice, slow_hour, lucky, child]);
    let second = |candidate, ratio| {
        ledger
            .tell(&outcome(candidate, Stage::HeldOut, timed(Trial::HeldOut, 9.0, race(seed, ratio))))
            .unwrap();
    };
    second(twice, 0.95);
    assert_eq!(order(), [slow_hour, lucky, child, twice]);
    second(lucky, 1.1);
    assert_eq!(order(), [lucky, slow_hour, child, twice]);
    let top = ledger.topk(&shape(128), "L4", 1).unwrap();
    assert_eq!((top[0].candidate, top[0].us, top[0].against.unwrap().ratio), (lucky, 10.0 / 1.1, 1.1));
    // A race on another problem is ignored, and so is a rejection there.
    let elsewhere = |seq, finding| Outcome { problem: shape(seq), ..outcome(lucky, Stage::HeldOut, finding) };
    let Finding::Timed { check, measurement } = timed(Trial::HeldOut, 9.0, race(seed, 0.5)) else {
        unreachable!()
    };
    let measurement = MeasurementFact { problem: shape(256), ..measurement };
    ledger.tell(&elsewhere(256, Finding::Timed { check, measurement })).unwrap();
    ledger.tell(&elsewhere(64, rejection(Stage::HeldOut, Reason::Wrong))).unwrap();
    assert_eq!(ledger.topk(&shape(128), "L4", 1).unwrap(), top);
    assert!(ledger.check().unwrap().is_sound());
}

/// The noise floor counts every race on the problem: first and second ones, those that are not ranked, and
/// the distance of the control from 1.
#[test]
fn the_noise_floor_is_that_of_all_races_on_the_problem() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, _, _, control], _) = story(&ledger);
    let floor = || ledger.noise_floor(run, &shape(128)).unwrap().unwrap();
    let noisy = |noise: f64, ratio: f64| race(seed, ratio).map(|race| Against { noise, ..race });
    let other = add(&ledger, run, "e", Arm::Evolution, &[child]);
    ledger.tell(&outcome(other, Stage::Microbench, timed(Trial::Microbench, 9.0, None))).unwrap();
    ledger.tell(&outcome(other, Stage::Race, timed(Trial::Race, 9.0, noisy(1.0625, 1.1)))).unwrap();
    assert_eq!(floor(), 1.0625);
    // The second race has less noise than the first.
    ledger.tell(&outcome(other, Stage::HeldOut, timed(Trial::HeldOut, 9.0, noisy(1.03125, 1.1)))).unwrap();
    assert_eq!(floor(), 1.0625);
    ledger.tell(&outcome(child, Stage::HeldOut, timed(Trial::HeldOut, 9.0, noisy(1.125, 1.2)))).unwrap();
    assert_eq!(floor(), 1.125);
    ledger.tell(&outcome(control, Stage::Race, timed(Trial::Race, 9.0, noisy(1.03125, 0.8)))).unwrap();
    assert_eq!(floor(), 1.25);
    assert_eq!(ledger.noise_floor(run, &shape(64)).unwrap(), None);
}

/// A win counts the gain over the parent, not over the baseline. Wins on other devices are not listed.
#[test]
fn a_win_is_worth_what_its_changes_gained() {
    let (_folder, ledger) = opened();
    let (run, [seed, child, ..], _) = story(&ledger);
    let grandchild = add(&ledger, run, "e", Arm::Evolution, &[child]);
    ledger.tell(&outcome(grandchild, Stage::Microbench, timed(Trial::Microbench, 7.9, None))).unwrap();
    ledger.tell(&outcome(grandchild, Stage::Race, timed(Trial::Race, 8.4, race(seed, 1.25)))).unwrap();
    // A win on a held-out problem is ignored.
    let held_out = Outcome {
        problem: shape(256),
        ..outcome(grandchild, Stage::HeldOut, timed(Trial::HeldOut, 20.0, race(seed, 3.0)))
    };
    ledger.tell(&held_out).unwrap();
    let wins = ledger.wins("L4", 9).unwrap();
    assert_eq!(
        wins.iter().map(|w| (w.candidate, w.gain)).collect::<Vec<_>>(),
        [(grandchild, 8.0 / 7.9), (child, 10.0 / 8.0)]
    );
    assert_eq!((&wins[0].changes, &wins[0].subject), (&json!({ "block_n": [64, 128] }), &subject("e")));
    assert_eq!(ledger.wins("NVIDIA L4", 9).unwrap(), []);
}

/// A change without gain is dropped: the parent comes first if its time is equal, even if the child's is a
/// trifle shorter.
#[test]
fn a_parent_with_an_equal_time_comes_before_its_child() {
    let (_folder, ledger, run) = begun();
    let first = add(&ledger, run, "a", Arm::Evolution, &[]);
    let parent = add(&ledger, run, "b", Arm::Evolution, &[first]);
    let child = add(&ledger, run, "c", Arm::Evolution, &[parent]);
    for (candidate, us) in [(first, 9.1), (parent, 9.0), (child, 8.998)] {
        ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None))).unwrap();
    }
    let order = |k| -> Vec<CandidateId> {
        ledger.best_of_run(run, &shape(128), k).unwrap().iter().map(|r| r.candidate).collect()
    };
    assert_eq!(order(1), [parent]);
    assert_eq!(order(9), [parent, child, first]);
    let grandchild = add(&ledger, run, "d", Arm::Evolution, &[child]);
    ledger.tell(&outcome(grandchild, Stage::Microbench, timed(Trial::Microbench, 8.9, None))).unwrap();
    assert_eq!(order(9), [grandchild, child, parent, first]);
}
