//! Attention in 16-bit integers: the scaling factors, and the conditions under which the result is accurate.
//!
//! Q, K, V and the weights are scaled and rounded to 16-bit integers. Their products are summed in 32 bits,
//! which is exact. The only errors are those of rounding to integers:
//! - Q and K have one factor per head: the largest for which the integer products of their rows fit 32 bits.
//! - The weights of a window of [`WINDOW`] keys have one factor per query: the largest weight becomes
//!   2^[`WEIGHT_BITS`].
//! - V has one factor per column of a head: the largest for which the sums of products over a window fit 32
//!   bits.
//!
//! A large element makes its factor small and so increases the rounding error of other elements, including
//! those of rows that do not see the large element. The errors are therefore bounded here, per head, for
//! every row that attention may compute from these inputs, for all weights and masks. A head that exceeds a
//! bound is computed in f32. Calls that request an LSE are computed in f32 throughout, because an LSE does
//! not include the rounding of weights.
//!
//! # Bounds
//! `u` is the unit roundoff of the input type. A rounding to an integer has an error of at most 1/2, and of
//! 1/√12 in the root mean square. Errors of different elements are assumed to be independent.
//! - **Logits** ([`logit_factors`]): the error of a logit of any row and key is at most u/3 (root mean
//!   square). This is the relative error of the weight.
//! - **V** ([`Heads::value_factors`]): an element of O is a weighted mean of a column of V. Its error is at
//!   most the error of the column's elements: 1/(2 f) for the column's factor f, and e = 1/(√12 f) in the
//!   root mean square. Two bounds hold.
//! - *Per column*: e ≤ u/2 · s. The keys are divided into sequences of [`WINDOW`]. The column's scale s is
//!   the smallest root mean square of a sequence, with each sequence's largest element left out. So one large
//!   element changes s little, and no part of the column has elements that are all much smaller than s.
//! - *Per row*: a row of O with one heavy key is that key's row of V, even where s does not describe that
//!   row. Therefore √Σ(e/s)² ≤ u/3 · √Σ(v/s)², summed over the columns, for each row of V.
//! - **Weights**: an integer weight has an error of 2⁻¹³/√12 relative to the window's largest weight. An
//!   element of O then has an error of at most that times the norm of the column's elements in the window
//!   (windows count with their largest weights, which are at most their sum). The error is bounded in the
//!   same two ways, by [`WEIGHTS_SHARE`] · u. The bound matters for a large element at a key with a small
//!   weight, whose integer is a few units.
//!
//! So the error of an element of O is a few u times its column's scale, not always a few u times the element
//! itself. An element that is much smaller than its column's scale has a larger relative error. The bounds
//! are those of a norm.

use std::sync::OnceLock;

use problem::{KeyRange, Problem};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows, HeadsOf};
use crate::simd::{Columnwise, Extent, Pairs, RowNorms, Rows, Simd};
use crate::tile::Step;
use crate::{CpuPlan, Elements};

/// Number of keys whose products are summed as integers. Even.
pub(crate) const WINDOW: usize = 16;
/// log2 of the largest integer weight of a lane in a window.
pub(crate) const WEIGHT_BITS: f32 = 13.0;
/// Maximum norm of a row of integers of Q or K. Products of two rows, and all their partial sums, are then
/// below 2³¹ (Cauchy–Schwarz), even if [`MAX_DIM`] numbers are each rounded up by 1/2.
const INTEGER_NORM: f32 = 46_000.0;
/// Largest integer that is used.
const INTEGER_MAX: f32 = 32_767.0;
/// Maximum head dimension.
const MAX_DIM: usize = 4096;
/// Maximum sum of the magnitudes of a column of V over a window, and maximum of 8 times the largest of these
/// integers. Multiplied by weights of 2¹³, the sum is below 2³¹, roundings included.
const WINDOW_SUM: f32 = 260_000.0;
/// Root mean square of the error of rounding to an integer: 1/√12.
const ROUNDING: f64 = 0.288_675_134_594_812_9;
/// Maximum error of rounding to integers, in unit roundoffs of the input type: in the logits, and in a row of
/// V.
const SHARE: f64 = 1.0 / 3.0;
/// Maximum error in a column of V, in unit roundoffs.
const COLUMN_SHARE: f64 = 1.0 / 2.0;
/// Maximum error of rounding the weights of a window, in unit roundoffs, if the heaviest key has the smallest
/// elements. Normal draws have up to 1.7 in a column.
const WEIGHTS_SHARE: f64 = 2.0;
/// Extents from this value to its reciprocal are ordinary f32 numbers, and so are the factors computed from
/// them.
const ORDINARY: f32 = 1e-12;

