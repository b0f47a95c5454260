//! Attention with 16-bit factors: when it is right, and by which factors.
//!
//! Q, K, V and the weights become 16-bit integers, and their products are summed in 32 bits: exactly. So all that is
//! lost is lost in rounding to integers:
//! - Q and K have one factor each a head, so large that their rows' products just fit.
//! - The weights of a window of [`WINDOW`] keys have a factor for each query: the largest becomes 2^[`WEIGHT_BITS`].
//! - V has a factor for each column of a head, so large that the sums of products over a window just fit.
//!
//! What that costs in accuracy is bounded here, head by head; a head beyond the bounds is computed in f32. The measure
//! is a kernel that rounds the weights to the input type, and sums in f32. The LSE has no weights that are rounded, so
//! calls that ask for it are computed in f32 whole.

use std::sync::OnceLock;

use problem::{DType, KeyRange, Problem};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows};
use crate::simd::{Avx512, Avx512Vnni, Extent, Rows, Simd};
use crate::tile::Step;
use crate::view::Inputs;
use crate::{CpuPlan, Element, Elements};

/// Keys whose products are one integer sum. Even.
pub(crate) const WINDOW: usize = 16;
/// log2 of the largest integer weight of a lane in a window.
pub(crate) const WEIGHT_BITS: f32 = 13.0;
/// Largest norm of a row of integers of Q or K. Then products of rows are below 2³¹, and so are all their partial
/// sums (Cauchy–Schwarz), with room for the roundings of [`MAX_DIM`] numbers by up to 1/2.
const INTEGER_NORM: f32 = 46_000.0;
/// Largest integer.
const INTEGER_MAX: f32 = 32_767.0;
/// Largest head dimension.
const MAX_DIM: usize = 4096;
/// Largest sum of the magnitudes of a column of V over a window, and 8 times the largest of these integers: times
/// weights of 2¹³ it is below 2³¹, with room for the roundings.
const WINDOW_SUM: f32 = 260_000.0;
/// Share of the input type's unit roundoff that rounding to integers may cost: in the logits, and again in V.
const SHARE: f64 = 1.0 / 3.0;
/// Extents from here to the reciprocal square are ordinary f32 numbers, and so are the factors made of them.
const ORDINARY: f32 = 1e-12;

/// What the numbers of a head are multiplied by to be integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors<'a> {
    pub q: f32,
    pub k: f32,
    /// One for each column.
    pub v: &'a [f32],
}

impl Extent {
    fn norm(self) -> f32 {
        self.norm_squared.sqrt()
    }

    /// The factor that makes integers of rows of Q or K; `None` if the numbers are not all finite, or so small or
    /// large that squares or factors leave f32.
    fn factor(self) -> Option<f32> {
        if self == Extent::default() {
            return Some(INTEGER_NORM); // zeros, with any factor
        }
        let ordinary = self.norm_squared.is_finite() && (ORDINARY..1.0 / ORDINARY).contains(&self.max);
        ordinary.then(|| (INTEGER_NORM / self.norm()).min(INTEGER_MAX / self.max))
    }
}

/// The factors of Q and K for a head of such extents, if 16 bits are enough for it.
///
/// Rounding to integers errs by 1/√12 in the root mean square, and so a logit q·k·scale by
/// scale · √((‖k‖/fq)² + (‖q‖/fk)²) / √12. A weight inherits that as its relative error.
fn logit_factors(problem: &Problem, q: Extent, k: Extent) -> Option<(f32, f32)> {
    let (for_q, for_k) = (q.factor()?, k.factor()?);
    let [of_q, of_k] = [k.norm() / for_q, q.norm() / for_k].map(f64::from);
    // Not `hypot`: the C library's has a version of its own since glibc 2.35, which a wheel for older ones cannot ask for.
    let error = f64::from(problem.softmax_scale().abs()) * (of_q * of_q + of_k * of_k).sqrt() / 12f64.sqrt();
    (error <= SHARE * problem.dtype.unit_roundoff()).then_some((for_q, for_k))
}

/// Whether integers are enough for V, whose shortest row has this norm as integers: 1/√12 must be small in the root
/// mean square of every row, since a row that is far smaller than others may be the one that has all the weight.
fn is_fine(dtype: DType, dim: usize, least_norm_squared: f32) -> bool {
    let least = (dim as f64 / 12.0).sqrt() / (SHARE * dtype.unit_roundoff());
    f64::from(least_norm_squared) >= least * least
}

