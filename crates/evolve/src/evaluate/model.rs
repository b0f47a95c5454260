//! Evaluations for a machine that is not available: kernels are built and checked here, and the time model
//! predicts their times. Each such time is marked as predicted and has the model's interval. A difference
//! within the model's uncertainty is undecided.

use std::collections::HashMap;

use kernels::select::Shape;
use predict::Gpu;

use super::kernel::Bench;
use super::{Evaluator, Look};
use crate::{Candidate, Finding, Stage, Task};
use bench::SpeedVerdict;
use bench::provenance::built_from;
use ledger::{Against, Environment, MeasurementFact, Reason, Rejection, TimeKind, Trial};

/// Factor on the number of recorded CTAs, compared with a screening.
const CLOSER: u64 = 2;
/// Number of cached predictions: an incumbent is raced many times.
const REMEMBERED: usize = 64;

/// Evaluates for a machine of the time model's table.
pub struct Model {
    bench: Bench,
    known: HashMap<(String, Shape), [f64; 3]>,
}

impl Model {
    /// The evaluator for a machine; `None` when no kernel supports its architecture.
    pub fn of(gpu: &'static Gpu) -> Option<Model> {
        Some(Model { bench: Bench::of(gpu)?, known: HashMap::new() })
    }

    /// The builder and checker.
    pub const fn bench(&self) -> &Bench {
        &self.bench
    }

    /// The predicted time of a candidate: low, expected, high, µs.
    fn time(&mut self, candidate: &Candidate, shape: &Shape) -> Result<[f64; 3], Rejection> {
        let key = (candidate.hash(), *shape);
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let problem = shape.problem();
        let built = self.bench.build(candidate, &problem)?;
        let (prediction, _) =
            self.bench.predict(candidate, &problem, &built, CLOSER)?.ok_or_else(|| Rejection {
                stage: Stage::Microbench,
                reason: Reason::NoPrediction,
                detail: format!("the time model cannot replay it on {}", self.bench.gpu.name),
            })?;
        let time = [prediction.us_low, prediction.us, prediction.us_high];
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        self.known.insert(key, time);
        Ok(time)
    }

    fn timed(&mut self, task: &Task, trial: Trial) -> Result<Finding, Rejection> {
        let at = |rejection: Rejection| Rejection { stage: task.stage, ..rejection };
        let [low_us, us, high_us] = self.time(&task.subject, &task.problem).map_err(at)?;
        let against = match &task.incumbent {
            Some((id, incumbent)) if trial != Trial::Microbench => {
                let [_, theirs, _] = self.time(incumbent, &task.problem).map_err(at)?;
                Some(compare(*id, theirs, [low_us, us, high_us]))
            }
            _ => None,
        };
        let kind = TimeKind::Predicted;
        let (samples, problem) = (vec![us], task.problem);
        let measurement = MeasurementFact { trial, kind, problem, samples, us, low_us, high_us, against };
        Ok(Finding::Timed { check: None, measurement })
    }
}

/// Compares two predictions. The model's interval for one time is also used for the ratio of two times:
/// errors of the model's constants cancel, and the remaining errors of two kernels are about as large as
/// those of one (by the scatter of forecasts over held-out plans).
fn compare(incumbent: ledger::CandidateId, theirs: f64, ours: [f64; 3]) -> Against {
    let [low_us, us, high_us] = ours;
    let ratio = theirs / us;
    let (low, high) = (ratio * low_us / us, ratio * high_us / us);
    let verdict = match () {
        () if low > 1.0 => SpeedVerdict::Faster,
        () if high < 1.0 => SpeedVerdict::Slower,
        () => SpeedVerdict::Undecided,
    };
    Against { incumbent, ratio, low, high, noise: high / ratio, verdict }
}