/// The factors that turn the numbers of a head into integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors<'a> {
    pub q: f32,
    pub k: f32,
    /// One factor per column.
    pub v: &'a [f32],
}

impl Extent {
    fn norm(self) -> f32 {
        self.norm_squared.sqrt()
    }

    /// The factor that turns rows of Q or K into integers. `None` if a number is not finite, or if squares or
    /// factors would leave the range of f32.
    fn factor(self) -> Option<f32> {
        if self == Extent::default() {
            return Some(INTEGER_NORM); // all zeros, so any factor fits
        }
        let ordinary = self.norm_squared.is_finite() && (ORDINARY..1.0 / ORDINARY).contains(&self.max);
        ordinary.then(|| (INTEGER_NORM / self.norm()).min(INTEGER_MAX / self.max))
    }
}

/// The factors of Q and K for a head with these extents. `None` if 16 bits are not accurate enough.
///
/// The error of a logit q·k·scale is scale · √((‖k‖/fq)² + (‖q‖/fk)²) / √12. The largest norms of the head
/// bound the error for all rows, including hidden ones. So a large row of Q or K increases the error of other
/// rows at most to the bound.
fn logit_factors(problem: &Problem, q: Extent, k: Extent) -> Option<(f32, f32)> {
    let (for_q, for_k) = (q.factor()?, k.factor()?);
    let [of_q, of_k] = [k.norm() / for_q, q.norm() / for_k].map(f64::from);
    // `hypot` is not used: since glibc 2.35 it has a new symbol version, which a wheel for older versions of
    // glibc cannot link.
    let error = f64::from(problem.softmax_scale().abs()) * (of_q * of_q + of_k * of_k).sqrt() * ROUNDING;
    (error <= SHARE * problem.dtypes.q.unit_roundoff()).then_some((for_q, for_k))
}

/// Measures of the columns of a head of V, from which the bounds are computed.
#[derive(Clone, Debug, PartialEq)]
struct Columns {
    /// Bound of a window's products: the largest sum of magnitudes over a window, or 8 times the largest
    /// magnitude.
    reach: Vec<f32>,
    /// The largest sum of squares over a window.
    loudest: Vec<f32>,
    /// The smallest sum of squares over a sequence of [`WINDOW`] keys, without the largest element of the
    /// sequence.
    quietest: Vec<f32>,
    /// Whether all elements and their squares are finite.
    finite: bool,
}

/// The factor and the scale of a column of V.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Column {
    factor: f32,
    /// 1/s; 0 for a column of zeros, which rounding does not change.
    inverse_scale: f32,
}

impl Columns {
    fn new(dim: usize) -> Columns {
        let of = |x| vec![x; dim];
        Columns { reach: of(0.0), loudest: of(0.0), quietest: of(f32::INFINITY), finite: true }
    }

    /// Adds the keys of a window.
    fn add_window(&mut self, window: &Columnwise) {
        for (d, &sum) in window.sums.iter().enumerate() {
            let largest = window.largest[d];
            let squares = largest * largest + window.others[d];
            self.finite &= sum.is_finite() && squares.is_finite();
            self.reach[d] = self.reach[d].max(sum).max(8.0 * largest);
            self.loudest[d] = self.loudest[d].max(squares);
        }
    }

    /// Adds a sequence of [`WINDOW`] keys.
    fn add_sequence(&mut self, sequence: &Columnwise) {
        for (least, &others) in self.quietest.iter_mut().zip(&sequence.others) {
            *least = least.min(others);
        }
    }

