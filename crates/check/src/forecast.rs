//! Forecasts of plans and their quality: a fixed set of plans of the fused family, split into calibration and
//! test, and the measures of a forecast's quality.

use attend::Order;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::{Arch, KernelError, Plan};
use predict::resources::{Ptxas, Resources, estimate};
use predict::{Gpu, ModelError, Prediction};
use problem::{Band, DType, Problem};
use ptx::{Kernel, Target};

use crate::gate::{Recorded, bind};
use crate::launchfile::Bound;
use crate::study::{self, RecordError};

/// Number of CTAs that are recorded when one head is run.
pub const RECORDED: u64 = 6;
/// Number of CTAs that are recorded for a whole grid of the Hopper families, in which CTAs take tiles from a
/// common sequence.
pub const SKETCHED: u64 = 4;

/// Why there is no forecast of a plan.
#[derive(Debug, thiserror::Error)]
pub enum ForecastError {
    /// The generator rejects the plan.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The machine cannot run the kernel.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The kernel's entry has no body.
    #[error("the kernel {entry} has no body")]
    NoBody {
        /// The kernel's name.
        entry: String,
    },
}

impl ForecastError {
    pub(crate) fn no_body(bound: &Bound) -> ForecastError {
        ForecastError::NoBody { entry: bound.kernel.entry.clone() }
    }
}

/// Predicts the time of a plan on a problem from a few CTAs. If each CTA does the same work in any grid, one
/// head is run; if persistent CTAs take tiles, the whole problem.
///
/// # Errors
/// When the plan yields no kernel, or the machine cannot run it.
pub fn of_plan(
    plan: &Plan,
    problem: &Problem,
    gpu: &Gpu,
    arch: &Arch,
    ptxas: Option<&Ptxas>,
) -> Result<Prediction, ForecastError> {
    let whole = bind(plan, problem, arch)?;
    let resources = resources(&whole, ptxas).ok_or_else(|| ForecastError::no_body(&whole))?;
    Ok(of_kernel(plan, problem, &whole, &resources, gpu, arch, 1)?.prediction)
}

/// A forecast and the recording behind it.
pub struct Basis {
    /// The time of all kernels.
    pub prediction: Prediction,
    /// The time of each kernel.
    pub steps: Vec<Prediction>,
    /// The program whose CTAs were recorded. It may cover one head instead of the whole problem.
    pub bound: Bound,
    /// The records of the kernels, in launch order.
    pub recorded: Vec<Recorded>,
}

/// Like [`of_plan`], for a program that has already been emitted, with `times` as many recorded CTAs.
/// `resources` are those of each kernel.
///
/// # Errors
/// As for [`of_plan`].
pub fn of_kernel(
    plan: &Plan,
    problem: &Problem,
    whole: &Bound,
    resources: &[Resources],
    gpu: &Gpu,
    arch: &Arch,
    times: u64,
) -> Result<Basis, ForecastError> {
    let (bound, recorded) = if plan.takes_tiles() {
        (whole.clone(), study::sketch(whole, SKETCHED * times)?)
    } else {
        let head = bind(plan, &one_head(problem), arch)?;
        let recorded = study::record(&head, RECORDED * times)?;
        (head, recorded)
    };
    let steps = study::forecast_steps(&bound, whole, &recorded, resources, gpu)?;
    let prediction = Prediction::in_a_row(&steps).ok_or_else(|| ForecastError::no_body(whole))?;
    Ok(Basis { prediction, steps, bound, recorded })
}

/// The problem of one query head and its keys, dense, with the programs and descale factors.
fn one_head(problem: &Problem) -> Problem {
    let (p, layout) = (problem, problem::Layout::Bhsd);
    let head = Problem::new(1, 1, p.seq_q, p.head_dim, p.dtypes).with_band(p.band);
    let programs = p.programs.clone();
    let scales = p.scales;
    Problem { seq_kv: p.seq_kv, head_dim_v: p.head_dim_v, programs, scales, ..head }.with_layout(layout)
}

/// Registers and shared memory of each kernel, from ptxas if it is present, else estimated. `None` if an
/// entry has no body.
pub fn resources(bound: &Bound, ptxas: Option<&Ptxas>) -> Option<Vec<Resources>> {
    let text = bound.kernel.module.to_string();
    let of_step = |kernel: &Kernel| {
        let assembled = ptxas.and_then(|p| p.resources(&text, &target(bound), &kernel.entry).ok());
        assembled.or_else(|| estimate(&kernel.module, &kernel.entry))
    };
    bound.steps().map(of_step).collect()
}

/// ptxas's name of the kernel's architecture.
pub fn target(bound: &Bound) -> String {
    Target::of_device(bound.kernel.module.target.sm).to_string()
}

