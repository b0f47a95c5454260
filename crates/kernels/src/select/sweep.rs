//! Plans whose times on many random problems were measured (`cargo xtask measure tune --sweep`), and the
//! prediction of their times on other problems.

use std::collections::HashSet;
use std::sync::OnceLock;

use attend::Packing;
use problem::{Band, DType, Layout, Problem};
use serde::{Deserialize, Serialize};

use super::Device;
use super::correction::{self, Errors, FeaturePlace};
use super::model::{self, TERMS, Terms};
use super::shipped;
use super::structure::Structure;
use crate::{Arch, Plan};

/// The shortest lengths of the problems that are swept.
const SHORTEST: usize = 64;
/// On an architecture without times, a plan replaces the default if it is predicted to take less than this
/// share of the default's time.
const PREFERENCE: f64 = 0.9;
/// Rows with fewer plans do not show which plan is the fastest.
const LEAST_PLANS: usize = 4;
/// The weight of such a row in a fit of factors. In other rows, a plan that takes `n` times as long as the
/// fastest has the weight `1 / n²`: slow plans are not chosen, however well their times are predicted.
const ALONE: f64 = 0.3;
/// The packings of each plan.
const PACKINGS: [Packing; 2] = [Packing::Apart, Packing::Packed];

/// Factors without measured times, towards which a fit is pulled a little: of DRAM that delivers keys again,
/// by its rate; of other terms, a small part of the time.
const NEAR: Terms =
    [1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.45, 1.0, 0.45];
/// The weight of that pull.
const PULL: f64 = 0.003;

/// The factors of a family's plans ([`Sweep::families`]).
const FAMILIES: [(&str, Terms); 4] = [
    (
        "mma",
        [
            1.435, 0.0, 0.158, 1.366, 0.76, 0.232, 0.086, 0.339, 0.578, 0.3, 0.09, 0.3, 0.3, 0.007, 0.3,
            1.118, 0.044, 0.73,
        ],
    ),
    (
        "wgmma",
        [
            2.096, 0.0, 0.05, 0.282, 0.638, 0.0, 0.186, 0.102, 0.3, 0.3, 0.637, 0.511, 1.258, 0.3, 0.214,
            0.0, 1.0, 0.699,
        ],
    ),
    (
        "small_streamed",
        [
            0.825, 0.48, 0.227, 0.157, 0.935, 0.0, 0.089, 0.347, 0.3, 0.348, 0.87, 0.3, 0.3, 0.3, 0.014,
            0.72, 0.782, 0.649,
        ],
    ),
    (
        "small_at_once",
        [
            0.908, 0.356, 0.356, 0.428, 0.364, 0.121, 0.121, 0.356, 0.3, 0.385, 0.556, 0.3, 0.3, 0.479,
            0.315, 0.555, 1.0, 0.555,
        ],
    ),
];

/// A line of a table of sweeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SweepLine {
    Plans(SweptPlans),
    Times(SweptTimes),
}

/// Plans for a head dim on a device. The times of the lines that follow are theirs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweptPlans {
    pub device: String,
    pub sm: u32,
    pub multiprocessors: u32,
    pub head_dim: usize,
    pub plans: Vec<Plan>,
}

/// The times of all plans on a problem in bf16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweptTimes {
    /// Batch, query heads, KV heads, queries, keys.
    pub extents: [usize; 5],
    pub mask: Band,
    /// µs of each plan, with the heads of a group apart and packed. `None` where that was not measured.
    pub us: Vec<[Option<f64>; 2]>,
    /// The weights of these times in corrections (`Sweep::weighed`). Empty for times without an influence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<[f64; 2]>,
    pub commit: Option<String>,
    pub run: String,
}

/// An invalid line of a table of sweeps.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    #[error("line {0}: {1}")]
    Json(usize, serde_json::Error),
    #[error("line {0}: expected plans before times")]
    NoPlans(usize),
    #[error("line {line}: expected the times of {plans} plans, found {times}")]
    Count { line: usize, plans: usize, times: usize },
    #[error("line {0}: expected a valid problem and finite times above 0")]
    Invalid(usize),
}

