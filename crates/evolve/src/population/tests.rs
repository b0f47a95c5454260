//! Tests of the sharing between the arms of a run, outcome by outcome.

use cpu::CpuPlan;
use problem::Problem;
use serde_json::json;

use super::*;
use crate::report::random_arm;
use ledger::{MeasurementFact, Reason, RunId, Screening, Trial};

/// A population that receives candidates with given times.
struct Tale {
    population: Population,
    guidance: Guidance,
}

impl Tale {
    /// A population with a baseline of 10 µs.
    fn new(draws: usize) -> Tale {
        let population = Population::new(Shape::of(&Problem::mission()), draws);
        let mut tale = Tale { population, guidance: Guidance::default() };
        tale.timed(1, Arm::Baseline, 0, 10.0);
        tale
    }

    /// Adds a candidate of plan number `plan`.
    fn admit(&mut self, id: i64, arm: Arm, operator: &str, plan: usize) -> Option<Rejection> {
        let candidate =
            Candidate::Cpu(CpuPlan { block_q: 16 * (plan + 1), ..CpuPlan::for_problem(&Problem::mission()) });
        let new = NewCandidate {
            run: RunId(1),
            problem: self.population.problem,
            candidate,
            arm,
            operator: operator.into(),
            parents: Vec::new(),
            changes: json!({}),
        };
        self.population.admit(CandidateId(id), &new)
    }

    fn tell(&mut self, id: i64, stage: Stage, finding: Finding) -> Vec<(CandidateId, Rejection)> {
        let (candidate, problem) = (CandidateId(id), self.population.problem);
        let outcome = Outcome { candidate, stage, problem, seconds: 0.0, device_seconds: 0.0, finding };
        let outcome = self.population.normalised(&outcome);
        self.population.learn(&outcome, &mut self.guidance)
    }

    fn screen(&mut self, id: i64, kernel: usize) -> Vec<(CandidateId, Rejection)> {
        self.predict(id, kernel, [1.0, 10.0 + id as f64, 100.0])
    }

    fn predict(&mut self, id: i64, kernel: usize, us: [f64; 3]) -> Vec<(CandidateId, Rejection)> {
        let screening = Screening {
            ptx_hash: format!("kernel {kernel}"),
            sass_hash: None,
            registers: None,
            spill_bytes: None,
            shared_bytes: None,
            bound: Some("tensor".into()),
            tile: Some(format!("tile {kernel}")),
        };
        let predicted_us = Some(us);
        self.tell(id, Stage::Screen, Finding::Screened { screening, predicted_us, findings: json!([]) })
    }

    fn time(&mut self, id: i64, trial: Trial, us: f64, against: Option<Against>) {
        let stage = if trial == Trial::Race { Stage::Race } else { Stage::Microbench };
        let measurement = MeasurementFact {
            trial,
            kind: TimeKind::Measured,
            problem: self.population.problem,
            samples: vec![us],
            us,
            low_us: us * 0.9,
            high_us: us * 1.1,
            against,
        };
        self.tell(id, stage, Finding::Timed { check: None, measurement });
    }

    /// Adds a candidate of plan and kernel number `plan` and times it.
    fn timed(&mut self, id: i64, arm: Arm, plan: usize, us: f64) {
        self.admit(id, arm, "restart", plan);
        self.screen(id, plan);
        self.time(id, Trial::Microbench, us, None);
    }

    /// Adds a candidate of a known plan, which is rejected.
    fn repeat(&mut self, id: i64, arm: Arm, plan: usize) {
        let rejection = self.admit(id, arm, "restart", plan).expect("known");
        assert_eq!(rejection.reason, Reason::Identical);
        assert!(self.population.members[&CandidateId(id)].is_open(), "its end is told like every other");
        self.tell(id, rejection.stage, Finding::Rejected(rejection));
        assert_eq!(self.population.members[&CandidateId(id)].place, CandidateState::Rejected);
    }

