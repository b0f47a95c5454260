//! Attention with 16-bit factors: when it is right, and by which factors.
//!
//! Q and K become 16-bit integers, a head's all by the same factor, whose products are summed in 32 bits: exactly.
//! V and the weights are f16 numbers, whose products are summed in f16, 64 of them at most, and then in f32.
//! What that costs in accuracy is bounded here, head by head; a head beyond the bounds is computed in f32.

use std::sync::OnceLock;

use problem::Problem;

use crate::Element;
use crate::simd::{Extent, Narrow};
use crate::view::{Inputs, View};

/// Largest norm of a row of integers. Then products of rows are below 2³¹, and so are all their partial sums
/// (Cauchy–Schwarz), with room for the roundings of [`MAX_DIM`] numbers by up to 1/2.
const INTEGER_NORM: f32 = 46_000.0;
/// Largest integer.
const INTEGER_MAX: f32 = 32_767.0;
/// Largest head dimension.
const MAX_DIM: usize = 4096;
/// Numbers of V are below this: 64 of them times weights up to 2⁸ are a sum below 2¹⁵, which f16 has.
const VALUE_MAX: f32 = 2.0;
/// Extents from here to the reciprocal square are ordinary f32 numbers, and so are the factors made of them.
const ORDINARY: f32 = 1e-12;

/// What the numbers of a head are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors {
    /// Makes Q integers.
    pub q: f32,
    /// Makes K integers.
    pub k: f32,
    /// Brings V into f16's range; a power of two.
    pub v: f32,
}

impl Factors {
    /// The factors for a head of such extents, if 16 bits are enough for it.
    ///
    /// Rounding to integers errs by at most 1/2, 1/√12 in the root mean square, and so a logit q·k·scale by
    /// scale · √((‖k‖/fq)² + (‖q‖/fk)²) / √12. A weight inherits that as its relative error. Standard attention
    /// rounds each weight to the input type. Half of that type's unit roundoff is what a logit may err.
    pub(crate) fn choose(problem: &Problem, q: Extent, k: Extent, v: Extent) -> Option<Factors> {
        let factors = Factors { q: integer_factor(q)?, k: integer_factor(k)?, v: value_factor(v)? };
        let (from_q, from_k) = (k.norm() / factors.q, q.norm() / factors.k);
        let error = problem.softmax_scale().abs() * from_q.hypot(from_k) / 12f32.sqrt();
        (f64::from(error) <= problem.dtype.unit_roundoff() / 2.0).then_some(factors)
    }
}

impl Extent {
    fn norm(self) -> f32 {
        self.norm_squared.sqrt()
    }

    /// The larger of both; NaN if one is.
    fn or(self, other: Extent) -> Extent {
        let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
        Extent {
            max: larger(self.max, other.max),
            norm_squared: larger(self.norm_squared, other.norm_squared),
        }
    }

    /// Whether all numbers are finite, and the largest not so small or large that squares or factors leave f32.
    fn is_ordinary(self) -> bool {
        self.norm_squared.is_finite() && (self.max == 0.0 || (ORDINARY..1.0 / ORDINARY).contains(&self.max))
    }
}

fn integer_factor(rows: Extent) -> Option<f32> {
    let all_zero = rows.max == 0.0;
    let norm = if all_zero { 1.0 } else { rows.norm() };
    let factor = (INTEGER_NORM / norm).min(INTEGER_MAX / rows.max);
    rows.is_ordinary().then_some(factor)
}

fn value_factor(rows: Extent) -> Option<f32> {
    let all_zero = rows.max == 0.0;
    // The power of two that brings the maximum into [VALUE_MAX / 2, VALUE_MAX).
    let factor = if all_zero { 1.0 } else { (VALUE_MAX.log2() - 1.0 - rows.max.log2().floor()).exp2() };
    rows.is_ordinary().then_some(factor)
}

/// The factors of every head of a problem, each found when it is first asked for.
pub(crate) struct Heads<'a, T, N> {
    narrow: N,
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    queries: Vec<OnceLock<Extent>>,
    keys_values: Vec<OnceLock<[Extent; 2]>>,
}