/// The rows of a table of sweeps.
#[derive(Debug, Default)]
pub struct Sweep {
    groups: Vec<Group>,
    /// The covariance of the errors of two plans. The plans of all groups are numbered in order.
    common: Vec<Vec<f64>>,
}

/// The plans of a device and a head dim, and their times.
#[derive(Debug)]
struct Group {
    stated: SweptPlans,
    /// Number of the first plan.
    first: usize,
    rows: Vec<Measured>,
}

/// A measured problem.
#[derive(Debug)]
struct Measured {
    problem: Problem,
    place: FeaturePlace,
    times: SweptTimes,
}

/// A plan, and its predicted time on a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The plan, adapted to the problem but not checked.
    pub plan: Plan,
    /// µs.
    pub us: f64,
}

/// A measured problem whose plan is chosen without its own times.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldBack {
    pub problem: Problem,
    /// The chosen plan, its predicted and its measured time, and the shortest measured time, µs.
    pub plan: Plan,
    pub predicted: f64,
    pub us: f64,
    pub best: f64,
}

/// A measured time of a table: its row, the number and the packing of its plan, and the predicted time.
struct Time {
    group: usize,
    row: usize,
    plan: usize,
    packing: usize,
    us: f64,
    estimate: f64,
}

/// Predicts times of plans on one problem.
#[derive(Debug)]
pub(super) struct Predictor<'a> {
    sweep: &'a Sweep,
    group: &'a Group,
    problem: &'a Problem,
    arch: Arch,
    /// The weights of each plan's errors, times what their problems have in common with this one. Empty on an
    /// architecture without times.
    sums: Vec<[f64; 2]>,
}

