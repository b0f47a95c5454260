//! Plans whose times on many random problems were measured (`cargo xtask measure tune --sweep`), and the
//! prediction of their times on other problems.

use std::sync::OnceLock;

use attend::Packing;
use problem::{Band, DType, Layout, Problem};
use serde::{Deserialize, Serialize};

use super::Device;
use super::model::{self, TERMS, Terms};
use super::structure::Structure;
use crate::forward::mma::MmaPlan;
use crate::forward::small::{AtOncePlan, StreamedPlan};
use crate::forward::wgmma::WgmmaPlan;
use crate::{Arch, Plan};

/// The weight of the assumption that a prediction has no error, against the errors at near problems. The error of a plan
/// at a problem at distance 1 has the weight 1 / e.
const DOUBT: f64 = 0.6;
/// The weights of the errors of another plan: with the same tiles, and of the same family.
const ALIKE: f64 = 0.3;
const OF_FAMILY: f64 = 0.05;
/// The shortest lengths of the problems that are swept.
const SHORTEST: usize = 64;
/// On an architecture without times, a plan replaces the default if it is predicted to take less than this
/// share of the default's time.
const PREFERENCE: f64 = 0.9;
/// Rows with fewer plans do not show which plan is the fastest.
const LEAST_PLANS: usize = 4;
/// The packings of each plan.
const PACKINGS: [Packing; 2] = [Packing::Apart, Packing::Packed];

/// The factors of a family's plans, fitted to the swept problems, to the tuned table and to `evidence/h200.jsonl`.
const FAMILIES: [(&str, Terms); 4] = [
    ("mma", [1.426, 0.094, 0.462, 0.639, 0.0, 0.877, 0.365, 0.389, 0.853, 0.0, 0.307]),
    ("wgmma", [2.615, 0.0, 0.092, 0.412, 0.503, 0.468, 0.161, 0.038, 0.0, 0.0, 0.766]),
    ("small_streamed", [1.494, 0.196, 0.0, 0.663, 0.821, 0.308, 0.151, 0.119, 0.0, 0.758, 0.981]),
    ("small_at_once", [1.385, 0.0, 0.0, 0.922, 0.0, 0.0, 0.696, 0.0, 0.0, 0.732, 0.966]),
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
}

/// The plans of a device and a head dim, and their times.
#[derive(Debug)]
struct Group {
    stated: SweptPlans,
    rows: Vec<Measured>,
    /// How much the errors of a plan say about another one.
    weights: Vec<Vec<f64>>,
    /// For problems without a mask, and with a causal one.
    errors: [OnceLock<Vec<RowErrors>>; 2],
}

/// A measured problem, with the times of [`SweptTimes`].
#[derive(Debug)]
struct Measured {
    problem: Problem,
    us: Vec<[Option<f64>; 2]>,
}

/// The logarithms of a row's times over the predicted times, of each plan and packing.
#[derive(Debug)]
struct RowErrors {
    row: usize,
    place: Place,
    of_plans: Vec<[Option<f64>; 2]>,
}

/// The place of a problem, in powers of two.
type Place = [f64; 4];

/// A measured plan, and its predicted time on a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The plan, adapted to the problem but not checked.
    pub plan: Plan,
    /// µs.
    pub us: f64,
    /// Index of the plan in its line, and of the packing.
    index: [usize; 2],
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

impl Sweep {
    /// The shipped rows.
    pub fn builtin() -> &'static Sweep {
        static SWEEP: OnceLock<Sweep> = OnceLock::new();
        SWEEP.get_or_init(|| Sweep::parse(include_str!("../../tuned/sweep.jsonl")).unwrap_or_default())
    }

    /// Reads a table.
    ///
    /// # Errors
    /// The first invalid line.
    pub fn parse(text: &str) -> Result<Sweep, SweepError> {
        let mut groups: Vec<Group> = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let number = index + 1;
            match serde_json::from_str(line).map_err(|error| SweepError::Json(number, error))? {
                SweepLine::Plans(stated) => {
                    groups.push(Group::new(stated));
                }
                SweepLine::Times(times) => {
                    let group = groups.last_mut().ok_or(SweepError::NoPlans(number))?;
                    group.rows.push(group.stated.measured(times, number)?);
                }
            }
        }
        Ok(Sweep { groups })
    }

    /// The swept plans with their predicted times on the problem, the fastest first. Empty if problems like
    /// this were not swept: with other features, types, masks or head dims, or with few rows or keys. On an
    /// architecture without times, these are the plans that every architecture has, and the default.
    pub fn predict(&self, problem: &Problem, device: &Device) -> Vec<Prediction> {
        if !is_swept(problem) {
            return Vec::new();
        }
        let mut of_dim =
            self.groups.iter().filter(|group| group.stated.head_dim == problem.head_dim).peekable();
        let elsewhere = of_dim.peek().copied();
        let here = of_dim.find(|group| group.stated.sm == device.arch.sm);
        let here = here.map(|group| group.predict(problem, &device.arch));
        here.or_else(|| Some(elsewhere?.predict_elsewhere(problem, &device.arch))).unwrap_or_default()
    }

    /// The choice for each measured problem without its own times (leave one out), among the plans that were
    /// measured.
    pub fn held_back(&self) -> Vec<HeldBack> {
        self.groups
            .iter()
            .flat_map(|group| (0..group.rows.len()).filter_map(|row| group.held_back(row)))
            .collect()
    }

    /// The factors of each family that fit all rows best.
    pub fn families(&self) -> Vec<(&'static str, Terms)> {
        let of = |&(family, near): &(&'static str, Terms)| {
            let all = self.groups.iter().flat_map(|group| group.times(family));
            (family, model::fit(&all.collect::<Vec<_>>(), &near, 0.01))
        };
        FAMILIES.iter().map(of).collect()
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
        if times.us.len() != self.plans.len() {
            return Err(SweepError::Count { line, plans: self.plans.len(), times: times.us.len() });
        }
        let [batch, heads, heads_kv, seq_q, seq_kv] = times.extents;
        let problem = Problem::new(batch, heads, seq_q, self.head_dim, DType::Bf16).with_band(times.mask);
        let problem = Problem { heads_kv, seq_kv, ..problem }.with_layout(Layout::Bhsd);
        let measured = times.us.iter().flatten().flatten();
        if problem.check().is_err() || !measured.clone().all(|us| us.is_finite() && *us > 0.0) {
            return Err(SweepError::Invalid(line));
        }
        Ok(Measured { problem, us: times.us })
    }
}

