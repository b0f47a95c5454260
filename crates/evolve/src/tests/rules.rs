//! Tests of races, budgets and faults.

use super::*;
use crate::error::EvolveError;
use cpu::CpuPlan;
use ledger::Reason;

/// A landscape whose findings a function may modify.
struct Meddled<F>(Landscape, F);

impl<F: FnMut(&Task, &mut Finding) + Send> Evaluator for Meddled<F> {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let mut look = self.0.look(task)?;
        self.1(task, &mut look.finding);
        Ok(look)
    }

    fn environment(&self) -> Environment {
        Environment::default()
    }
}

/// Runs one task after the other and passes each to `see` first. Proposers get `answer`. Stops at an error.
pub(super) fn run_out(
    evolution: &mut Evolution,
    evaluator: &mut dyn Evaluator,
    mut answer: impl FnMut(&Question) -> Result<Proposal, Rejection>,
    mut see: impl FnMut(&Task),
) -> Result<(), EvolveError> {
    loop {
        match evolution.ask(0.0)? {
            Ask::Task(task) => {
                see(&task);
                let outcome = evaluator.evaluate(&task);
                evolution.tell(&outcome)?;
            }
            Ask::Propose(question) => evolution.answer(&question, answer(&question))?,
            Ask::Wait => panic!("nothing is under way"),
            Ask::Done => return Ok(()),
        }
    }
}

fn nobody(_: &Question) -> Result<Proposal, Rejection> {
    panic!("nobody proposes")
}

pub(super) fn no(stage: Stage, reason: Reason) -> Rejection {
    Rejection { stage, reason, detail: format!("{reason}, it says") }
}

fn verdict_of(race: &mut Finding, ratio: f64, verdict: SpeedVerdict) {
    if let Finding::Timed { measurement, .. } = race
        && let Some(against) = &mut measurement.against
    {
        (against.ratio, against.low, against.high) = (ratio, ratio * 0.999, ratio * 1.001);
        against.verdict = verdict;
    }
}

fn noise_of(race: &mut Finding, noise: f64) {
    if let Finding::Timed { measurement, .. } = race
        && let Some(against) = &mut measurement.against
    {
        against.noise = noise;
    }
}

/// The fastest of several races may be luck, so the second race decides.
#[test]
fn who_wins_by_luck_is_not_promoted() {
    let (page, config, mut evolution) = alone("luck", 40, 11);
    let own = config.cases[0].problem;
    let spared = Landscape::identity(&config.cases[0].baseline);
    let mut evaluator = Meddled(Landscape::new(11, &config), move |task: &Task, finding: &mut Finding| {
        let is_control = Landscape::identity(&task.subject) == spared;
        match task.stage {
            Stage::Race if !is_control => verdict_of(finding, 1.2, SpeedVerdict::Faster),
            Stage::HeldOut if task.problem == own => verdict_of(finding, 1.0, SpeedVerdict::Undecided),
            _ => {}
        }
    });
    let mut again = 0;
    run_out(&mut evolution, &mut evaluator, nobody, |task| {
        again += usize::from(task.stage == Stage::HeldOut && task.problem == own);
        assert!(task.stage != Stage::HeldOut || task.problem == own, "nobody comes so far");
    })
    .unwrap();
    let report = json!(evolution.report());
    assert!(again >= 3, "{again} races once more");
    assert_eq!((&report["promoted"], &report["verdict"]), (&Value::Null, &json!("UNDECIDED")));
    assert_eq!(report["speedup"], 1.0);
    let why = report["refused"]["why"].as_str().unwrap();
    assert!(why.contains("second race") && why.contains("UNDECIDED at 1.000×"), "{why}");
    let decisions = page.open().decisions(evolution.run()).unwrap();
    assert!(
        decisions.iter().any(|d| d.decision.what == "refused" && d.decision.why["why"] == why),
        "{decisions:?}"
    );
}