impl Sweep {
    /// The shipped rows.
    pub fn builtin() -> &'static Sweep {
        static SWEEP: OnceLock<Sweep> = OnceLock::new();
        SWEEP.get_or_init(|| Sweep::parse(&shipped::SWEEP.text()).unwrap_or_default())
    }

    /// Reads a table.
    ///
    /// # Errors
    /// The first invalid line.
    pub fn parse(text: &str) -> Result<Sweep, SweepError> {
        let (mut groups, mut first) = (Vec::<Group>::new(), 0);
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let number = index + 1;
            match serde_json::from_str(line).map_err(|error| SweepError::Json(number, error))? {
                SweepLine::Plans(stated) => {
                    let plans = stated.plans.len();
                    groups.push(Group { stated, first, rows: Vec::new() });
                    first += plans;
                }
                SweepLine::Times(times) => {
                    let group = groups.last_mut().ok_or(SweepError::NoPlans(number))?;
                    group.rows.push(group.stated.measured(times, number)?);
                }
            }
        }
        let plans: Vec<&Plan> = groups.iter().flat_map(|group| &group.stated.plans).collect();
        let of = |plan: &&Plan| plans.iter().map(|other| correction::of_plans(plan, other)).collect();
        let common = plans.iter().map(of).collect();
        Ok(Sweep { groups, common })
    }

    /// The swept plans with their predicted times on the problem, the fastest first. Empty if problems like
    /// this were not swept: with other features, types, masks or head dims, or with few rows or keys. On an
    /// architecture without times, these are the plans that every architecture has, and the default.
    pub fn predict(&self, problem: &Problem, device: &Device) -> Vec<Prediction> {
        self.predictor(problem, device).map_or_else(Vec::new, |predictor| predictor.swept())
    }

    pub(super) fn predictor<'a>(&'a self, problem: &'a Problem, device: &Device) -> Option<Predictor<'a>> {
        if !is_swept(problem) {
            return None;
        }
        let mut of_dim = self.groups.iter().filter(|group| group.stated.head_dim == problem.head_dim);
        let elsewhere = of_dim.clone().next()?;
        let here = of_dim.find(|group| group.stated.sm == device.arch.sm);
        let sums = here.map_or_else(Vec::new, |_| self.sums(problem, &device.arch));
        Some(Predictor { sweep: self, group: here.unwrap_or(elsewhere), problem, arch: device.arch, sums })
    }

    fn sums(&self, problem: &Problem, arch: &Arch) -> Vec<[f64; 2]> {
        let place = correction::place(problem, arch);
        let mut sums = vec![[0.0; 2]; self.common.len()];
        for group in self.groups.iter().filter(|group| group.stated.sm == arch.sm) {
            for row in &group.rows {
                let common = correction::of_places(&row.place, &place);
                for (sum, weights) in sums[group.first..].iter_mut().zip(&row.times.weights) {
                    (0..2).for_each(|packing| sum[packing] += common * weights[packing]);
                }
            }
        }
        sums
    }

    /// The lines of the table, with the weights of all times.
    pub fn weighed(&self) -> Vec<SweepLine> {
        let (times, errors) = self.errors(&FAMILIES);
        let mut lines = Vec::new();
        let mut weights = times.iter().zip(errors.weights()).peekable();
        for (number, group) in self.groups.iter().enumerate() {
            lines.push(SweepLine::Plans(group.stated.clone()));
            for (row, measured) in group.rows.iter().enumerate() {
                let mut line = SweptTimes {
                    weights: vec![[0.0; 2]; group.stated.plans.len()],
                    ..measured.times.clone()
                };
                while let Some((time, weight)) =
                    weights.next_if(|(time, _)| (time.group, time.row) == (number, row))
                {
                    line.weights[time.plan - group.first][time.packing] = (weight * 1e3).round() / 1e3;
                }
                lines.push(SweepLine::Times(line));
            }
        }
        lines
    }

    /// The choice for each measured problem by the times of all other problems (leave one out), among the
    /// plans that were measured. The factors are those of all problems.
    pub fn held_back(&self) -> Vec<HeldBack> {
        let (times, errors) = self.errors(&FAMILIES);
        let weights = errors.weights();
        let of = |problem: &Vec<usize>| self.chosen(&times, problem, &errors.left_out(problem, &weights));
        self.problems(&times).iter().filter_map(of).collect()
    }

    /// Like [`Sweep::held_back`], but of each fold of the problems, neither factors nor errors are known.
    pub fn folds(&self, folds: usize) -> Vec<HeldBack> {
        let mut all = Vec::new();
        for fold in 0..folds {
            let problems = self.problems(&self.errors(&FAMILIES).0);
            let is_out = |number: usize| number % folds == fold;
            let out: Vec<Vec<usize>> = problems
                .into_iter()
                .enumerate()
                .filter(|(number, _)| is_out(*number))
                .map(|(_, at)| at)
                .collect();
            let some = out.concat();
            let (times, errors) = self.errors(&self.fitted(&some));
            let corrections = errors.left_out(&some, &errors.weights());
            let mut rest = &corrections[..];
            for problem in &out {
                let (own, others) = rest.split_at(problem.len());
                rest = others;
                all.extend(self.chosen(&times, problem, own));
            }
        }
        all
    }

    /// The indices of the times of each problem.
    fn problems(&self, times: &[Time]) -> Vec<Vec<usize>> {
        let problem = |time: &Time| &self.groups[time.group].rows[time.row].problem;
        let mut end = 0;
        let of = |times: &[Time]| {
            end += times.len();
            (end - times.len()..end).collect()
        };
        times.chunk_by(|a, b| a.group == b.group && problem(a) == problem(b)).map(of).collect()
    }

    /// The choice for a problem with some times, each of which has a correction. `None` with few plans.
    fn chosen(&self, times: &[Time], problem: &[usize], corrections: &[f64]) -> Option<HeldBack> {
        let times: Vec<&Time> = problem.iter().map(|&at| &times[at]).collect();
        // A plan may have several times, of several runs.
        let plans: HashSet<_> = times.iter().map(|time| (time.plan, time.packing)).collect();
        if plans.len() < LEAST_PLANS {
            return None;
        }
        let predicted =
            times.iter().zip(corrections).map(|(time, error)| (time, time.estimate * error.exp()));
        let (time, predicted) = predicted.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let group = &self.groups[time.group];
        let problem = group.rows[time.row].problem.clone();
        let plan = packed(&group.stated.plans[time.plan - group.first], PACKINGS[time.packing], &problem)?;
        let best = times.iter().map(|time| time.us).fold(f64::INFINITY, f64::min);
        Some(HeldBack { problem, plan, predicted, us: time.us, best })
    }

    /// All measured times, and their errors, by the factors of the families.
    fn errors(&self, families: &[(&'static str, Terms)]) -> (Vec<Time>, Errors) {
        let mut times = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            for (row, plan, packing, at, us) in group.times() {
                let problem = &group.rows[row].problem;
                let terms = model::terms(&at, problem, &group.arch());
                let estimate = model::time(&terms, &factors_of(families, &group.stated.plans[plan]));
                times.push(Time { group: number, row, plan: group.first + plan, packing, us, estimate });
            }
        }
        let place = |time: &Time| &self.groups[time.group].rows[time.row].place;
        let errors = times.iter().map(|time| (time.us / time.estimate).ln()).collect();
        let errors = Errors::new(errors, |i, j| {
            let (a, b) = (&times[i], &times[j]);
            let of_plans = self.common[a.plan][b.plan] * correction::of_packings(a.packing, b.packing);
            correction::of_places(place(a), place(b)) * of_plans
        });
        (times, errors)
    }

    /// The factors of each family that fit all times best.
    pub fn families(&self) -> Vec<(&'static str, Terms)> {
        self.fitted(&[])
    }

    /// The factors of each family that fit all times best but those with some indices.
    fn fitted(&self, without: &[usize]) -> Vec<(&'static str, Terms)> {
        let (mut number, mut measured) = (0, vec![Vec::new(); FAMILIES.len()]);
        for group in &self.groups {
            for (row, plan, _, at, us) in group.times() {
                let Measured { problem, times, .. } = &group.rows[row];
                let best = times.measured().fold(f64::INFINITY, f64::min);
                let weight = if times.measured().count() < LEAST_PLANS { ALONE } else { (best / us).powi(2) };
                let family = group.stated.plans[plan].family();
                let of = FAMILIES.iter().position(|(name, _)| *name == family);
                if let Some(of) = of.filter(|_| !without.contains(&number)) {
                    measured[of].push((model::terms(&at, problem, &group.arch()), us, weight));
                }
                number += 1;
            }
        }
        let fit =
            |(family, times): (&(&'static str, Terms), Vec<_>)| (family.0, model::fit(&times, &NEAR, PULL));
        FAMILIES.iter().zip(measured).map(fit).collect()
    }
}

impl SweptTimes {
    fn measured(&self) -> impl Iterator<Item = f64> + '_ {
        self.us.iter().flatten().flatten().copied()
    }
}

impl Predictor<'_> {
    /// The swept plans, the fastest first.
    pub fn swept(&self) -> Vec<Prediction> {
        let mut all = Vec::new();
        for (index, base) in self.group.stated.plans.iter().enumerate() {
            let is_here = !self.sums.is_empty();
            if !is_here && !matches!(base, Plan::Mma(_)) {
                continue;
            }
            for (packing, gene) in PACKINGS.into_iter().enumerate() {
                let Some(plan) = packed(base, gene, self.problem) else { continue };
                let Some(us) = estimate(&plan, self.problem, &self.arch) else { continue };
                let error = self.error(packing, &self.sweep.common[self.group.first + index]);
                all.push(Prediction { plan, us: us * error.exp() });
            }
        }
        if self.sums.is_empty()
            && let Ok(plan) = Plan::default_for(self.problem, &self.arch)
            && let Some(us) = estimate(&plan, self.problem, &self.arch)
        {
            all.push(Prediction { plan, us: us * PREFERENCE });
        }
        all.sort_by(|a, b| a.us.total_cmp(&b.us));
        all
    }

    /// The predicted time of another plan, µs.
    pub fn us(&self, plan: &Plan) -> Option<f64> {
        let us = estimate(plan, self.problem, &self.arch)?;
        let base = packed(plan, Packing::Apart, self.problem)?;
        let packing = usize::from(base != *plan);
        let others = self.sweep.groups.iter().flat_map(|group| &group.stated.plans);
        let common: Vec<f64> = others.map(|other| correction::of_plans(&base, other)).collect();
        Some(us * self.error(packing, &common).exp())
    }

    /// The error of a plan, which has `common` in common with the errors of the swept plans.
    fn error(&self, packing: usize, common: &[f64]) -> f64 {
        let of = |(common, sums): (&f64, &[f64; 2])| {
            let all = (0..2).map(|other| correction::of_packings(packing, other) * sums[other]);
            common * all.sum::<f64>()
        };
        common.iter().zip(&self.sums).map(of).sum()
    }
}

