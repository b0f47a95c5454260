//! Tests of proposers.

use super::rules::{no, run_out};
use super::*;
use ledger::{KernelText, Reason};

fn proposing(page: &Page, candidates: usize, limits: Limits) -> (Evolution, Config) {
    let mut config = config(&Problem::mission(), candidates, 6);
    (config.proposer, config.random_share) = (Some("anything".into()), 0.2);
    (begin(page, &config, limits), config)
}

/// Each failure of a proposer is rejected separately, also in a resumed run.
#[test]
fn failures_of_a_proposer_stay_dead() {
    let page = Page::new("failures");
    let (mut evolution, config) = proposing(&page, 140, Limits::ALONE);
    let mut landscape = Landscape::new(6, &config);
    let fails = |_: &Question| Err(no(Stage::Propose, Reason::Hangs));
    // The proposer gives three equal answers, and each question takes a while.
    let (mut now, mut asked) = (0.0, 0);
    while asked < 3 {
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => evolution.tell(&landscape.evaluate(&task)).unwrap(),
            Ask::Propose(question) => {
                asked += 1;
                assert_eq!(question.asked, now);
                now += 2.5;
                // Nothing is timed while a proposer runs on this machine.
                assert_eq!(evolution.ask(now).unwrap(), Ask::Wait);
                evolution.answer(&question, fails(&question)).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    let run = evolution.run();
    let before = essence(&evolution);
    drop(evolution);
    let mut evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
    assert_eq!(essence(&evolution), before);
    run_out(&mut evolution, &mut landscape, fails, |task| {
        assert!(!matches!(task.subject, Candidate::Kernel(_)), "an answer's failure is no kernel");
    })
    .unwrap();
    let ledger = page.open();
    let mut ends = 0;
    for known in
        ledger.resume(run).unwrap().candidates.iter().filter(|c| c.new.operator.operator == Operator::Propose)
    {
        let found = ledger.candidate(known.id).unwrap().rejections;
        let found: Vec<(Stage, &str)> = found.iter().map(|r| (r.stage, r.reason.name())).collect();
        assert_eq!(found, [(Stage::Propose, "hangs")], "{:?}", known.id);
        ends += 1;
    }
    assert!(ends >= 3);
    let cost = ledger.cost(run).unwrap();
    let propose = cost.items.iter().find(|item| item.what == "propose").unwrap();
    assert_eq!((propose.tasks, propose.seconds), (ends, 7.5));
}

/// A proposer's hypothesis is stored with its forecast and an interval.
#[test]
fn a_hypothesis_is_kept_with_its_forecast() {
    let page = Page::new("hypothesis");
    let (mut evolution, config) = proposing(&page, 60, Limits::ALONE);
    let mut landscape = Landscape::new(6, &config);
    let mut plan = kernels::forward::mma::MmaPlan::default_for(&Problem::mission(), &Arch::SM_90);
    plan.block_n = 48 * plan.kv_warps;
    let candidate = Candidate::Gpu(Plan::Mma(plan));
    let proposal =
        Proposal { candidate, hypothesis: Some("fewer barriers".into()), predicted_us: Some(20.0) };
    run_out(&mut evolution, &mut landscape, |_| Ok(proposal.clone()), |_| {}).unwrap();
    let ledger = page.open();
    let told = ledger.by_hand(10).unwrap();
    assert_eq!(told.len(), 1, "repeats of a plan are no forecasts");
    let forecast = &told[0].forecast;
    assert_eq!((forecast.hypothesis.as_str(), forecast.author.as_str()), ("fewer barriers", "proposer"));
    assert!((forecast.low_us - 18.0).abs() < 1e-9 && (forecast.high_us - 22.0).abs() < 1e-9, "{forecast:?}");
    assert!(forecast.candidate.is_some());
}

/// An open question counts as a candidate: late answers do not exceed the budget.
#[test]
fn open_questions_are_of_the_budget() {
    for wait in [1, 5, 50] {
        let page = Page::new(&format!("open-{wait}"));
        let (mut evolution, config) = proposing(&page, 30, Limits::beside_device(2));
        let mut landscape = Landscape::new(6, &config);
        let (mut open, mut under_way, mut turns) = (None, Vec::new(), 0);
        loop {
            match evolution.ask(0.0).unwrap() {
                Ask::Task(task) => under_way.push(*task),
                Ask::Propose(question) => (open, turns) = (Some(*question), 0),
                Ask::Wait => {
                    turns += 1;
                    match (under_way.is_empty(), open.take()) {
                        (idle, Some(question)) if idle || turns >= wait => {
                            let answer = Err(no(Stage::Propose, Reason::Proposer));
                            evolution.answer(&question, answer).unwrap();
                        }
                        (_, still) => {
                            open = still;
                            evolution
                                .tell(&Evaluator::evaluate(&mut landscape, &under_way.remove(0)))
                                .unwrap();
                        }
                    }
                }
                Ask::Done => break,
            }
        }
        assert_eq!(json!(evolution.report())["candidates"]["total"], 30, "answers after {wait}");
    }
}

/// A proposer that the user names is asked in every configuration.
#[test]
fn every_configuration_asks_a_proposer() {
    for configuration in Configuration::ALL {
        let page = Page::new(configuration.name());
        let mut config = config(&Problem::mission(), 30, 6);
        (config.proposer, config.configuration) = (Some("anything".into()), configuration);
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let mut asked = 0;
        let answer = |_: &Question| {
            asked += 1;
            Err(no(Stage::Propose, Reason::Proposer))
        };
        run_out(&mut evolution, &mut Landscape::new(6, &config), answer, |_| {}).unwrap();
        assert!(asked > 0, "{configuration:?}");
    }
}

/// The brief quotes only a few lines of each kernel.
#[test]
fn a_brief_tells_of_kernels_in_few_words() {
    let page = Page::new("brief");
    let (mut evolution, config) = proposing(&page, 60, Limits::ALONE);
    let text = format!("first line\nsecond\n{}", "x".repeat(1 << 20));
    let mut longest = 0;
    let mut begins = BTreeMap::new();
    let answer = |question: &Question| {
        longest = longest.max(question.brief["history"].to_string().len());
        for line in question.brief["history"].as_array().unwrap() {
            if let Some(kernel) = line["candidate"].get("kernel") {
                begins.insert(kernel["hash"].to_string(), kernel["begins"].to_string());
            }
        }
        let candidate = Candidate::Kernel(KernelText {
            language: Language::Ptx,
            text: text.clone(),
            launch: String::new(),
        });
        Ok(Proposal { candidate, hypothesis: None, predicted_us: None })
    };
    let mut evaluator = Landscape::new(6, &config);
    run_out(&mut evolution, &mut evaluator, answer, |_| {}).unwrap();
    assert!(longest < 20_000, "{longest}");
    assert!(begins.values().any(|begins| begins.contains("first line\\nsecond\\nxxx")), "{begins:?}");
}

/// On a CPU, a running proposer would disturb the races, so no race begins before its program has ended. Its
/// time limit is the end of the search.
#[test]
fn no_race_runs_beside_a_proposer() {
    let page = Page::new("beside");
    let mut config = config(&Problem::mission(), 0, 6);
    (config.candidates, config.seconds, config.timing) = (None, Some(60.0), [0.15, 1.5]);
    (config.proposer, config.random_share) = (Some("a slow one".into()), 0.2);
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let mut landscape = Landscape::new(6, &config);
    let (mut now, mut asked, mut raced) = (0.0, None, 0);
    loop {
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => {
                assert!(asked.is_none(), "{task:?}");
                raced += usize::from(task.stage == Stage::Race);
                let outcome = Evaluator::evaluate(&mut landscape, &task);
                evolution.tell(&Outcome { seconds: 0.3, ..outcome }).unwrap();
                now += 0.3;
            }
            Ask::Propose(question) => asked = Some(*question),
            // The proposer takes its whole time limit.
            Ask::Wait => {
                let question = asked.take().unwrap();
                now = question.asked + question.seconds.unwrap();
                assert!(now < 60.0 - 6.0 * 1.5, "{now}");
                evolution.at(now);
                assert_eq!(evolution.ask(now).unwrap(), Ask::Wait);
                evolution.answer(&question, Err(no(Stage::Propose, Reason::Hangs))).unwrap();
            }
            Ask::Done => break,
        }
    }
    assert!(raced > 0);
}