/// The report contains a winner's second race.
#[test]
fn who_wins_twice_is_promoted_by_the_second_race() {
    let (page, config, mut evolution) = alone("twice", 60, 12);
    let own = config.cases[0].problem;
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::HeldOut && task.problem == own {
            verdict_of(finding, 1.0625, SpeedVerdict::Faster);
        }
    });
    let mut order = Vec::new();
    run_out(&mut evolution, &mut evaluator, nobody, |task| {
        if task.stage == Stage::HeldOut {
            order.push(task.problem == own);
        }
    })
    .unwrap();
    let report = json!(evolution.report());
    assert_eq!((order.first(), order.iter().filter(|own| **own).count()), (Some(&true), 1), "{order:?}");
    assert_eq!((&report["promoted"]["id"], &report["speedup"]), (&report["best"]["id"], &json!(1.0625)));
    assert_eq!(report["promoted"]["race"]["ratio"], 1.0625);
    // The time comes from that race, not from the short timing.
    let us = |who: &str| report[who]["us"].as_f64().unwrap();
    assert_eq!(us("best"), us("baseline") / 1.0625);
    let decisions = page.open().decisions(evolution.run()).unwrap();
    let promoted = decisions.iter().find(|d| d.decision.what == "promoted").unwrap();
    assert_eq!(promoted.decision.why["race"]["ratio"], 1.0625);
    assert!(promoted.decision.why["first_race"]["ratio"].as_f64() > Some(1.0));
}

/// A win is noise if any race of the run shows more noise: that of the control, or a second race.
#[test]
fn who_wins_by_less_than_the_noise_is_not_promoted() {
    let run = |control: f64, second: f64| {
        let page = Page::new("noise");
        let config = config(&Problem::mission(), 60, 12);
        let own = config.cases[0].problem;
        let spared = Landscape::identity(&config.cases[0].baseline);
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let mut evaluator =
            Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
                if task.stage == Stage::HeldOut && task.problem == own {
                    verdict_of(finding, 1.0625, SpeedVerdict::Faster);
                    noise_of(finding, second);
                } else if task.stage == Stage::Race && Landscape::identity(&task.subject) == spared {
                    verdict_of(finding, control, SpeedVerdict::Undecided);
                }
            });
        run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
        let report = json!(evolution.report());
        // The pages read the same figure from the ledger.
        let floor = page.open().noise_floor(evolution.run(), &own).unwrap();
        assert_eq!(report["noise_floor"], json!(floor));
        report
    };
    let report = run(1.08, 1.005);
    assert_eq!((&report["noise_floor"], &report["promoted"]), (&json!(1.08), &Value::Null));
    assert_eq!(
        report["refused"]["why"],
        "it is 1.062× as fast, which is below the run's noise floor of 1.080×"
    );
    assert!(run(1.01, 1.005)["promoted"].is_object());
    let report = run(1.01, 1.07);
    assert_eq!((&report["noise_floor"], &report["promoted"]), (&json!(1.07), &Value::Null));
}

/// A run from a slow plan: its baseline is beaten easily, and the shipped plan races at the end with the
/// ratio `shipped`.
fn from_a_slow_seed(page: &Page, shipped: f64, verdict: SpeedVerdict) -> Evolution {
    let mut config = config(&Problem::mission(), 60, 12);
    config.cases[0].seeds.clear();
    config.cases[0].draws = 0;
    // Not a plan that the search itself may find.
    let ships = Candidate::Gpu(Family::SmallAtOnce.default_for(&Problem::mission(), &Arch::SM_90).unwrap());
    config.cases[0].shipped = Some(ships.clone());
    let mut evolution = begin(page, &config, Limits::ALONE);
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::Race && task.subject == ships {
            verdict_of(finding, shipped, verdict);
        }
    });
    run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
    evolution
}