/// Whether problems of this kind are swept.
fn is_swept(problem: &Problem) -> bool {
    let band = problem.band.simplified(problem.seq_q, problem.seq_kv);
    let masked = band == Band::FULL || band == Band::CAUSAL;
    let halves = problem.dtypes.one().is_some_and(|dtype| [DType::F16, DType::Bf16].contains(&dtype));
    let plain = problem.programs.is_empty() && problem.storage.pages().is_none() && problem.lengths.is_even();
    let forward = !problem.pass.is_backward() && problem.head_dim == problem.head_dim_v;
    masked && halves && plain && forward && problem.seq_q.min(problem.seq_kv) >= SHORTEST
}

impl SweptPlans {
    fn measured(&self, times: SweptTimes, line: usize) -> Result<Measured, SweepError> {
        let plans = self.plans.len();
        for found in [times.us.len(), times.weights.len()] {
            if found != plans && (found != 0 || times.us.is_empty()) {
                return Err(SweepError::Count { line, plans, times: found });
            }
        }
        let [batch, heads, heads_kv, seq_q, seq_kv] = times.extents;
        let problem = Problem::new(batch, heads, seq_q, self.head_dim, DType::Bf16).with_band(times.mask);
        let problem = Problem { heads_kv, seq_kv, ..problem }.with_layout(Layout::Bhsd);
        let are_weights = times.weights.iter().flatten().all(|weight| weight.is_finite());
        if problem.check().is_err() || !times.measured().all(|us| us.is_finite() && us > 0.0) || !are_weights
        {
            return Err(SweepError::Invalid(line));
        }
        Ok(Measured { place: correction::place(&problem, &self.arch()), problem, times })
    }

