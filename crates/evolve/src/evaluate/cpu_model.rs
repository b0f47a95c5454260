//! The time model of the native kernels on this machine. [`CpuPlan::cost`] counts work at the rates of an
//! ideal processor. This module learns how this machine deviates from that: it times a few plans before the
//! first prediction, and learns from every short timing of the run.
//!
//! All times are ratios to one reference plan, measured in turns with it, so that a slow phase of the machine
//! does not distort them. The logarithm of the deviation is fitted as a linear function of the genes. The
//! interval of a prediction comes from the residuals of plans, each computed as if that plan had not been
//! fitted.

use bench::{CpuTimer, quantile};
use cpu::{CpuPlan, Isa, Lanes, Order, Rows};
use problem::Problem;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::time::Instant;

use super::ridge::Ridge;
use crate::Candidate;
use crate::space::Space;

/// Maximum number of plans that are timed before the first prediction, and the maximum time for this, s.
const PROBES: usize = 64;
const SECONDS: f64 = 3.0;
/// Minimum number of plans for a fit.
const LEAST: usize = 16;
/// Probes are predicted to take at most this many times as long as the reference. Slower plans take long to
/// time, and a search does not need their exact time.
const DEAREST: f64 = 6.0;
/// The penalty on the weights of the fit.
const PENALTY: f64 = 2.0;
/// Maximum number of timings in a fit; the newest are used.
const MEMORY: usize = 1000;
/// The interval of a prediction should contain this share of new plans.
const COVERED: f64 = 0.9;
/// The smallest half width of an interval, as a factor.
const NARROWEST: f64 = 1.05;
/// The half width before anything is learnt. It is so large that only hopeless plans are rejected.
const UNKNOWN: f64 = 3.0;

/// Number of features of a plan.
const FEATURES: usize = 16 + Isa::ALL.len();

/// The features of a plan.
type Features = [f64; FEATURES];

/// Measurements of one problem.
pub struct CpuModel {
    problem: Problem,
    reference: CpuPlan,
    /// The reference's time, µs.
    reference_us: f64,
    /// Features of each plan, and the logarithm of the measured ratio divided by the predicted one.
    rows: Vec<(Features, f64)>,
    /// The fit to `rows`, and the half width of its interval as a factor; `None` after a new row.
    fit: Option<(Ridge<FEATURES>, f64)>,
}

impl CpuModel {
    /// Times the plan that calls use, and random plans in turns with it.
    pub fn calibrate(problem: &Problem) -> CpuModel {
        let reference = cpu::kept::chosen(problem, cpu::threads()).plan;
        let mut timer = CpuTimer::new(problem);
        let mut time = |plan: &CpuPlan| timer.time(plan).unwrap_or(f64::NAN);
        let began = Instant::now();
        let mut model = CpuModel {
            problem: problem.clone(),
            reference,
            reference_us: time(&reference),
            rows: Vec::new(),
            fit: None,
        };
        let (space, mut rng) = (Space::cpu(problem), SmallRng::seed_from_u64(1));
        let mut times = vec![model.reference_us];
        let dearest = DEAREST * reference.cost(problem).cycles;
        for _ in 0..8 * PROBES {
            if model.rows.len() == PROBES || began.elapsed().as_secs_f64() > SECONDS {
                break;
            }
            let Some(Candidate::Cpu(plan)) = space.random(&mut rng) else { continue };
            if plan.cost(problem).cycles < dearest {
                let (us, theirs) = (time(&plan), time(&reference));
                times.push(theirs);
                model.learn(&plan, us / theirs);
            }
        }
        model.reference_us = quantile(&times, 0.5);
        model
    }

    /// Learns the time of a plan relative to the reference.
    fn learn(&mut self, plan: &CpuPlan, ratio: f64) {
        let departure = (ratio / self.ratio(plan)).ln();
        if departure.is_finite() {
            if self.rows.len() == MEMORY {
                self.rows.remove(PROBES.min(MEMORY - 1));
            }
            self.rows.push((self.features(plan), departure));
            self.fit = None;
        }
    }

    /// Learns a short timing of a plan in turns with another one: the ratio of the plan's time to the
    /// other's.
    pub fn learn_against(&mut self, plan: &CpuPlan, other: &CpuPlan, ratio: f64) {
        if other.canonical(&self.problem) == self.reference.canonical(&self.problem) {
            self.learn(plan, ratio);
        }
    }

    /// Sets the reference plan, and the time with which later times are compared.
    pub fn set_reference(&mut self, plan: &CpuPlan, us: f64) {
        if us.is_nan() || us <= 0.0 {
            return;
        }
        if plan.canonical(&self.problem) != self.reference.canonical(&self.problem) {
            // All deviations are relative to that of the reference.
            let departure = self.predict(plan)[1] / (self.ratio(plan) * self.reference_us);
            self.rows.iter_mut().for_each(|(_, row)| *row -= departure.ln());
            (self.reference, self.fit) = (*plan, None);
        }
        self.reference_us = us;
    }

    /// The predicted time of a plan, µs: low, expected, high.
    pub fn predict(&mut self, plan: &CpuPlan) -> [f64; 3] {
        let features = self.features(plan);
        let prior = self.ratio(plan) * self.reference_us;
        if self.rows.len() < LEAST {
            return [prior / UNKNOWN, prior, prior * UNKNOWN];
        }
        let (fit, doubt) = self.fit.get_or_insert_with(|| {
            let fit = Ridge::fit(&self.rows, PENALTY);
            let sizes: Vec<f64> = fit.left_out.iter().map(|residual| residual.abs()).collect();
            let doubt = quantile(&sizes, COVERED).exp().max(NARROWEST);
            (fit, doubt)
        });
        let us = prior * fit.at(&features).exp();
        [us / *doubt, us, us * *doubt]
    }