/// Beating a slow seed does not mean beating the shipped plan.
#[test]
fn who_loses_to_what_ships_is_not_promoted() {
    let page = Page::new("shipped");
    let evolution = from_a_slow_seed(&page, 1.58, SpeedVerdict::Faster);
    let report = json!(evolution.report());
    assert_eq!((&report["verdict"], &report["promoted"]), (&json!("FASTER"), &Value::Null));
    assert_eq!(evolution.promoted(&Environment::default(), "run", "now"), []);
    let why = report["refused"]["why"].as_str().unwrap();
    assert!(why.contains("the shipped plan is 1.580× as fast"), "{why}");
    let decisions = page.open().decisions(evolution.run()).unwrap();
    let what: Vec<&str> = decisions.iter().map(|d| d.decision.what.as_str()).collect();
    assert!(what.contains(&"refused") && !what.contains(&"promoted"), "{what:?}");
    let refused = &decisions.iter().find(|d| d.decision.what == "refused").unwrap().decision;
    assert_eq!((&refused.why["why"], &json!(refused.candidate)), (&json!(why), &report["refused"]["id"]));
    assert_eq!(refused.why["shipped"]["ratio"], 1.58);
}

/// A candidate that does not lose to the shipped plan is promoted, with that race in its report.
#[test]
fn who_does_not_lose_to_what_ships_is_promoted() {
    let page = Page::new("ships-even");
    let evolution = from_a_slow_seed(&page, 1.01, SpeedVerdict::Undecided);
    let report = json!(evolution.report());
    assert_eq!(report["promoted"]["shipped"]["ratio"], 1.01, "{}", report["refused"]);
    assert_eq!(report["promoted"]["shipped"]["incumbent"], report["promoted"]["id"]);
    assert_eq!(report["refused"], Value::Null);
}

/// A plan that is kept for a CPU has the speed-up over the plan that calls used, not over a slow seed plan.
#[test]
fn what_is_kept_has_the_speed_up_over_what_calls_used() {
    let problem = Problem::mission();
    let shipped = Candidate::Cpu(CpuPlan::for_problem(&problem));
    let slow = Candidate::Cpu(CpuPlan { threads: 1, block_q: 1, ..CpuPlan::for_problem(&problem) });
    let speedup = |ships: Option<&Candidate>| {
        let page = Page::new("kept");
        let case = Case {
            problem: Shape::of(&problem),
            baseline: slow.clone(),
            seeds: Vec::new(),
            draws: 0,
            held_out: Vec::new(),
            shipped: ships.cloned(),
        };
        let mut config = Config::new(Target::Cpu, "any", None, vec![case]);
        (config.candidates, config.early_stop) = (Some(40), false);
        let spared = Landscape::identity(&slow);
        let incumbent = slow.clone();
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let mut evaluator =
            Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
                let is_first = task.incumbent.as_ref().is_some_and(|(_, plan)| *plan == incumbent);
                match task.stage {
                    Stage::Race if !is_first => verdict_of(finding, 0.8, SpeedVerdict::Slower),
                    Stage::Race | Stage::HeldOut if Landscape::identity(&task.subject) != spared => {
                        verdict_of(finding, 4.0, SpeedVerdict::Faster)
                    }
                    _ => {}
                }
            });
        run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
        match &evolution.promoted(&Environment::default(), "run", "now")[..] {
            [Promoted::Kept(_, plan)] => plan.speedup,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(speedup(Some(&shipped)), Some(1.25));
    assert_eq!(speedup(None), Some(4.0));
}