/// A plan on a problem, from the fixed set on which forecasts are tested.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The change from the default plan.
    pub name: &'static str,
    pub problem: Problem,
    pub plan: MmaPlan,
    /// Whether constants of the time model may be fitted to this trial's time. All other trials are the test
    /// set.
    pub calibration: bool,
}

/// A change of genes in the default plan, with its name.
type Variant = (&'static str, fn(&mut MmaPlan));

const VARIANTS: [Variant; 13] = [
    ("default", |_| {}),
    ("64 rows, 4 warps", |plan| (plan.block_m, plan.warps, plan.kv_warps) = (64, 4, 1)),
    ("128 rows, 8 warps", |plan| (plan.block_m, plan.warps, plan.kv_warps) = (128, 8, 1)),
    ("32 rows, 2 warps", |plan| (plan.block_m, plan.warps, plan.kv_warps) = (32, 2, 1)),
    ("32 rows, 4 warps, 2 of keys", |plan| (plan.block_m, plan.warps, plan.kv_warps) = (32, 4, 2)),
    ("16 rows, 4 warps, 4 of keys", |plan| (plan.block_m, plan.warps, plan.kv_warps) = (16, 4, 4)),
    ("scores ahead", |plan| plan.products = Order::ScoresAhead),
    ("scores ahead, 64 keys", |plan| (plan.products, plan.block_n) = (Order::ScoresAhead, 64)),
    ("32 keys", |plan| plan.block_n = 32),
    ("64 keys, 3 stages", |plan| (plan.block_n, plan.stages) = (64, 3)),
    ("1 stage", |plan| plan.stages = 1),
    ("queries elsewhere", |plan| {
        plan.queries = match plan.queries {
            QueryHome::Registers => QueryHome::Shared,
            QueryHome::Shared => QueryHome::Registers,
        };
    }),
    ("16 rows, 1 warp, 32 keys", |plan| {
        (plan.block_m, plan.warps, plan.kv_warps, plan.block_n) = (16, 1, 1, 32);
    }),
];

/// Batch, heads, sequence length, head dimension and mask.
const PROBLEMS: [(usize, usize, usize, usize, Band); 9] = [
    (1, 8, 512, 64, Band::FULL),
    (1, 8, 512, 64, Band::CAUSAL),
    (2, 16, 1024, 64, Band::FULL),
    (1, 16, 2048, 64, Band::CAUSAL),
    (1, 8, 1024, 128, Band::FULL),
    (2, 16, 1024, 128, Band::CAUSAL),
    (1, 8, 2048, 128, Band::FULL),
    (1, 8, 1024, 256, Band::FULL),
    (1, 16, 1024, 256, Band::CAUSAL),
];

/// Every variant of the default plan that fits each problem. Every third trial is for calibration.
pub fn trials(arch: &Arch) -> Vec<Trial> {
    let mut trials: Vec<Trial> = Vec::new();
    for (batch, heads, seq, head_dim, mask) in PROBLEMS {
        let problem = Problem::new(batch, heads, seq, head_dim, DType::F16).with_band(mask);
        let default = MmaPlan::default_for(&problem, arch);
        let mut tried: Vec<MmaPlan> = Vec::new();
        for (name, change) in VARIANTS {
            let mut plan = default.clone();
            change(&mut plan);
            if plan.check(&problem, arch).is_ok() && !tried.contains(&plan) {
                tried.push(plan.clone());
                let calibration = trials.len().is_multiple_of(3);
                trials.push(Trial { name, problem: problem.clone(), plan, calibration });
            }
        }
    }
    trials
}

impl Trial {
    /// The kernel on one head, whose CTAs are recorded, and the kernel on the whole problem.
    ///
    /// # Errors
    /// When the kernel cannot be emitted.
    pub fn kernels(&self, arch: &Arch) -> Result<[Bound; 2], KernelError> {
        let p = &self.problem;
        let head = Problem::new(1, 1, p.seq_q, p.head_dim, p.dtypes).with_band(p.band);
        let plan = Plan::Mma(self.plan.clone());
        let bound = |problem: &Problem| bind(&plan, problem, arch);
        Ok([bound(&head)?, bound(p)?])
    }
}

/// The quality of forecasts against measured times.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Fit {
    /// Number of pairs.
    pub count: usize,
    /// Spearman's rank correlation; 0 if it is not defined, because one of the lists is constant.
    pub spearman: f64,
    /// Median of |forecast / measured − 1|.
    pub median_error: f64,
}

