//! Corrections of predicted times by the errors at measured problems: the mean of a Gaussian process. Its
//! covariance falls with the distance of two problems and with the difference of two plans.

use problem::Problem;

use crate::forward::mma::MmaPlan;
use crate::forward::small::{AtOncePlan, StreamedPlan};
use crate::forward::wgmma::WgmmaPlan;
use crate::{Arch, Plan};

/// The place of a problem, in distances over which errors are alike.
pub(super) type FeaturePlace = [f64; 6];

/// Those distances: of waves, keys, queries and heads of a group in powers of two, of head dims in powers of
/// √2, and of a causal mask. They and the variances below were chosen by the errors at problems left out.
const REACH: FeaturePlace = [2.2, 2.0, 2.7, 1.3, 1.1, 1.6];
/// Beyond this power of two, more waves change no error.
const MANY_WAVES: f64 = 5.0;
/// Variances of errors that all plans of a problem share, the plans of a family, plans with tiles of a size,
/// with alike tiles, and equal plans.
const OF_PROBLEM: f64 = 0.007;
const OF_FAMILY: f64 = 0.0256;
const OF_SIZE: f64 = 0.014;
const OF_TILE: f64 = 0.032;
const OF_PLAN: f64 = 0.0211;
/// The variance of what cannot be predicted.
const NOISE: f64 = 0.003;
/// The share of these variances that a plan has in common with heads of a group packed and apart.
const OTHER_PACKING: f64 = 0.9;

pub(super) fn place(problem: &Problem, arch: &Arch) -> FeaturePlace {
    let log = |number: usize| (number.max(1) as f64).log2();
    let tiles = problem.batch * problem.heads_q * problem.seq_q.div_ceil(64);
    let waves = log(tiles) - f64::from(arch.multiprocessors.max(1)).log2();
    let (dim, causal) = (2.0 * log(problem.head_dim), f64::from(u8::from(problem.band.is_causal())));
    let all = [
        waves.min(MANY_WAVES),
        log(problem.seq_kv),
        log(problem.seq_q),
        log(problem.group_size()),
        dim,
        causal,
    ];
    std::array::from_fn(|i| all[i] / REACH[i])
}

/// The share of errors that problems have in common.
pub(super) fn of_places(a: &FeaturePlace, b: &FeaturePlace) -> f64 {
    let apart: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (-apart / 2.0).exp()
}

/// The variance that the errors of plans have in common, whichever their packings.
pub(super) fn of_plans(plan: &Plan, other: &Plan) -> f64 {
    if plan.family() != other.family() {
        return OF_PROBLEM;
    }
    let (is_size, is_tile) = match (plan, other) {
        (Plan::Wgmma(a), Plan::Wgmma(b)) => {
            let tile = |p: &WgmmaPlan| ((p.consumers, p.resident_ctas), (p.block_n, p.handout, p.turns));
            equal(&tile(a), &tile(b))
        }
        (Plan::Mma(a), Plan::Mma(b)) => {
            let tile = |p: &MmaPlan| ((p.block_m, p.kv_warps), (p.block_n, p.warps, p.splits));
            equal(&tile(a), &tile(b))
        }
        (Plan::SmallStreamed(a), Plan::SmallStreamed(b)) => {
            let tile = |p: &StreamedPlan| {
                ((p.row_warpgroups, p.cluster, p.resident_ctas), (p.kv_warpgroups, p.block_n))
            };
            equal(&tile(a), &tile(b))
        }
        (Plan::SmallAtOnce(a), Plan::SmallAtOnce(b)) => {
            let tile = |p: &AtOncePlan| ((p.cluster, p.kv_warpgroups), (p.row_warpgroups, p.block_n));
            equal(&tile(a), &tile(b))
        }
        _ => (false, false),
    };
    let is_equal = plan == other;
    let parts = [(true, OF_FAMILY), (is_size, OF_SIZE), (is_tile, OF_TILE), (is_equal, OF_PLAN)];
    OF_PROBLEM + parts.into_iter().filter(|(is, _)| *is).map(|(_, variance)| variance).sum::<f64>()
}