    fn arch(&self) -> Arch {
        let arch = Arch::of(self.sm).unwrap_or(Arch::SM_90);
        Arch { multiprocessors: self.multiprocessors, ..arch }
    }
}

impl Group {
    fn arch(&self) -> Arch {
        self.stated.arch()
    }

    /// The row, plan, packing, structure and µs of each measured time.
    fn times(&self) -> impl Iterator<Item = (usize, usize, usize, Structure, f64)> + '_ {
        let arch = self.arch();
        self.rows.iter().enumerate().flat_map(move |(row, Measured { problem, times, .. })| {
            times.us.iter().enumerate().flat_map(move |(plan, us)| {
                (0..2).filter_map(move |packing| {
                    let base = packed(&self.stated.plans[plan], PACKINGS[packing], problem)?;
                    Some((row, plan, packing, Structure::of(&base, problem, &arch)?, us[packing]?))
                })
            })
        })
    }
}

/// The factors of a plan's family.
fn factors_of(families: &[(&'static str, Terms)], plan: &Plan) -> Terms {
    let of = families.iter().find(|(family, _)| *family == plan.family());
    of.map_or([1.0; TERMS], |(_, factors)| *factors)
}

/// The time of a plan by the factors of its family, µs.
fn estimate(plan: &Plan, problem: &Problem, arch: &Arch) -> Option<f64> {
    let structure = Structure::of(plan, problem, arch)?;
    Some(model::time(&model::terms(&structure, problem, arch), &factors_of(&FAMILIES, plan)))
}

/// The plan with the heads of a group apart and packed, adapted to the problem. `None` where the plan or the
/// problem has no such packing, or the plan does not fit.
pub fn packings(plan: &Plan, problem: &Problem, arch: &Arch) -> [Option<Plan>; 2] {
    PACKINGS.map(|packing| adapted(&packed(plan, packing, problem)?, problem, arch))
}

/// A swept plan as a problem gets it. `None` if it does not fit.
pub fn adapted(plan: &Plan, problem: &Problem, arch: &Arch) -> Option<Plan> {
    let plan = plan.clone().adapted(problem, arch, true);
    plan.check(problem, arch).is_ok().then_some(plan)
}

/// The plan with a packing; `None` if the plan or the problem has none.
fn packed(plan: &Plan, packing: Packing, problem: &Problem) -> Option<Plan> {
    let mut plan = plan.clone();
    let gene = match &mut plan {
        Plan::Wgmma(plan) => &mut plan.packing,
        Plan::SmallStreamed(plan) => &mut plan.packing,
        Plan::SmallAtOnce(plan) => &mut plan.packing,
        _ => return (packing == Packing::Apart).then_some(plan),
    };
    *gene = packing;
    (packing == Packing::Apart || problem.group_size() > 1).then_some(plan)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Family;

    const H200: Device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };

    fn problem(batch: usize, heads: [usize; 2], seq: [usize; 2], mask: Band) -> Problem {
        let problem = Problem::new(batch, heads[0], seq[0], 128, DType::Bf16).with_band(mask);
        Problem { heads_kv: heads[1], seq_kv: seq[1], ..problem }.with_layout(Layout::Bhsd)
    }

    fn problems() -> Vec<Problem> {
        let sizes = [(1, 300), (2, 700), (3, 1500), (5, 2500), (1, 6000), (7, 100), (4, 4000), (2, 9000)];
        let of = |mask| {
            sizes.into_iter().flat_map(move |(batch, seq)| {
                [[8, 8], [12, 3]].map(|heads| problem(batch, heads, [seq, seq + seq / 3], mask))
            })
        };
        [Band::FULL, Band::CAUSAL].into_iter().flat_map(of).collect()
    }

    fn plans() -> Vec<Plan> {
        let problem = problem(4, [16, 16], [4096, 4096], Band::FULL);
        [Family::Mma, Family::Wgmma, Family::SmallStreamed]
            .map(|family| family.proposal(&problem, &H200.arch))
            .to_vec()
    }

    /// The index of a plan that is slower than others of its family.
    const SLOW: usize = 1;

    /// A table of times as the factors of the families give them. The times of one plan are `slow` times as
    /// long.
    fn table(slow: f64) -> String {
        let plans = plans();
        let stated = SweptPlans {
            device: "NVIDIA H200".into(),
            sm: 90,
            multiprocessors: 132,
            head_dim: 128,
            plans: plans.clone(),
        };
        let mut lines = vec![json!(SweepLine::Plans(stated)).to_string()];
        for p in problems() {
            let of = |index: usize, packing| {
                let us = estimate(&packed(&plans[index], packing, &p)?, &p, &H200.arch)?;
                Some(if index == SLOW { slow * us } else { us })
            };
            let us = (0..plans.len()).map(|index| PACKINGS.map(|packing| of(index, packing))).collect();
            let extents = [p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv];
            let times =
                SweptTimes { extents, mask: p.band, us, weights: Vec::new(), commit: None, run: "0".into() };
            lines.push(json!(SweepLine::Times(times)).to_string());
        }
        let sweep = Sweep::parse(&lines.join("\n")).unwrap();
        sweep.weighed().iter().map(|line| json!(line).to_string() + "\n").collect()
    }

    /// All times of a plan are twice those of its family, and the predictions of the plan follow.
    #[test]
    fn errors_at_near_problems_correct_predictions() {
        let sweep = Sweep::parse(&table(2.0)).unwrap();
        let other = problem(3, [12, 3], [1600, 2100], Band::CAUSAL);
        let found = sweep.predict(&other, &H200);
        assert_eq!(found.len(), 1 + 2 + 2, "only two of the families pack heads");
        assert!(found.is_sorted_by(|a, b| a.us <= b.us));
        for prediction in &found {
            let error = prediction.us / estimate(&prediction.plan, &other, &H200.arch).unwrap();
            let is_slow = prediction.plan.family() == plans()[SLOW].family();
            assert!(if is_slow { error > 1.6 } else { (0.95..1.05).contains(&error) }, "{error}");
        }
        let held_back = sweep.held_back();
        assert_eq!(held_back.len(), problems().len() / 2, "three plans are too few to show the fastest");
        // Packed and apart, a plan may take equal times but for some hundredths of a percent.
        assert!(held_back.iter().all(|held| held.us < 1.001 * held.best), "{held_back:?}");
        let folds = sweep.folds(4);
        assert_eq!(folds.len(), held_back.len());
        assert!(folds.iter().all(|held| held.us < 1.1 * held.best), "{folds:?}");
    }

    #[test]
    fn other_problems_are_not_predicted() {
        let sweep = Sweep::parse(&table(1.0)).unwrap();
        let swept = problem(2, [8, 8], [500, 500], Band::FULL);
        let count = |problem: &Problem, device: &Device| sweep.predict(problem, device).len();
        assert_eq!(count(&swept, &H200), plans().len());
        assert_eq!(count(&swept.clone().with_dtypes(DType::F16.into()), &H200), plans().len());
        for other in [
            Problem::new(2, 8, 500, 64, DType::Bf16),
            swept.clone().with_dtypes(DType::F32.into()),
            swept.clone().with_band(Band::window(100, 0)),
            problem(2, [8, 8], [1, 500], Band::FULL),
        ] {
            assert_eq!(count(&other, &H200), 0, "{other:?}");
        }
    }

    /// Without times, an architecture gets a plan that every architecture has, or the default.
    #[test]
    fn another_architecture_has_predictions() {
        let sweep = Sweep::parse(&table(1.0)).unwrap();
        for arch in [Arch::SM_80, Arch::SM_89, Arch::SM_120] {
            for seq in [100, 3000] {
                let problem = problem(2, [8, 8], [seq, seq], Band::CAUSAL);
                let found = sweep.predict(&problem, &Device { name: "any", arch });
                assert_eq!(found.len(), 2);
                assert!(found.iter().all(|prediction| prediction.plan.family() == "mma"));
                let default = Plan::default_for(&problem, &arch).unwrap();
                assert!(found.iter().any(|prediction| prediction.plan == default));
            }
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = table(1.0);
        let (plans, times) = good.split_once('\n').unwrap();
        for (text, message) in [
            (times.to_owned(), "line 1: expected plans before times"),
            (format!("{plans}\n{{}}"), "line 2: "),
            (
                format!("{plans}\n\n{}", times.replacen("\"us\":[[", "\"us\":[[1.0,1.0],[", 1)),
                "line 3: expected the times of 3",
            ),
            (good.replacen("\"us\":[[", "\"us\":[[-", 1), "line 2: expected a valid problem"),
        ] {
            let error = Sweep::parse(&text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