/// The factors of every head of a problem, each found when it is first asked for.
pub(crate) struct Heads<'a, T> {
    vnni: Avx512Vnni,
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    block_kv: usize,
    /// Query heads that one task holds rows of; they have one factor.
    together: usize,
    queries: Vec<OnceLock<Extent>>,
    keys: Vec<OnceLock<Extent>>,
    values: Vec<OnceLock<Option<Vec<f32>>>>,
}

impl<'a, T: Element> Heads<'a, T> {
    /// `None` if the problem is not one for 16 bits: f32, or so few rows that preparing K and V is most of the work.
    pub(crate) fn new(
        vnni: Avx512Vnni,
        problem: &'a Problem,
        inputs: Inputs<'a, T>,
        plan: &CpuPlan,
        together: usize,
    ) -> Option<Self> {
        let p = problem;
        let fits = plan.isa.is_for(p) && p.head_dim <= MAX_DIM;
        let kv_heads = p.batch * p.heads_kv;
        fits.then(|| Heads {
            vnni,
            problem,
            inputs,
            block_kv: plan.block_kv,
            together,
            queries: (0..p.batch * p.heads_q / together).map(|_| OnceLock::new()).collect(),
            keys: (0..kv_heads).map(|_| OnceLock::new()).collect(),
            values: (0..kv_heads).map(|_| OnceLock::new()).collect(),
        })
    }

    fn value_factors(&self, values: HeadRows<'_, T>) -> Option<Vec<f32>> {
        let dim = values.view.dim;
        let (mut sums, mut reach) = (vec![0.0; dim], vec![0.0; dim]);
        // The windows of every step: those of each block of keys.
        for block in (0..values.range.end).step_by(self.block_kv) {
            let block_end = (block + self.block_kv).min(values.range.end);
            for start in (block..block_end).step_by(WINDOW) {
                let range = KeyRange { start, end: (start + WINDOW).min(block_end) };
                self.vnni.reach(HeadRows { range, ..values }.rows(), &mut sums, &mut reach);
            }
        }
        let factors = column_factors(&reach)?;
        let least = self.vnni.least_norm_squared(values.rows(), &factors);
        is_fine(self.problem.dtype, dim, least).then_some(factors)
    }
}

impl<T: Element> Faster for Heads<'_, T> {
    type Arithmetic<'a>
        = Narrowed<'a>
    where
        Self: 'a;

    fn arithmetic(&self, batch: usize, head: usize) -> Option<Narrowed<'_>> {
        let p = self.problem;
        let kv = head / p.group_size();
        let (at, at_kv) = ((batch * p.heads_q + head) / self.together, batch * p.heads_kv + kv);
        let of_queries = || {
            let heads = head..head + self.together;
            self.vnni.extent(heads.flat_map(|head| HeadRows::all(self.inputs.q, batch, head, p.seq_q).rows()))
        };
        let queries = self.queries[at].get_or_init(of_queries);
        let keys = self.keys[at_kv]
            .get_or_init(|| self.vnni.extent(HeadRows::all(self.inputs.k, batch, kv, p.seq_kv).rows()));
        let (q, k) = logit_factors(p, *queries, *keys)?;
        let values = HeadRows::all(self.inputs.v, batch, kv, p.seq_kv);
        let v = self.values[at_kv].get_or_init(|| self.value_factors(values)).as_deref()?;
        Some(Narrowed { vnni: self.vnni, factors: Factors { q, k, v } })
    }
}

/// 16-bit factors: words are pairs of integers, along the head dimension in Q and K, along the keys in V.
#[derive(Clone, Copy)]
pub(crate) struct Narrowed<'a> {
    vnni: Avx512Vnni,
    factors: Factors<'a>,
}

impl Arithmetic for Narrowed<'_> {
    const LANES: usize = Avx512::LANES;

    fn words(self, dim: usize) -> usize {
        dim.div_ceil(2)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let factor = if negate { -self.factors.q } else { self.factors.q };
        let words = to.len();
        self.vnni.integers(std::iter::once(row), factor, to, words);
    }

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim);
        let to = room.resize(rows.range.len() * ld);
        self.vnni.integers(rows.rows(), self.factors.k, to, ld);
        Rows { data: to, ld }
    }

    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = rows.view.dim;
        let to = room.resize(rows.range.len().div_ceil(2) * ld);
        self.vnni.row_pairs(rows.rows(), self.factors.v, to);
        Rows { data: to, ld }
    }

    fn step(self, step: Step<'_>) {
        self.vnni.step(step);
    }

    fn logit_factor(self) -> f64 {
        1.0 / (f64::from(self.factors.q) * f64::from(self.factors.k))
    }

    fn rescale(self, out: &mut [f32], width: usize) {
        for (row, factor) in out.chunks_exact_mut(width).zip(self.factors.v) {
            let inverse = 1.0 / factor;
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    }
}