impl Fit {
    /// Computes the fit from pairs of a forecast and a measured time.
    pub fn of(pairs: &[(f64, f64)]) -> Fit {
        let (forecast, measured): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
        let mut errors: Vec<f64> = pairs.iter().map(|(f, m)| (f / m - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        let middle = errors.len() / 2;
        let median_error = match errors.len() {
            0 => 0.0,
            n if n % 2 == 1 => errors[middle],
            _ => (errors[middle - 1] + errors[middle]) / 2.0,
        };
        Fit { count: pairs.len(), spearman: correlation(&ranks(&forecast), &ranks(&measured)), median_error }
    }
}

/// Ranks from 0; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for equal in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let mean = first as f64 + (equal.len() as f64 - 1.0) / 2.0;
        equal.iter().for_each(|at| ranks[*at] = mean);
        first += equal.len();
    }
    ranks
}

/// Pearson's correlation; 0 when either list is constant.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len().max(1) as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let product = |x: &[f64], mx: f64, y: &[f64], my: f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - mx) * (y - my)).sum()
    };
    let norm = (product(a, mean_a, a, mean_a) * product(b, mean_b, b, mean_b)).sqrt();
    if norm == 0.0 { 0.0 } else { product(a, mean_a, b, mean_b) / norm }
}

#[cfg(test)]
mod tests {
    use predict::machine::H200;
    use predict::resources::estimate;

    use super::*;
    use crate::study::{forecast_steps, record};

    /// A persistent kernel takes tiles from a counter: the time grows in proportion to the work, and the rate
    /// lies between about a third of the tensor cores' peak and the peak.
    #[test]
    fn a_persistent_kernel_is_forecast_from_a_few_of_its_ctas() {
        let of = |batch: usize| {
            let problem = Problem::new(batch, 16, 1024, 128, DType::Bf16).with_band(Band::CAUSAL);
            let plan = kernels::forward::wgmma::WgmmaPlan::default_for(&problem, &Arch::SM_90);
            let p = of_plan(&Plan::Wgmma(plan), &problem, &H200, &Arch::SM_90, None).unwrap();
            (p.us, problem.flops() / p.us * 1e-6)
        };
        let ((small, _), (large, rate)) = (of(4), of(16));
        assert!((3.0..4.2).contains(&(large / small)), "{small} {large}");
        assert!((300.0..900.0).contains(&rate), "{rate}");
    }

    #[test]
    fn there_are_thirty_plans_that_no_constant_has_seen() {
        let trials = trials(&Arch::SM_90);
        let test = trials.iter().filter(|t| !t.calibration).count();
        assert!(test >= 30, "{test} of {}", trials.len());
        for (i, a) in trials.iter().enumerate() {
            assert!(
                trials[..i].iter().all(|b| b.plan != a.plan || b.problem != a.problem),
                "{} twice",
                a.name
            );
            kernels::emit(&a.problem, &Plan::Mma(a.plan.clone()), &Arch::SM_90).unwrap();
        }
    }

    /// In a causal problem, a few recorded CTAs of one head represent the grid: the forecast hardly depends
    /// on their number.
    #[test]
    fn a_few_recorded_ctas_stand_for_the_grid() {
        let trial = trials(&Arch::SM_90).into_iter().find(|t| t.problem.band == Band::CAUSAL).unwrap();
        let [head, whole] = trial.kernels(&Arch::SM_90).unwrap();
        let resources = estimate(&head.kernel.module, &head.kernel.entry).unwrap();
        let [few, many] = [4, 32].map(|count| {
            let recorded = record(&head, count).unwrap();
            let resources = std::slice::from_ref(&resources);
            forecast_steps(&head, &whole, &recorded, resources, &H200).unwrap()[0].us
        });
        assert!((few / many - 1.0).abs() < 0.1, "{few} {many}");
    }

    #[test]
    fn order_and_error_are_told_apart() {
        let fit = Fit::of(&[(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]);
        assert_eq!((fit.count, fit.spearman, fit.median_error), (3, 1.0, 0.5));
        assert_eq!(Fit::of(&[(1.0, 2.0), (2.0, 1.0)]).spearman, -1.0);
        // The squared rank differences sum to 2: 1 − 6·2/(4·15).
        let swapped = Fit::of(&[(1.0, 2.0), (2.0, 1.0), (3.0, 3.0), (4.0, 1000.0)]);
        assert!((swapped.spearman - 0.8).abs() < 1e-12, "{swapped:?}");
        // Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 / √(4.5 · 5).
        let tied = Fit::of(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (4.0, 4.0)]);
        assert!((tied.spearman - (0.9f64).sqrt()).abs() < 1e-12, "{tied:?}");
        assert_eq!(Fit::of(&[]).spearman, 0.0);
    }
}