/// The shipped plan races once, after all candidates that may still win. Because of the time limit, some of
/// these race in the time reserved for a winner.
#[test]
fn what_ships_races_last() {
    let page = Page::new("ships-last");
    let mut config = config(&Problem::mission(), 0, 12);
    (config.candidates, config.seconds, config.timing) = (None, Some(30.0), [0.15, 1.5]);
    let ships = Candidate::Gpu(Family::SmallAtOnce.default_for(&Problem::mission(), &Arch::SM_90).unwrap());
    (config.cases[0].seeds, config.cases[0].draws, config.cases[0].shipped) =
        (Vec::new(), 0, Some(ships.clone()));
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let mut evaluator = Meddled(Landscape::new(12, &config), |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::Race {
            verdict_of(finding, 1.0, SpeedVerdict::Undecided);
        }
    });
    let (mut now, mut raced) = (0.0, Vec::new());
    while let Ask::Task(task) = evolution.ask(now).unwrap() {
        let took = if task.stage >= Stage::Race { 2.2 } else { 0.3 };
        if task.stage == Stage::Race {
            raced.push(task.subject == ships);
        }
        let outcome = Evaluator::evaluate(&mut evaluator, &task);
        evolution.tell(&Outcome { seconds: took, ..outcome }).unwrap();
        now += took;
    }
    assert!(raced.len() > 3 && raced[..raced.len() - 1].iter().all(|is_shipped| !is_shipped), "{raced:?}");
}

/// The promoted candidate need not be the best: the best one may lose on a held-out problem.
#[test]
fn the_promoted_one_is_described_where_it_is_not_the_best() {
    let (_page, config, mut evolution) = alone("second-best", 60, 12);
    let own = config.cases[0].problem;
    let mut first = None;
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::HeldOut && task.problem != own {
            // The first candidate that gets here loses.
            match *first.get_or_insert(task.candidate) == task.candidate {
                true => verdict_of(finding, 0.8, SpeedVerdict::Slower),
                false => verdict_of(finding, 1.0, SpeedVerdict::Undecided),
            }
        }
    });
    run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
    let report = json!(evolution.report());
    let (best, promoted) = (&report["best"], &report["promoted"]);
    assert_ne!(best["id"], promoted["id"]);
    assert!(promoted["candidate"]["gpu"].is_object() && promoted["candidate"] != best["candidate"]);
    assert!(promoted["race"]["ratio"].as_f64() < report["speedup"].as_f64());
    assert_eq!((&promoted["race"]["verdict"], &promoted["row"]["problem"]), (&json!("FASTER"), &json!(own)));
    assert_eq!(promoted["row"]["plan"], promoted["candidate"]["gpu"]);
    let ends = |who: &Value| {
        who["held_out"].as_array().unwrap().iter().map(|h| h["race"]["verdict"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ends(promoted), [json!("UNDECIDED"), json!("UNDECIDED")]);
    assert_eq!(ends(&report)[0], json!("SLOWER"));
}

/// If the control beats the baseline, no race counts.
#[test]
fn a_control_that_is_off_promotes_nobody() {
    let page = Page::new("control");
    let config = config(&Problem::mission(), 60, 12);
    let spared = Landscape::identity(&config.cases[0].baseline);
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::Race && Landscape::identity(&task.subject) == spared {
            verdict_of(finding, 1.1, SpeedVerdict::Faster);
        }
    });
    run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
    let report = json!(evolution.report());
    assert_eq!((&report["control"]["sound"], &report["promoted"]), (&json!(false), &Value::Null));
    assert!(report["refused"]["why"].as_str().unwrap().contains("control"), "{}", report["refused"]);
    assert_eq!(report["verdict"], "FASTER");
}

#[test]
fn a_run_without_blind_draws_is_refused() {
    let page = Page::new("share");
    let mut config = config(&Problem::mission(), 30, 6);
    config.random_share = 0.0;
    let begun = Evolution::begin(page.open(), config, Environment::default(), None, Limits::ALONE);
    assert!(begun.err().unwrap().to_string().contains("expected a share above 0"));
}