impl Evaluator for Model {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let problem = task.problem.problem();
        let finding = match task.stage {
            Stage::Screen => self.bench.screen(&task.subject, &problem)?,
            Stage::Check => Finding::Judged(self.bench.check(&task.subject, &problem)?),
            Stage::Microbench => self.timed(task, Trial::Microbench)?,
            Stage::Race => self.timed(task, Trial::Race)?,
            Stage::HeldOut => self.timed(task, Trial::HeldOut)?,
            Stage::Propose => {
                let (reason, detail) = (Reason::Proposer, "no proposer is given".to_owned());
                return Err(Rejection { stage: Stage::Propose, reason, detail });
            }
        };
        Ok(Look::without_device(finding))
    }

    fn environment(&self) -> Environment {
        Environment {
            device: self.bench.gpu.name.to_owned(),
            driver: "time model".to_owned(),
            compiler: self.bench.ptxas.as_ref().map_or_else(
                || "no ptxas: registers are estimated".to_owned(),
                |ptxas| format!("ptxas {}", ptxas.version()),
            ),
            commit: built_from().map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::ladder::RungPlan;
    use kernels::{Arch, Family, Plan};
    use predict::machine::H200;
    use problem::{Band, DType, PassKind, Problem};

    use super::*;
    use crate::Target;
    use check::gate::Verdict;
    use ledger::CandidateId;

    fn task(stage: Stage, problem: &Problem, plan: Plan) -> Task {
        Task {
            candidate: CandidateId(7),
            stage,
            target: Target::Model { machine: "h200".into() },
            problem: Shape::of(problem),
            subject: Candidate::Gpu(plan),
            incumbent: None,
            seconds: 0.1,
        }
    }

    #[test]
    fn every_family_is_screened_checked_and_predicted() {
        let mut model = Model::of(&H200).unwrap();
        let problem = Problem::new(1, 2, 256, 64, DType::F16).with_band(Band::CAUSAL);
        for family in Family::of_pass(PassKind::Forward) {
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let screened = model.evaluate(&task(Stage::Screen, &problem, plan.clone()));
            let Finding::Screened { screening, predicted_us: Some([low, us, high]), .. } = screened.finding
            else {
                panic!("{:?}", screened.finding)
            };
            assert!(low < us && us < high && screening.registers.is_some(), "{screening:?}");
            assert!(screening.tile.unwrap().contains('x') && !screening.bound.unwrap().is_empty());
            let judged = model.evaluate(&task(Stage::Check, &problem, plan.clone()));
            assert!(
                matches!(&judged.finding, Finding::Judged(check) if check.verdict == Verdict::Passed),
                "{judged:?}"
            );
            let timed = model.evaluate(&task(Stage::Microbench, &problem, plan));
            let Finding::Timed { measurement, .. } = timed.finding else { panic!("{:?}", timed.finding) };
            assert_eq!((measurement.kind, measurement.trial), (TimeKind::Predicted, Trial::Microbench));
        }
    }

    /// A plan against itself is undecided, and one that takes several times as long is slower.
    #[test]
    fn races_of_predictions_know_their_doubt() {
        let mut model = Model::of(&H200).unwrap();
        let problem = Problem::new(1, 2, 256, 64, DType::F16);
        let mma = Family::Mma.default_for(&problem, &Arch::SM_90).unwrap();
        let slow = Plan::Ladder { rung: RungPlan::Phase4 };
        let mut race = |ours: &Plan, theirs: &Plan| {
            let incumbent = Some((CandidateId(1), Candidate::Gpu(theirs.clone())));
            let outcome = model.evaluate(&Task { incumbent, ..task(Stage::Race, &problem, ours.clone()) });
            match outcome.finding {
                Finding::Timed { measurement, .. } => measurement.against.unwrap(),
                other => panic!("{other:?}"),
            }
        };
        let same = race(&mma, &mma);
        assert_eq!((same.ratio, same.verdict), (1.0, SpeedVerdict::Undecided));
        assert_eq!(race(&mma, &slow).verdict, SpeedVerdict::Faster);
        assert_eq!(race(&slow, &mma).verdict, SpeedVerdict::Slower);
    }

    #[test]
    fn what_cannot_be_built_or_is_wrong_says_why() {
        let mut model = Model::of(&H200).unwrap();
        let problem = Problem::new(1, 2, 128, 64, DType::F16);
        let racy = task(Stage::Check, &problem, Plan::Ladder { rung: RungPlan::Phase4Race });
        let Finding::Judged(check) = model.evaluate(&racy).finding else { panic!("judged") };
        assert_eq!(check.verdict, Verdict::Failed);
        assert!(!check.reasons.is_empty() && check.hazards[0]["kind"] == "race", "{check:?}");
        let other = Problem::new(1, 2, 128, 96, DType::F16);
        let unfit = task(Stage::Screen, &other, Plan::Ladder { rung: RungPlan::Phase4 });
        let Finding::Rejected(rejection) = model.evaluate(&unfit).finding else { panic!("rejected") };
        assert_eq!(rejection.reason, Reason::Plan);
        assert!(rejection.detail.contains("head_dim"), "{}", rejection.detail);
    }

    /// The problem on which a plan is checked is small, of the same kind, and has ends that do not fill a
    /// tile.
    #[test]
    fn checks_are_of_small_problems() {
        let model = Model::of(&H200).unwrap();
        let problem = Problem::new(4, 16, 4096, 128, DType::Bf16).with_band(Band::CAUSAL);
        for family in Family::of_pass(PassKind::Forward) {
            // `small_at_once` has no plan for so many keys.
            let Ok(plan) = family.default_for(&problem, &Arch::SM_90) else { continue };
            let small = model.bench().small(&plan, &problem);
            assert_eq!((small.head_dim, small.band, small.dtypes), (128, Band::CAUSAL, DType::Bf16.into()));
            assert!(small.flops() < problem.flops() / 500.0, "{family:?} {small:?}");
            assert!(!small.seq_q.is_multiple_of(16), "{family:?} {small:?}");
            // Both bounds of the window lie inside of the problem, blocks apart.
            let problem = problem.clone().with_band(Band::window(1023, 0));
            let small = model.bench().small(&plan, &problem);
            let before = small.band.before.unwrap() as usize;
            assert!(small.seq_kv > before * 3 / 2 && before >= 16, "{family:?} {small:?}");
            assert!(small.flops() < problem.flops() / 20.0, "{family:?} {small:?}");
        }
    }
}