impl Group {
    fn new(stated: SweptPlans) -> Group {
        let of = |plan: &Plan| stated.plans.iter().map(|other| likeness(plan, other)).collect();
        let weights = stated.plans.iter().map(of).collect();
        Group { stated, rows: Vec::new(), weights, errors: Default::default() }
    }

    fn predict(&self, problem: &Problem, arch: &Arch) -> Vec<Prediction> {
        self.without(None, problem, arch)
    }

    /// The predictions on another architecture: of the plans of the family that every architecture has, with
    /// their factors, and of the default. The default is preferred to plans that are hardly faster.
    fn predict_elsewhere(&self, problem: &Problem, arch: &Arch) -> Vec<Prediction> {
        let mut all = self.predict(problem, arch);
        all.retain(|prediction| matches!(prediction.plan, Plan::Mma(_)));
        if let Ok(plan) = Plan::default_for(problem, arch)
            && let Some(structure) = Structure::of(&plan, problem, arch)
        {
            let us =
                model::time(&model::terms(&structure, problem, arch), &family_factors(&plan)) * PREFERENCE;
            all.push(Prediction { plan, us, index: [usize::MAX; 2] });
        }
        all.sort_by(|a, b| a.us.total_cmp(&b.us));
        all
    }

    /// The predictions of all plans, the fastest first, without the times of a row.
    fn without(&self, row: Option<usize>, problem: &Problem, arch: &Arch) -> Vec<Prediction> {
        let (mut sums, mut counts) = (vec![0.0; self.stated.plans.len()], vec![0.0; self.stated.plans.len()]);
        let here = place(problem, arch);
        for errors in self.errors(problem.band.is_causal()).iter().filter(|errors| Some(errors.row) != row) {
            let apart: f64 = errors.place.iter().zip(&here).map(|(a, b)| (a - b) * (a - b)).sum();
            let weight = (-apart).exp();
            for (index, of_plan) in errors.of_plans.iter().enumerate() {
                for error in of_plan.iter().flatten() {
                    sums[index] += weight * error;
                    counts[index] += weight;
                }
            }
        }
        let mut all = Vec::new();
        for (index, (base, weights)) in self.stated.plans.iter().zip(&self.weights).enumerate() {
            let weighted =
                |of: &[f64]| -> f64 { weights.iter().zip(of).map(|(weight, of)| weight * of).sum() };
            let error = weighted(&sums) / (DOUBT + weighted(&counts));
            for (at, packing) in PACKINGS.into_iter().enumerate() {
                let Some(plan) = packed(base, packing, problem) else { continue };
                let Some(us) = estimate(&plan, problem, arch) else { continue };
                all.push(Prediction { plan, us: us * error.exp(), index: [index, at] });
            }
        }
        all.sort_by(|a, b| a.us.total_cmp(&b.us));
        all
    }

    /// The errors of the rows of a mask.
    fn errors(&self, causal: bool) -> &[RowErrors] {
        self.errors[usize::from(causal)].get_or_init(|| {
            let arch = self.arch();
            let rows = self.rows.iter().enumerate();
            let of_mask = rows.filter(|(_, measured)| measured.problem.band.is_causal() == causal);
            let of_row = |(row, Measured { problem, us }): (usize, &Measured)| {
                let error = |plan: &Plan, packing: usize, us: Option<f64>| {
                    let plan = packed(plan, PACKINGS[packing], problem)?;
                    Some((us? / estimate(&plan, problem, &arch)?).ln())
                };
                let of_plan =
                    |(plan, us): (&Plan, &[Option<f64>; 2])| [0, 1].map(|at| error(plan, at, us[at]));
                let of_plans = self.stated.plans.iter().zip(us).map(of_plan).collect();
                RowErrors { row, place: place(problem, &arch), of_plans }
            };
            of_mask.map(of_row).collect()
        })
    }