    /// Factors and scales, if every column is within the bounds.
    fn judge(&self, roundoff: f64) -> Option<Vec<Column>> {
        let judge = |d: usize| {
            let reach = self.reach[d];
            if reach == 0.0 {
                return Some(Column { factor: 1.0, inverse_scale: 0.0 });
            }
            let factor = (ORDINARY..1.0 / ORDINARY).contains(&reach).then(|| WINDOW_SUM / reach)?;
            let scale = (f64::from(self.quietest[d]) / (WINDOW - 1) as f64).sqrt();
            let of_values = ROUNDING / f64::from(factor);
            let of_weights = weight_error(self.loudest[d]);
            // With fewer keys than a window, the scale is infinite, and the column is rejected.
            let fine = scale.is_finite()
                && of_values <= COLUMN_SHARE * roundoff * scale
                && of_weights <= WEIGHTS_SHARE * roundoff * scale;
            fine.then(|| Column { factor, inverse_scale: (1.0 / scale) as f32 })
        };
        if !self.finite {
            return None;
        }
        (0..self.reach.len()).map(judge).collect()
    }
}

/// The error of the sum of products of a window's integer weights with numbers whose squares sum to
/// `squares`, if the largest weight is 1.
fn weight_error(squares: f32) -> f64 {
    ROUNDING * f64::from(squares).sqrt() / f64::from(WEIGHT_BITS).exp2()
}

/// Whether 16-bit integers are accurate enough for the rows of V. Each column is divided by its scale.
/// `least` is the smallest squared norm of a row, `loudest` the largest sum of squares over a window.
fn rows_are_fine(roundoff: f64, columns: &[Column], least: f32, loudest: f32) -> bool {
    let error = |c: &Column| ROUNDING / f64::from(c.factor) * f64::from(c.inverse_scale);
    let of_values = columns.iter().map(|c| error(c).powi(2)).sum::<f64>().sqrt();
    let least = f64::from(least).sqrt();
    of_values <= SHARE * roundoff * least && weight_error(loudest) <= WEIGHTS_SHARE * roundoff * least
}

/// The factors of every head of a problem. Each is computed when it is first used.
pub(crate) struct Heads<'a, P> {
    pairs: P,
    /// The query heads of one task share one factor.
    of: HeadsOf<'a>,
    block_kv: usize,
    queries: Vec<OnceLock<Extent>>,
    keys: Vec<OnceLock<Extent>>,
    values: Vec<OnceLock<Option<Vec<f32>>>>,
}