    fn elites(&self) -> Vec<i64> {
        self.population.niches.ranked().iter().map(|(_, elite)| elite.candidate.0).collect()
    }
}

fn race(ratio: f64, verdict: SpeedVerdict) -> Option<Against> {
    let incumbent = CandidateId(1);
    Some(Against { incumbent, ratio, low: ratio * 0.99, high: ratio * 1.01, noise: 1.005, verdict })
}

/// The search may make a plan that a random sample already had. The plan then also belongs to the search,
/// whichever was timed first.
#[test]
fn the_search_may_find_what_a_blind_draw_had() {
    for is_timed_first in [true, false] {
        let mut tale = Tale::new(0);
        let drawn = |tale: &mut Tale| tale.time(2, Trial::Microbench, 5.0, None);
        tale.admit(2, Arm::Random, "random", 7);
        tale.screen(2, 7);
        let plan = tale.population.members[&CandidateId(2)].candidate.clone();
        assert!(!tale.population.knows(&plan), "it is no knowledge of the search's own");
        if is_timed_first {
            drawn(&mut tale);
            assert_eq!((tale.elites(), tale.population.best), (vec![1], None));
        }
        tale.repeat(3, Arm::Evolution, 7);
        if !is_timed_first {
            drawn(&mut tale);
        }
        // A further repeat changes nothing.
        tale.repeat(4, Arm::Evolution, 7);
        assert!(tale.population.knows(&plan));
        assert_eq!((tale.elites(), tale.population.best), (vec![2, 1], Some(CandidateId(2))));
        assert_eq!(tale.population.curve, [5.0]);
        let earned = tale.population.bandit.accounts();
        assert_eq!(earned.iter().map(|account| account.earned).sum::<f64>(), reward::BEST);
        let best = |arm| tale.population.best_of(arm, 10).map(|m| m.id.0);
        assert_eq!((best(Arm::Evolution), best(Arm::Random)), (Some(2), Some(2)));
    }
}

/// A repeated plan may itself repeat the kernel of an earlier candidate; the search resolves to that
/// candidate.
#[test]
fn repeats_lead_to_the_first() {
    let mut tale = Tale::new(0);
    tale.timed(2, Arm::Random, 7, 5.0);
    tale.admit(3, Arm::Random, "random", 8);
    tale.screen(3, 7);
    tale.repeat(4, Arm::Evolution, 8);
    assert_eq!(tale.elites(), [2, 1]);
}

#[test]
fn arms_are_compared_at_equal_budget() {
    let mut tale = Tale::new(0);
    tale.timed(2, Arm::Random, 1, 8.0);
    for (id, us) in [(3, 9.0), (4, 4.0), (5, 3.0)] {
        tale.timed(id, Arm::Evolution, id as usize, us);
    }
    let best = |count| tale.population.best_of(Arm::Evolution, count).map(|m| m.id.0);
    assert_eq!((tale.population.equal_budget(), best(1), best(2), best(9)), (1, Some(3), Some(4), Some(5)));
    tale.time(2, Trial::Race, 8.0, race(1.2, SpeedVerdict::Faster));
    tale.time(3, Trial::Race, 9.0, race(1.1, SpeedVerdict::Faster));
    tale.time(5, Trial::Race, 3.0, race(3.0, SpeedVerdict::Faster));
    let arm = json!(random_arm(&tale.population));
    assert!(arm["gain"]["ratio"].as_f64().is_some_and(|ratio| ratio < 1.0), "{arm}");
    assert_eq!(arm["at_equal_budget"], json!({ "candidates": 1, "evolution_us": 9.0, "random_us": 8.0 }));
}