/// A lost device stops the run and rejects no candidates. A resumed run counts failures from zero.
#[test]
fn a_lost_device_stops_the_run() {
    let page = Page::new("lost");
    let config = config(&Problem::mission(), 200, 7);
    let mut evolution = begin(&page, &config, Limits::beside_device(2));
    let run = evolution.run();
    let mut landscape = Landscape::new(7, &config);
    drive(&mut evolution, &mut landscape, 0, 40);
    drop(evolution);
    let mut evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
    let mut lost = |task: &Task| {
        let mut outcome = Evaluator::evaluate(&mut landscape, task);
        if task.stage.is_of_device() {
            outcome.finding = Finding::Rejected(no(task.stage, Reason::Crashed));
        }
        outcome
    };
    let mut crashed = 0;
    let error = loop {
        match evolution.ask(0.0) {
            Ok(Ask::Task(task)) => {
                let outcome = lost(&task);
                crashed += usize::from(task.stage.is_of_device());
                evolution.tell(&outcome).unwrap();
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        }
    };
    assert_eq!(crashed, 5);
    let said = error.to_string();
    assert!(said.contains("last 5 evaluations on the device") && said.contains("crashed, it says"), "{said}");
    drop(evolution);
    assert_eq!(page.open().events(run).unwrap().last().unwrap().1, RunEvent::Stopped);
    let mut evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
    run_out(&mut evolution, &mut landscape, nobody, |_| {}).unwrap();
    assert_eq!(json!(evolution.report())["candidates"]["total"], 200);
}

/// A device that is lost at the start of the races rejects no candidate. The resumed run runs all races.
#[test]
fn a_device_lost_before_the_races_ends_nobody() {
    for candidates in [1, 2, 60] {
        let (page, config, mut evolution) = alone(&format!("lost-races-{candidates}"), candidates, 12);
        let run = evolution.run();
        let mut lost = Meddled(Landscape::new(12, &config), |task: &Task, finding: &mut Finding| {
            if task.stage == Stage::Race {
                *finding = Finding::Rejected(no(task.stage, Reason::Crashed));
            }
        });
        let error = run_out(&mut evolution, &mut lost, nobody, |_| {}).unwrap_err();
        assert!(matches!(error, EvolveError::Faults { .. }), "{error}");
        drop(evolution);
        let deaths = page.open().rejections_by_reason(run).unwrap();
        assert!(!deaths.iter().any(|death| death.reason == Reason::Crashed), "{deaths:?}");
        let mut evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
        run_out(&mut evolution, &mut lost.0, nobody, |_| {}).unwrap();
        let report = json!(evolution.report());
        assert_eq!(report["control"]["sound"], true, "{report}");
        assert_eq!(report["promoted"].is_object(), candidates == 60, "{report}");
    }
}

/// A candidate that fails twice while others succeed is at fault. A candidate that fails once is tried again.
#[test]
fn a_candidates_own_fault_is_its_own() {
    let (page, config, mut evolution) = alone("own-fault", 40, 12);
    let (mut bad, mut seen) = (None, HashSet::new());
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        // Candidates 1 and 2 are baseline and control.
        if task.stage == Stage::Microbench && task.candidate > CandidateId(2) {
            let is_bad = *bad.get_or_insert(task.candidate) == task.candidate;
            if seen.insert(task.candidate) || is_bad {
                *finding = Finding::Rejected(no(task.stage, Reason::Crashed));
            }
        }
    });
    run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
    let report = json!(evolution.report());
    assert_eq!(report["rejected"]["crashed"], 1, "{}", report["rejected"]);
    assert!(report["candidates"]["timed"].as_u64() >= Some(5), "{}", report["candidates"]);
    let deaths = page.open().rejections_by_reason(evolution.run()).unwrap();
    assert_eq!(deaths.iter().filter(|d| d.reason == Reason::Crashed).map(|d| d.candidates).sum::<i64>(), 1);
}