impl<'a, P: Pairs> Heads<'a, P> {
    /// Returns `None` if 16 bits are not worthwhile for the problem: its type is f32, or it has so few rows
    /// that converting K and V is most of the work.
    pub(crate) fn new(pairs: P, of: HeadsOf<'a>, plan: &CpuPlan) -> Option<Self> {
        let p = of.problem;
        // The error bounds do not cover descale factors.
        let fits = of.fits && p.head_dim <= MAX_DIM && !of.has_factors;
        let (queries, kv_heads) = (p.batch * p.heads_q / of.together, p.batch * p.heads_kv);
        fits.then(|| Heads {
            pairs,
            of,
            block_kv: plan.block_kv,
            queries: (0..queries).map(|_| OnceLock::new()).collect(),
            keys: (0..kv_heads).map(|_| OnceLock::new()).collect(),
            values: (0..kv_heads).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The factors of V's columns. `None` if 16 bits are not accurate enough for the head.
    fn value_factors(&self, values: HeadRows<'_>) -> Option<Vec<f32>> {
        let roundoff = self.of.problem.dtypes.v.unit_roundoff();
        let columns = self.columns(values).judge(roundoff)?;
        let inverse: Vec<f32> = columns.iter().map(|c| c.inverse_scale).collect();
        let (mut least, mut loudest) = (f32::INFINITY, 0.0f32);
        for range in self.windows(values.range) {
            let norms: RowNorms = self.pairs.row_norms(HeadRows { range, ..values }.rows(), &inverse);
            (least, loudest) = (least.min(norms.least), loudest.max(norms.sum));
        }
        rows_are_fine(roundoff, &columns, least, loudest)
            .then(|| columns.into_iter().map(|c| c.factor).collect())
    }

    /// The arithmetic of a head. `None` if 16 bits are not accurate enough.
    fn arithmetic(&self, batch: usize, head: usize) -> Option<Narrowed<'_, P>> {
        let HeadsOf { problem: p, sequences, inputs, together, .. } = &self.of;
        let (kv, sequence) = (head / p.group_size(), &sequences[batch]);
        let (at, at_kv) = ((batch * p.heads_q + head) / together, batch * p.heads_kv + kv);
        let of_queries = || {
            let heads = head..head + together;
            self.pairs.extent(heads.flat_map(|head| HeadRows::all(inputs.q, sequence.q, head).rows()))
        };
        let queries = self.queries[at].get_or_init(of_queries);
        let keys = self.keys[at_kv]
            .get_or_init(|| self.pairs.extent(HeadRows::all(inputs.k, sequence.kv, kv).rows()));
        let (q, k) = logit_factors(p, *queries, *keys)?;
        let values = HeadRows::all(inputs.v, sequence.kv, kv);
        let v = self.values[at_kv].get_or_init(|| self.value_factors(values)).as_deref()?;
        Some(Narrowed { pairs: self.pairs, factors: Factors { q, k, v } })
    }

    /// Measures the columns of V.
    fn columns(&self, values: HeadRows<'_>) -> Columns {
        let dim = values.view.dim();
        let (mut columns, mut sums) = (Columns::new(dim), Columnwise::new(dim));
        let of = |sums: &mut Columnwise, range| {
            sums.clear();
            self.pairs.add_columns(HeadRows { range, ..values }.rows(), sums);
        };
        for range in self.windows(values.range) {
            of(&mut sums, range);
            columns.add_window(&sums);
            // The last window of a block may have fewer keys. The keys before it then complete the sequence
            // of keys.
            let is_long = range.end >= values.range.start + WINDOW;
            if range.len() < WINDOW && is_long {
                of(&mut sums, KeyRange { start: range.end - WINDOW, end: range.end });
            }
            if is_long {
                columns.add_sequence(&sums);
            }
        }
        columns
    }

    /// The windows of every step: each block of a sequence's keys is divided into windows.
    fn windows(&self, rows: KeyRange) -> impl Iterator<Item = KeyRange> {
        let (block_kv, keys) = (self.block_kv, rows.end);
        (rows.start..keys).step_by(block_kv).flat_map(move |block| {
            let end = (block + block_kv).min(keys);
            (block..end).step_by(WINDOW).map(move |start| KeyRange { start, end: (start + WINDOW).min(end) })
        })
    }
}

impl<P: Pairs> Faster for Heads<'_, P> {
    type Arithmetic<'a>
        = Narrowed<'a, P>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Narrowed<'_, P>)) -> bool {
        self.arithmetic(batch, head).map(work).is_some()
    }
}

/// 16-bit integers. A word is a pair of integers, along the head dim in Q and K, along the keys in V.
#[derive(Clone, Copy)]
pub(crate) struct Narrowed<'a, P> {
    pairs: P,
    factors: Factors<'a>,
}