/// If nothing is faster than the shipped plan, the evolution's best is that plan, and the control's race is
/// its race.
#[test]
fn the_default_may_be_the_best() {
    let mut tale = Tale::new(0);
    tale.timed(2, Arm::Control, 0, 10.0);
    tale.repeat(3, Arm::Evolution, 0);
    tale.timed(4, Arm::Random, 1, 12.0);
    tale.time(2, Trial::Race, 10.0, race(1.0, SpeedVerdict::Undecided));
    tale.time(4, Trial::Race, 12.0, race(0.8, SpeedVerdict::Slower));
    let arm = json!(random_arm(&tale.population));
    assert!((arm["gain"]["ratio"].as_f64().unwrap() - 1.25).abs() < 1e-9, "{arm}");
    assert_eq!(
        arm["says"],
        "the initial candidates are faster than the random samples; the search found nothing faster"
    );
}

/// The model picks among the remaining samples, whatever the reason for the last rejection in the draw.
#[test]
fn a_draw_is_whole_when_its_last_is_dead() {
    let no =
        |reason: Reason| Finding::Rejected(Rejection { stage: Stage::Screen, reason, detail: String::new() });
    for is_repeat in [false, true] {
        let mut tale = Tale::new(5);
        for id in 2..6 {
            tale.admit(id, Arm::Evolution, "seed:model", id as usize);
            let rejected = tale.screen(id, id as usize);
            assert!(
                rejected.is_empty()
                    && tale.population.members[&CandidateId(id)].place == CandidateState::Held
            );
        }
        let rejected = if is_repeat {
            let rejection = tale.admit(6, Arm::Evolution, "seed:model", 2).unwrap();
            tale.tell(6, Stage::Screen, Finding::Rejected(rejection))
        } else {
            tale.admit(6, Arm::Evolution, "seed:model", 6);
            tale.tell(6, Stage::Screen, no(Reason::Ptxas))
        };
        let rejected: Vec<(i64, &str)> = rejected.iter().map(|(id, r)| (id.0, r.reason.name())).collect();
        assert_eq!(rejected, [(4, "predicted_slow"), (5, "predicted_slow")]);
        let place = |id| tale.population.members[&CandidateId(id)].place;
        assert_eq!(
            (place(2), place(3)),
            (CandidateState::Ready(Stage::Check), CandidateState::Ready(Stage::Check))
        );
    }
}

/// A candidate with a hopeless prediction is rejected. One in six is timed anyway, unless it is far too slow.
#[test]
fn some_hopeless_candidates_are_timed() {
    let mut tale = Tale::new(0);
    let standard = tale.population.members[&CandidateId(1)].predicted.unwrap()[1];
    let mut ends = |times: f64| {
        let us = times * standard;
        let rejected = (2..20).filter(|&id| {
            let id = id + (100.0 * times) as i64 * 6;
            tale.admit(id, Arm::Evolution, "mutate", id as usize);
            !tale.predict(id, id as usize, [us * 0.9, us, us * 1.1]).is_empty()
        });
        rejected.count()
    };
    assert_eq!((ends(1.05), ends(2.0), ends(9.0)), (0, 15, 18));
}

/// A time in turns with the baseline is the baseline's own time divided by the ratio, whatever slowed the
/// machine.
#[test]
fn a_slow_minute_is_nobodys_fault() {
    let mut tale = Tale::new(0);
    tale.admit(2, Arm::Evolution, "restart", 1);
    tale.screen(2, 1);
    tale.time(2, Trial::Microbench, 160.0, race(1.25, SpeedVerdict::Undecided));
    let time = tale.population.members[&CandidateId(2)].time.unwrap();
    assert_eq!((time.us, time.low, time.high), (8.0, 10.0 / (1.25 * 1.01), 10.0 / (1.25 * 0.99)));
    // Applying the stored outcome again, as when the ledger is read, gives the same time.
    tale.time(2, Trial::Microbench, 8.0, race(1.25, SpeedVerdict::Undecided));
    assert_eq!(tale.population.members[&CandidateId(2)].time.unwrap().us, 8.0);
}