    /// The cost of a plan over that of the reference.
    fn ratio(&self, plan: &CpuPlan) -> f64 {
        plan.cost(&self.problem).cycles / self.reference.cost(&self.problem).cycles
    }

    /// The genes as numbers. A gene that has another meaning with lanes along the head dimension has a
    /// separate feature for that case.
    fn features(&self, plan: &CpuPlan) -> Features {
        let plan = plan.canonical(&self.problem);
        let flag = |is: bool| f64::from(u8::from(is));
        let log = |count: usize| (count as f64).log2();
        let queries = flag(plan.lanes == Lanes::Queries);
        let dims = 1.0 - queries;
        let mut features = [0.0; FEATURES];
        let genes = [
            1.0,
            queries,
            flag(plan.threads > 1),
            log(plan.threads),
            queries * log(plan.vectors),
            dims * log(plan.vectors),
            queries * log(plan.tile_rows),
            dims * log(plan.tile_rows),
            log(plan.block_q),
            queries * log(plan.block_q),
            log(plan.block_kv),
            queries * log(plan.block_kv),
            log(plan.splits),
            flag(plan.splits > 1),
            flag(plan.order == Order::Heads),
            flag(plan.rows == Rows::Group),
        ];
        features[..genes.len()].copy_from_slice(&genes);
        let isa = Isa::ALL.iter().position(|isa| *isa == plan.isa).unwrap_or(0);
        features[genes.len() + isa] = 1.0;
        features
    }
}

#[cfg(test)]
mod tests {
    use problem::DType;

    use super::*;

    /// A model of a machine on which a plan takes its cost times a function of its genes.
    fn learnt(disturbance: f64) -> (CpuModel, Vec<(CpuPlan, f64)>) {
        let problem = Problem::new(1, 8, 512, 64, DType::F32);
        let reference = CpuPlan::for_problem(&problem);
        let mut model =
            CpuModel { problem: problem.clone(), reference, reference_us: 1000.0, rows: vec![], fit: None };
        let (space, mut rng) = (Space::cpu(&problem), SmallRng::seed_from_u64(3));
        let mut plans = Vec::new();
        for i in 0..160 {
            let Some(Candidate::Cpu(plan)) = space.random(&mut rng) else { continue };
            let law = if plan.lanes == Lanes::Queries { 2.0 } else { 0.7 };
            let law = law * (plan.tile_rows as f64).powf(0.3) * (1.0 + disturbance * f64::from(i % 3 - 1));
            plans.push((plan, model.ratio(&plan) * law));
        }
        for (plan, ratio) in &plans[..80] {
            model.learn(plan, *ratio);
        }
        (model, plans[80..].to_vec())
    }

    #[test]
    fn a_machine_is_learnt_and_the_interval_holds_new_plans() {
        for disturbance in [0.02, 0.2] {
            let (mut model, plans) = learnt(disturbance);
            let within = plans.iter().filter(|(plan, ratio)| {
                let [low, _, high] = model.predict(plan);
                (low..=high).contains(&(1000.0 * ratio))
            });
            let share = within.count() as f64 / plans.len() as f64;
            assert!(share > 0.75, "{share}");
        }
        let width = |disturbance: f64| {
            let (mut model, plans) = learnt(disturbance);
            let [low, us, _] = model.predict(&plans[0].0);
            us / low
        };
        // A disturbed machine supports fewer rejections.
        assert!(width(0.02) < 1.25 && width(0.2) > width(0.02), "{} {}", width(0.02), width(0.2));
    }

    #[test]
    fn without_timings_only_the_hopeless_is_ruled_out() {
        let problem = Problem::new(1, 8, 512, 64, DType::F32);
        let reference = CpuPlan::for_problem(&problem);
        let mut model = CpuModel { problem, reference, reference_us: 1000.0, rows: vec![], fit: None };
        assert_eq!(model.predict(&reference), [1000.0 / UNKNOWN, 1000.0, 1000.0 * UNKNOWN]);
        model.set_reference(&reference, 500.0);
        model.learn(&reference, f64::NAN);
        let other = CpuPlan { block_q: 16, ..reference };
        model.learn_against(&reference, &other, 1.0);
        assert_eq!((model.predict(&reference)[1], model.rows.len()), (500.0, 0));
    }

    #[test]
    fn another_reference_changes_no_ratio() {
        let (mut model, plans) = learnt(0.02);
        let [first, second, reference] = [plans[0].0, plans[1].0, plans[2].0];
        let ratio = |model: &mut CpuModel| model.predict(&first)[1] / model.predict(&second)[1];
        let (before, us) = (ratio(&mut model), 700.0);
        model.set_reference(&reference, us);
        assert!((ratio(&mut model) / before - 1.0).abs() < 0.02);
        assert!((model.predict(&reference)[1] / us - 1.0).abs() < 0.2);
    }

    #[test]
    fn a_calibration_takes_seconds_and_predicts_its_reference() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let began = Instant::now();
        let mut model = CpuModel::calibrate(&problem);
        assert!(model.rows.len() >= LEAST && began.elapsed().as_secs_f64() < 30.0);
        let reference = model.reference;
        let [low, us, high] = model.predict(&reference);
        assert!(0.0 < low && low < us && us < high);
    }
}