impl<'a, T: Element, N: Narrow> Heads<'a, T, N> {
    /// `None` if the problem is not one for 16 bits: f32, or so few rows that preparing K and V is most of the work.
    pub(crate) fn new(narrow: N, problem: &'a Problem, inputs: Inputs<'a, T>, least: usize) -> Option<Self> {
        let p = problem;
        let fits = p.dtype != problem::DType::F32 && p.seq_q >= least && p.head_dim <= MAX_DIM;
        fits.then(|| Heads {
            narrow,
            problem,
            inputs,
            queries: (0..p.batch * p.heads_q).map(|_| OnceLock::new()).collect(),
            keys_values: (0..p.batch * p.heads_kv).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The arithmetic and the factors for one query head, if 16 bits are enough for it.
    pub(crate) fn factors(&self, batch: usize, head: usize) -> Option<(N, Factors)> {
        let p = self.problem;
        let kv = head / p.group_size();
        let q = self.queries[batch * p.heads_q + head]
            .get_or_init(|| self.extent(self.inputs.q, [batch, head], p.seq_q));
        let [k, v] = self.keys_values[batch * p.heads_kv + kv].get_or_init(|| {
            [self.inputs.k, self.inputs.v].map(|view| self.extent(view, [batch, kv], p.seq_kv))
        });
        Factors::choose(p, *q, *k, *v).map(|factors| (self.narrow, factors))
    }

    fn extent(&self, view: View<'_, T>, [batch, head]: [usize; 2], rows: usize) -> Extent {
        let extent = |rows| self.narrow.extent(T::elements(rows), view.dim);
        match view.dense_rows(batch, head, 0, rows) {
            Some(all) if rows > 0 => extent(all),
            _ => (0..rows).fold(Extent::default(), |most, row| most.or(extent(view.row(batch, head, row)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use problem::DType;

    fn extent(max: f32, norm: f32) -> Extent {
        Extent { max, norm_squared: norm * norm }
    }

    #[test]
    fn integers_and_sums_fit() {
        for (max, norm) in [(1.0, 1.0), (3.0, 8.0), (1e-9, 1e-8), (6e4, 5e5), (1.0, 64.0)] {
            let factor = integer_factor(extent(max, norm)).unwrap();
            assert!(max * factor <= 32_767.5 && norm * factor <= 46_001.0, "{max} {norm} {factor}");
            let v = value_factor(extent(max, norm)).unwrap();
            assert!((1.0..2.0).contains(&(max * v)) && v.log2().fract() == 0.0, "{max} {v}");
        }
        let rounded = f64::from(INTEGER_NORM) + (MAX_DIM as f64).sqrt() / 2.0;
        assert!(rounded * rounded < 2f64.powi(31));
    }

    #[test]
    fn what_is_not_ordinary_is_refused() {
        let p = Problem::new(1, 1, 64, 64, DType::F16);
        let good = extent(4.0, 11.0);
        assert!(Factors::choose(&p, good, good, good).is_some());
        assert!(Factors::choose(&p, Extent::default(), good, Extent::default()).is_some());
        for bad in [extent(f32::NAN, f32::NAN), extent(f32::INFINITY, f32::NAN), extent(1e30, 1e30), extent(1e-30, 0.0)] {
            for (q, k, v) in [(bad, good, good), (good, bad, good), (good, good, bad)] {
                assert_eq!(Factors::choose(&p, q, k, v), None, "{bad:?}");
            }
        }
    }

    #[test]
    fn logits_that_16_bits_blur_are_refused() {
        let mut p = Problem::new(1, 1, 64, 64, DType::F16);
        let v = extent(1.0, 8.0);
        // √2 / √12 / 46000 · 27 is just below 2⁻¹².
        let norms = |product: f32| extent(product.sqrt() / 3.0, product.sqrt());
        assert!(Factors::choose(&p, norms(8.0 * 27.0), norms(8.0 * 27.0), v).is_some());
        assert!(Factors::choose(&p, norms(8.0 * 28.0), norms(8.0 * 28.0), v).is_none());
        p.scale = Some(-1.0);
        assert!(Factors::choose(&p, norms(8.0 * 27.0), norms(8.0 * 27.0), v).is_none());
        p.dtype = DType::Bf16;
        assert!(Factors::choose(&p, norms(8.0 * 27.0), norms(8.0 * 27.0), v).is_some());
    }
}