/// A failed race is not a wrong output, and its message is reported.
#[test]
fn a_held_out_race_that_breaks_down_is_no_wrong_answer() {
    let (_page, config, mut evolution) = alone("held-crash", 60, 12);
    let own = config.cases[0].problem;
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::HeldOut && task.problem != own {
            *finding = Finding::Rejected(no(task.stage, Reason::Hangs));
        }
    });
    run_out(&mut evolution, &mut evaluator, nobody, |_| {}).unwrap();
    let report = json!(evolution.report());
    let end = &report["held_out"][0];
    assert_eq!((&end["end"], &end["reason"]), (&json!("failed"), &json!("hangs")));
    let why = report["refused"]["why"].as_str().unwrap();
    assert!(why.ends_with("was not run to its end (hangs)"), "{why}");
}

/// After a fault of the incumbent, the race is repeated.
#[test]
fn an_incumbents_fault_is_not_the_candidates() {
    let (_page, config, mut evolution) = alone("incumbent", 40, 12);
    let mut tries: BTreeMap<CandidateId, usize> = BTreeMap::new();
    let mut evaluator = Meddled(Landscape::new(12, &config), move |task: &Task, finding: &mut Finding| {
        if task.stage == Stage::Race {
            let count = tries.entry(task.candidate).or_default();
            *count += 1;
            if *count == 1 {
                *finding = Finding::Rejected(no(task.stage, Reason::Incumbent));
            }
        }
    });
    let mut races = 0;
    run_out(&mut evolution, &mut evaluator, nobody, |task| races += usize::from(task.stage == Stage::Race))
        .unwrap();
    let report = json!(evolution.report());
    assert_eq!(report["rejected"]["incumbent"], Value::Null, "{}", report["rejected"]);
    assert!(races >= 8 && report["speedup"].as_f64().is_some(), "{races}");
}

/// When the time is up, only races remain: no checks run, open questions are dropped, and open candidates are
/// rejected with that reason.
#[test]
fn the_time_is_kept() {
    let cut: usize = (2..6).map(candidates_cut_by_time).sum();
    assert!(cut > 0, "no run had an open candidate at its end");
}

/// Candidates that a run left open.
fn candidates_cut_by_time(seed: u64) -> usize {
    let page = Page::new(&format!("time-{seed}"));
    let mut config = config(&Problem::mission(), 0, seed);
    (config.candidates, config.seconds) = (None, Some(60.0));
    config.proposer = Some("one that never answers".into());
    let mut evolution = begin(&page, &config, Limits::beside_device(3));
    let mut landscape = Landscape::new(seed, &config);
    let (mut now, mut under_way, mut late) = (0.0, std::collections::VecDeque::new(), 0);
    loop {
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => {
                late += usize::from(now >= 60.0 - finals::reserve(&evolution) && task.stage < Stage::Race);
                under_way.push_back(*task);
            }
            Ask::Propose(_) => {}
            Ask::Wait => {
                // With no open task, the run waits for the proposer.
                now += 1.0;
                if let Some(task) = under_way.pop_front() {
                    evolution.tell(&Evaluator::evaluate(&mut landscape, &task)).unwrap();
                }
            }
            Ask::Done => break,
        }
        assert!(now < 120.0, "the proposer is waited for");
    }
    assert_eq!(late, 0);
    let ledger = page.open();
    let cut = evolution.searches[0].population.members.values().filter(|m| m.counts() && m.is_open());
    let cut: Vec<CandidateId> = cut.map(|m| m.id).collect();
    for &id in &cut {
        let rejections = ledger.candidate(id).unwrap().rejections;
        assert_eq!(rejections.iter().map(|r| r.reason).collect::<Vec<_>>(), [Reason::Budget]);
    }
    assert!(json!(evolution.report())["best"]["id"].as_i64().is_some());
    cut.len()
}