    /// The terms and times of a family's plans.
    fn times(&self, family: &str) -> Vec<(Terms, f64)> {
        let arch = self.arch();
        let mut all = Vec::new();
        for Measured { problem, us } in &self.rows {
            for (plan, us) in self.stated.plans.iter().zip(us).filter(|(plan, _)| plan.family() == family) {
                for (packing, us) in PACKINGS.into_iter().zip(us) {
                    let plan = packed(plan, packing, problem);
                    let structure = plan.and_then(|plan| Structure::of(&plan, problem, &arch));
                    all.extend(structure.map(|at| model::terms(&at, problem, &arch)).zip(*us));
                }
            }
        }
        all
    }

    fn held_back(&self, row: usize) -> Option<HeldBack> {
        let Measured { problem, us } = &self.rows[row];
        if us.iter().flatten().flatten().count() < LEAST_PLANS {
            return None;
        }
        let of = |prediction: &Prediction| us[prediction.index[0]][prediction.index[1]];
        let all = self.without(Some(row), problem, &self.arch());
        let chosen = all.iter().find(|prediction| of(prediction).is_some())?;
        let best = us.iter().flatten().flatten().copied().fold(f64::INFINITY, f64::min);
        Some(HeldBack {
            problem: problem.clone(),
            plan: chosen.plan.clone(),
            predicted: chosen.us,
            us: of(chosen)?,
            best,
        })
    }

    fn arch(&self) -> Arch {
        let arch = Arch::of(self.stated.sm).unwrap_or(Arch::SM_90);
        Arch { multiprocessors: self.stated.multiprocessors, ..arch }
    }
}

/// The factors of a plan's family.
fn family_factors(plan: &Plan) -> Terms {
    let of = FAMILIES.iter().find(|(family, _)| *family == plan.family());
    of.map_or([1.0; TERMS], |(_, factors)| *factors)
}

/// The time of a plan by the factors of its family, µs.
pub(super) fn estimate(plan: &Plan, problem: &Problem, arch: &Arch) -> Option<f64> {
    let structure = Structure::of(plan, problem, arch)?;
    Some(model::time(&model::terms(&structure, problem, arch), &family_factors(plan)))
}

/// How much the errors of one plan say about another one.
fn likeness(plan: &Plan, other: &Plan) -> f64 {
    let alike = match (plan, other) {
        _ if plan == other => return 1.0,
        (Plan::Wgmma(a), Plan::Wgmma(b)) => {
            let tile = |p: &WgmmaPlan| (p.consumers, p.resident_ctas, p.block_n, p.handout, p.turns);
            tile(a) == tile(b)
        }
        (Plan::Mma(a), Plan::Mma(b)) => {
            let tile = |p: &MmaPlan| (p.block_m, p.block_n, p.warps, p.kv_warps);
            tile(a) == tile(b)
        }
        (Plan::SmallStreamed(a), Plan::SmallStreamed(b)) => {
            let tile =
                |p: &StreamedPlan| (p.row_warpgroups, p.cluster, p.kv_warpgroups, p.block_n, p.resident_ctas);
            tile(a) == tile(b)
        }
        (Plan::SmallAtOnce(a), Plan::SmallAtOnce(b)) => {
            let tile = |p: &AtOncePlan| (p.row_warpgroups, p.cluster, p.kv_warpgroups, p.block_n);
            tile(a) == tile(b)
        }
        _ => return 0.0,
    };
    if alike { ALIKE } else { OF_FAMILY }
}

/// Waves of tiles, keys, queries and heads of a group.
fn place(problem: &Problem, arch: &Arch) -> Place {
    let rows = problem.batch * problem.heads_q * problem.seq_q.div_ceil(64);
    let log = |number: usize| (number.max(1) as f64).log2();
    let waves = log(rows) - f64::from(arch.multiprocessors.max(1)).log2();
    [waves, 0.7 * log(problem.seq_kv), 0.5 * log(problem.seq_q), 0.5 * log(problem.group_size())]
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

    /// A table of times as the factors of the families give them. The times of one plan are `slow` times as long.
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
            let times = SweptTimes { extents, mask: p.band, us, commit: None, run: "0".into() };
            lines.push(json!(SweepLine::Times(times)).to_string());
        }
        lines.join("\n")
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
            let is_slow = prediction.index[0] == SLOW;
            assert!(
                if is_slow { (1.4..2.0).contains(&error) } else { (0.99..1.01).contains(&error) },
                "{error}"
            );
        }
        let held_back = sweep.held_back();
        assert_eq!(held_back.len(), problems().len() / 2, "three plans are too few to show the fastest");
        assert!(held_back.iter().all(|held| held.us == held.best), "{held_back:?}");
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