impl<P: Pairs> Arithmetic for Narrowed<'_, P> {
    const LANES: usize = P::Vectors::LANES;

    fn words(self, dim: usize) -> usize {
        dim.div_ceil(2)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let factor = if negate { -self.factors.q } else { self.factors.q };
        let words = to.len();
        self.pairs.integers(std::iter::once(row), factor, to, words);
    }

    fn keys<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim());
        let to = room.resize(rows.range.len() * ld);
        self.pairs.integers(rows.rows(), self.factors.k, to, ld);
        Rows { data: to, ld }
    }

    fn values<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = rows.view.dim();
        let to = room.resize(rows.range.len().div_ceil(2) * ld);
        self.pairs.row_pairs(rows.rows(), self.factors.v, to);
        Rows { data: to, ld }
    }

    fn step(self, step: Step<'_>) {
        self.pairs.step(step);
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

#[cfg(test)]
mod tests {
    use problem::{DType, KeyPlaces, Layout, Operands};
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    use super::*;
    use crate::simd::PortablePairs;
    use crate::view::Inputs;
    use crate::{Input, Isa};

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
        // exp2 has an error below 2⁻²¹, and its argument, below 2⁹ as logits are, an error of 2⁻¹⁵. Then the
        // weight is rounded.
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
        }
    }

    #[test]
    fn logits_that_16_bits_blur_are_refused() {
        let mut p = Problem::new(1, 1, 64, 64, DType::F16);
        // √2 / √12 / 46000 · 18 is just below 2⁻¹¹ / 3.
        let norms = |product: f32| extent(product.sqrt() / 3.0, product.sqrt());
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_some());
        assert!(logit_factors(&p, norms(8.0 * 19.0), norms(8.0 * 19.0)).is_none());
        p.score.scale = Some(-1.0);
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_none());
        p.dtypes = DType::Bf16.into();
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_some());
    }

    /// Whether 16 bits are accurate enough for `rows` rows of V: normal draws, modified by `change`.
    fn is_fine(dtype: DType, rows: usize, dim: usize, change: impl Fn(&mut [f32])) -> bool {
        let problem = Problem::new(1, 1, 64, dim, DType::F32).with_seq_kv(rows, Layout::Bhsd);
        let mut rng = SmallRng::seed_from_u64(7);
        let mut normal = || {
            let (radius, angle): (f32, f32) = (rng.random_range(1e-6..1.0), rng.random_range(0.0..6.3));
            (-2.0 * radius.ln()).sqrt() * angle.cos()
        };
        let mut v: Vec<f32> = (0..rows * dim).map(|_| normal()).collect();
        change(&mut v);
        let q = vec![1.0; 64 * dim];
        let inputs = [&q[..], &v, &v].map(Input::from);
        let inputs = Inputs::views(&problem, inputs, KeyPlaces::ROWS).unwrap();
        // The bounds are those of a 16-bit type, but the elements stay f32 here.
        let of_type = Problem { dtypes: dtype.into(), ..problem.clone() };
        let plan = CpuPlan::with_isa(&of_type, Isa::PortableIntegers);
        let sequences = of_type.sequences(&Operands::default()).unwrap();
        let of = HeadsOf {
            problem: &of_type,
            sequences: &sequences,
            inputs,
            together: 1,
            fits: plan.isa.is_for(&of_type),
            largest_factor: 1.0,
            has_factors: false,
        };
        let heads = Heads::new(PortablePairs, of, &plan).unwrap();
        heads.value_factors(HeadRows::all(inputs.v, sequences[0].kv, 0)).is_some()
    }

    #[test]
    fn normal_draws_of_v_are_fine() {
        for (rows, dim) in [(16, 64), (33, 64), (100, 48), (512, 64), (700, 128), (2048, 256), (16384, 64)] {
            for dtype in [DType::F16, DType::Bf16] {
                for factor in [1.0, 1e-4, 300.0] {
                    assert!(
                        is_fine(dtype, rows, dim, |v| v.iter_mut().for_each(|x| *x *= factor)),
                        "{dtype} {rows} {dim} {factor}"
                    );
                }
                // Columns of different sizes, one of zeros, and a mean that is not 0.
                let columns = |v: &mut [f32]| {
                    v.iter_mut().enumerate().for_each(|(i, x)| *x *= (i % dim) as f32 / dim as f32 * 100.0);
                };
                assert!(is_fine(dtype, rows, dim, columns), "{dtype} {rows} {dim}");
                assert!(is_fine(dtype, rows, dim, |v| v.iter_mut().for_each(|x| *x += 2.0)));
            }
        }
    }

    #[test]
    fn large_elements_of_v_are_refused() {
        for dtype in [DType::F16, DType::Bf16] {
            for (rows, at) in [(16, 0), (17, 16), (100, 5), (512, 0), (512, 300), (512, 511)] {
                // 8 significant bits represent 100 beside a normal draw accurately enough.
                let large = [100.0, 1000.0, 6e4].into_iter().skip(usize::from(dtype == DType::Bf16));
                for large in large {
                    assert!(!is_fine(dtype, rows, 64, |v| v[at * 64 + 5] = large), "{dtype} {rows} {at}");
                    // A large element in every column, then a large row.
                    let all = |v: &mut [f32]| (0..64).for_each(|d| v[(at + d) % rows * 64 + d] = large);
                    assert!(!is_fine(dtype, rows, 64, all), "{dtype} {rows} {at}");
                    assert!(!is_fine(dtype, rows, 64, |v| v[at * 64..][..64].fill(large)));
                }
                assert!(!is_fine(dtype, rows, 64, |v| v[at * 64 + 5] = f32::NAN));
                assert!(!is_fine(dtype, rows, 64, |v| v[at * 64 + 5] = f32::INFINITY));
                assert!(!is_fine(dtype, rows, 64, |v| v[at * 64 + 5] = 1e30));
            }
        }
    }

    #[test]
    fn small_rows_and_quiet_stretches_of_v_are_refused() {
        for dtype in [DType::F16, DType::Bf16] {
            let small = if dtype == DType::F16 { 0.05 } else { 0.005 };
            let shrink = |x: &mut f32| *x *= small;
            assert!(!is_fine(dtype, 512, 64, |v| v[40 * 64..41 * 64].iter_mut().for_each(shrink)));
            // Sixteen small keys of one column, at the beginning or later, and rows of zeros.
            for first in [0, 48, 496] {
                let stretch = |v: &mut [f32]| (first..first + 16).for_each(|row| v[row * 64 + 5] *= small);
                assert!(!is_fine(dtype, 512, 64, stretch), "{dtype} {first}");
            }
            assert!(!is_fine(dtype, 512, 64, |v| v[40 * 64..41 * 64].fill(0.0)));
            assert!(is_fine(dtype, 512, 64, |v| v.fill(0.0)));
            // Too few keys to determine a scale.
            assert!(!is_fine(dtype, 15, 64, |_| {}));
        }
    }

    /// The scans of the instruction set agree with those of plain Rust.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn scans_of_the_instruction_set_agree_with_plain_rust() {
        let Some(vnni) = crate::simd::Avx512Vnni::detect() else { return };
        for dim in [1, 15, 16, 17, 40, 64, 100] {
            let elements: Vec<half::f16> =
                (0..dim * 9).map(|i| half::f16::from_f32((i * 37 % 101) as f32 - 50.0)).collect();
            let rows = || elements.chunks_exact(dim).map(Elements::F16);
            let columns = |mut of: Columnwise, add: &dyn Fn(&mut Columnwise)| {
                add(&mut of);
                of
            };
            assert_eq!(
                columns(Columnwise::new(dim), &|c| vnni.add_columns(rows(), c)),
                columns(Columnwise::new(dim), &|c| PortablePairs.add_columns(rows(), c))
            );
            // Sums of small integers are exact in any order.
            assert_eq!(vnni.extent(rows()), PortablePairs.extent(rows()));
            let factors = vec![2.0; dim];
            assert_eq!(vnni.row_norms(rows(), &factors), PortablePairs.row_norms(rows(), &factors));
            let words = |fill: &dyn Fn(&mut [f32])| {
                let mut to = vec![0.0; 5 * dim];
                fill(&mut to);
                to.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            assert_eq!(
                words(&|to| vnni.row_pairs(rows(), &factors, to)),
                words(&|to| PortablePairs.row_pairs(rows(), &factors, to))
            );
            for factor in [1.25, -0.3, 2000.0] {
                let of = dim.div_ceil(2);
                assert_eq!(
                    words(&|to| vnni.integers(rows().take(5), factor, to, of)),
                    words(&|to| PortablePairs.integers(rows().take(5), factor, to, of))
                );
            }
        }
    }
}