/// The clock follows the tasks: each problem's first race and control are run, and the others if time allows.
#[test]
fn races_for_which_there_is_no_time_are_not_run() {
    // Several problems in a minute; one in 18 s; and races that take longer than planned.
    for (seconds, count, race) in [(60.0, 4, 2.2), (18.0, 1, 2.2), (60.0, 2, 4.5)] {
        let page = Page::new(&format!("fit-{count}-{race}"));
        let mut config = config(&Problem::mission(), 0, 2);
        for batch in 2..=count {
            // A different batch size, so that the landscape spares the baseline of each.
            let case = config.cases[0].clone();
            config.cases.push(Case {
                problem: Shape { batch, ..case.problem },
                held_out: Vec::new(),
                ..case
            });
        }
        (config.candidates, config.seconds, config.timing) = (None, Some(seconds), [0.15, 1.5]);
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let mut landscape = Landscape::new(2, &config);
        let mut now = 0.0;
        loop {
            match evolution.ask(now).unwrap() {
                Ask::Task(task) => {
                    let took = if task.stage >= Stage::Race { race } else { 0.3 };
                    let outcome = Evaluator::evaluate(&mut landscape, &task);
                    evolution.tell(&Outcome { seconds: took, ..outcome }).unwrap();
                    now += took;
                }
                Ask::Done => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(now <= seconds + (race - 1.5 * 1.5_f64).max(0.0), "{now} of {seconds} s");
        let report = json!(evolution.report());
        let cases = report["problems"].as_array().cloned().unwrap_or_else(|| vec![report.clone()]);
        let mut skipped = 0;
        for case in &cases {
            assert!(case["speedup"].is_f64() && case["control"]["sound"] == true, "{case}");
            skipped += case["skipped"].as_array().unwrap().len();
            let is_told = case["promoted"].is_object() || case["refused"]["why"].is_string();
            assert!(is_told || case["verdict"] != "FASTER", "{case}");
        }
        if count == 1 {
            continue; // few candidates have a time, and all of them race
        }
        assert!(skipped > 0, "{report}");
        // A finalist without a race is rejected for lack of time, not of speed.
        let late = page.open().rejections_by_reason(evolution.run()).unwrap();
        assert!(late.iter().any(|d| d.stage == Stage::Race && d.reason == Reason::Budget), "{late:?}");
    }
}

/// Problems that the run itself searches are not held out. The shipped plan on a problem that several cases
/// hold out is added once, also in an interrupted run.
#[test]
fn cases_share_what_is_held_out() {
    // With some seeds the search finds faster plans for both cases, which then race on the held-out problems.
    let raced = (1..8).map(raced_on_held_out);
    assert!(raced.max() >= Some(4), "each winner on its own problem and on the other");
}

/// Races of an interrupted run on held-out problems.
fn raced_on_held_out(seed: u64) -> usize {
    let page = Page::new(&format!("shared-{seed}"));
    let mut config = config(&Problem::mission(), 40, seed);
    let mut other = config.cases[0].clone();
    other.problem = Shape { batch: 2, ..other.problem };
    let shared = config.cases[0].held_out[0].clone();
    other.held_out = vec![shared.clone(), (config.cases[0].problem, other.baseline.clone())];
    config.cases[0].held_out = vec![shared];
    config.cases.push(other);
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let run = evolution.run();
    assert!(evolution.config().cases.iter().all(|case| case.held_out.len() == 1));
    let mut landscape = Landscape { noise: 0.0, ..Landscape::new(seed, &config) };
    loop {
        // Interrupted after every outcome of the races.
        let told = drive(&mut evolution, &mut landscape, 0, 1);
        let at_the_end =
            evolution.searches.iter().any(|s| s.population.members.values().any(|m| m.race.is_some()));
        if told == 0 {
            break;
        }
        if at_the_end {
            let _ = evolution.ask(0.0).unwrap();
            // Only one process may drive a run.
            drop(evolution);
            evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
        }
    }
    let known = page.open().resume(run).unwrap();
    let references = known.candidates.iter().filter(|c| c.new.operator.operator == Operator::HeldOut).count();
    let raced = known.outcomes.iter().filter(|o| o.stage == Stage::HeldOut).count();
    let report = json!(evolution.report());
    assert!(references <= 1 && (references == 1 || raced < 4), "{report:#}");
    raced
}