/// The factors for columns of V with such sums, if they are ordinary. A column of zeros has any.
fn column_factors(reach: &[f32]) -> Option<Vec<f32>> {
    let factor = |&reach: &f32| match reach {
        0.0 => Some(1.0),
        _ => (ORDINARY..1.0 / ORDINARY).contains(&reach).then(|| WINDOW_SUM / reach),
    };
    reach.iter().map(factor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(max: f32, norm: f32) -> Extent {
        Extent { max, norm_squared: norm * norm }
    }

    #[test]
    fn integers_and_sums_fit() {
        for (max, norm) in [(1.0, 1.0), (3.0, 8.0), (1e-9, 1e-8), (6e4, 5e5), (1.0, 64.0)] {
            let factor = extent(max, norm).factor().unwrap();
            assert!(max * factor <= 32_767.5 && norm * factor <= 46_001.0, "{max} {norm} {factor}");
        }
        let rounded = f64::from(INTEGER_NORM) + (MAX_DIM as f64).sqrt() / 2.0;
        assert!(rounded * rounded < 2f64.powi(31));
        let sum = f64::from(WINDOW_SUM) * (1.0 + 1e-6) + WINDOW as f64 / 2.0;
        // exp2 errs by less than 2⁻²¹, its argument, below 2⁹ as logits are, by 2⁻¹⁵; then the weight is rounded.
        let weight = f64::from(WEIGHT_BITS).exp2() * (1.0 + 2f64.powi(-15) + 2f64.powi(-21)) + 0.5;
        assert!(weight * sum < 2f64.powi(31) && WINDOW_SUM / 8.0 < INTEGER_MAX);
    }

    #[test]
    fn what_is_not_ordinary_is_refused() {
        let p = Problem::new(1, 1, 64, 64, DType::F16);
        let good = extent(4.0, 11.0);
        assert!(logit_factors(&p, good, good).is_some());
        assert!(logit_factors(&p, Extent::default(), good).is_some());
        for bad in [
            extent(f32::NAN, f32::NAN),
            extent(f32::INFINITY, f32::NAN),
            extent(1e30, 1e30),
            extent(1e-30, 0.0),
        ] {
            assert_eq!(logit_factors(&p, bad, good), None, "{bad:?}");
            assert_eq!(logit_factors(&p, good, bad), None, "{bad:?}");
            assert_eq!(column_factors(&[1.0, bad.max]), None, "{bad:?}");
        }
        assert_eq!(column_factors(&[0.0, 2.0]), Some(vec![1.0, WINDOW_SUM / 2.0]));
    }

    #[test]
    fn logits_that_16_bits_blur_are_refused() {
        let mut p = Problem::new(1, 1, 64, 64, DType::F16);
        // √2 / √12 / 46000 · 18 is just below 2⁻¹¹ / 3.
        let norms = |product: f32| extent(product.sqrt() / 3.0, product.sqrt());
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_some());
        assert!(logit_factors(&p, norms(8.0 * 19.0), norms(8.0 * 19.0)).is_none());
        p.scale = Some(-1.0);
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_none());
        p.dtype = DType::Bf16;
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_some());
    }

    #[test]
    fn rows_of_v_that_16_bits_blur_are_refused() {
        // 1/√12 is 2⁻¹¹ / 3 of 1774, 2⁻⁸ / 3 of 222.
        let norm_squared = |rms: f32| 16.0 * rms * rms;
        assert!(
            is_fine(DType::F16, 16, norm_squared(1774.0)) && !is_fine(DType::F16, 16, norm_squared(1773.0))
        );
        assert!(
            is_fine(DType::Bf16, 16, norm_squared(222.0)) && !is_fine(DType::Bf16, 16, norm_squared(221.0))
        );
        assert!(!is_fine(DType::F16, 16, 0.0) && !is_fine(DType::F16, 16, f32::NAN));
    }
}