/// Whether the first parts are equal, and both.
fn equal<A: PartialEq, B: PartialEq>(a: &(A, B), b: &(A, B)) -> (bool, bool) {
    (a.0 == b.0, a == b)
}

/// The factor on the variance of plans, by their packings.
pub(super) fn of_packings(a: usize, b: usize) -> f64 {
    if a == b { 1.0 } else { OTHER_PACKING }
}

/// Errors at measured problems, and what they have in common.
pub(super) struct Errors {
    /// The errors: logarithms of measured times over predicted ones.
    pub errors: Vec<f64>,
    /// The inverse of their covariance.
    inverse: Vec<f64>,
}

impl Errors {
    /// `common` is the covariance of the errors with two indices.
    pub fn new(errors: Vec<f64>, common: impl Fn(usize, usize) -> f64) -> Errors {
        let n = errors.len();
        let mut inverse: Vec<f64> = (0..n * n).map(|at| common(at / n, at % n)).collect();
        (0..n).for_each(|i| inverse[i * n + i] += NOISE);
        invert(&mut inverse, n);
        Errors { errors, inverse }
    }

    /// The weight of each error. The sum of the weights, each times what its error has in common with that of
    /// a plan, corrects the plan's predicted time.
    pub fn weights(&self) -> Vec<f64> {
        let n = self.errors.len();
        let of_row = |row: &[f64]| row.iter().zip(&self.errors).map(|(a, b)| a * b).sum();
        self.inverse.chunks(n.max(1)).map(of_row).collect()
    }

    /// The corrections of some errors by all others.
    pub fn left_out(&self, some: &[usize], weights: &[f64]) -> Vec<f64> {
        let (n, m) = (self.errors.len(), some.len());
        let mut block: Vec<f64> =
            (0..m * m).map(|at| self.inverse[some[at / m] * n + some[at % m]]).collect();
        invert(&mut block, m);
        let product = |row: &[f64]| row.iter().zip(some).map(|(a, &i)| a * weights[i]).sum::<f64>();
        block.chunks(m.max(1)).zip(some).map(|(row, &i)| self.errors[i] - product(row)).collect()
    }
}

/// Inverts a symmetric positive definite matrix of `n` rows in place.
fn invert(matrix: &mut [f64], n: usize) {
    for i in 0..n {
        let pivot = 1.0 / matrix[i * n + i];
        matrix[i * n + i] = 1.0;
        matrix[i * n..(i + 1) * n].iter_mut().for_each(|x| *x *= pivot);
        let row = matrix[i * n..(i + 1) * n].to_vec();
        for other in (0..n).filter(|&other| other != i) {
            let factor = std::mem::take(&mut matrix[other * n + i]);
            let others = matrix[other * n..(other + 1) * n].iter_mut();
            others.zip(&row).for_each(|(x, y)| *x -= factor * y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three errors, of which the first two have much in common: the left-out correction is that of a fit
    /// without the error.
    #[test]
    fn an_error_is_corrected_by_the_others() {
        let common = |i: usize, j: usize| match (i, j) {
            _ if i == j => 0.1,
            (0, 1) | (1, 0) => 0.09,
            _ => 0.01,
        };
        let errors = [0.2, 0.18, -0.1];
        let all = Errors::new(errors.to_vec(), common);
        let weights = all.weights();
        for (i, error) in errors.into_iter().enumerate() {
            let again: f64 = (0..3).map(|j| common(i, j) * weights[j]).sum::<f64>() + NOISE * weights[i];
            assert!((again - error).abs() < 1e-9, "{again} {error}");
        }
        let two = Errors::new(errors[1..].to_vec(), |i, j| common(i + 1, j + 1));
        let of_two = two.weights();
        let without = common(0, 1) * of_two[0] + common(0, 2) * of_two[1];
        let left_out = all.left_out(&[0], &weights)[0];
        assert!((left_out - without).abs() < 1e-9 && left_out > 0.1, "{left_out} {without}");
    }
}
