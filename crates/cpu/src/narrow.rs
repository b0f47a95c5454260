//! Attention with 16-bit factors: when it is right, and by which factors.
//!
//! Q, K, V and the weights become 16-bit integers, and their products are summed in 32 bits: exactly. The only errors
//! are those of rounding to integers:
//! - Q and K have one factor each a head, the largest by which the integer products of their rows fit 32 bits.
//! - The weights of a window of [`WINDOW`] keys have a factor for each query: the largest becomes 2^[`WEIGHT_BITS`].
//! - V has a factor for each column of a head, the largest by which the sums of products over a window fit 32 bits.
//!
//! A large element makes its factor small, and so blurs other elements, also for rows that a mask hides the large
//! element from. The errors are therefore bounded here, head by head, for every row that attention may compute from
//! these inputs, whatever the weights and the mask are; a head beyond a bound is computed in f32. The LSE has no
//! rounded weights, so calls that ask for an LSE are computed in f32 throughout.
//!
//! # Bounds
//! `u` is the unit roundoff of the input type. A rounding to an integer errs by at most 1/2, and by 1/√12 in the root
//! mean square; errors of different elements are taken for independent.
//! - **Logits** ([`logit_factors`]): the error of a logit of any row and key is at most u/3 (root mean square). A weight
//!   has that as its relative error.
//! - **V** ([`Heads::value_factors`]): an element of O is a mean of a column of V, so its error is at most that of the column's
//!   elements: 1/(2 f) for the column's factor f, and e = 1/(√12 f) in the root mean square.
//!   - *Column by column*: e ≤ u/2 · s. The keys are cut into sequences of [`WINDOW`], and the column's scale s is the
//!     least root mean square of a sequence, each sequence's largest element left out. So one large element changes s
//!     little, and no stretch of the column, the first included, has elements much smaller than s.
//!   - *Row by row*: a row of O with one heavy key is that key's row of V, also where s is no measure of it. So
//!     √Σ(e/s)² ≤ u/3 · √Σ(v/s)², summed over the columns, for each row of V.
//! - **Weights**: an integer weight errs by 2⁻¹³/√12 of the window's largest, so an element of O by at most that times
//!   the norm of the column's elements in the window (windows count by their largest weights, which are at most their
//!   sum). This is bounded in the same two ways, by [`WEIGHTS_SHARE`] · u. The bound matters for a large element at a
//!   light key, whose integer weight is a few units.
//!
//! So the error of an element of O is a few u times its column's scale, not always a few u times the element itself: an
//! element that is much smaller than its column's scale has a larger relative error. The bounds are those of a norm.

use std::sync::OnceLock;

use problem::{KeyRange, Problem};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows};
use crate::simd::{Columnwise, Extent, Pairs, RowNorms, Rows, Simd};
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
/// Root mean square of the error of rounding to an integer: 1/√12.
const ROUNDING: f64 = 0.288_675_134_594_812_9;
/// Unit roundoffs of the input type that rounding to integers may cost: in the logits, and in a row of V.
const SHARE: f64 = 1.0 / 3.0;
/// Unit roundoffs that it may cost in a column of V.
const COLUMN_SHARE: f64 = 1.0 / 2.0;
/// Unit roundoffs that rounding the weights of a window may cost, where the heaviest key has the least elements. Normal
/// draws have up to 1.7 in a column.
const WEIGHTS_SHARE: f64 = 2.0;
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
/// The error of a logit q·k·scale is scale · √((‖k‖/fq)² + (‖q‖/fk)²) / √12. The head's largest norms bound it for all
/// rows, those that a mask hides included: a large row of Q or K costs the other rows no more than is allowed.
fn logit_factors(problem: &Problem, q: Extent, k: Extent) -> Option<(f32, f32)> {
    let (for_q, for_k) = (q.factor()?, k.factor()?);
    let [of_q, of_k] = [k.norm() / for_q, q.norm() / for_k].map(f64::from);
    // Not `hypot`: the C library has had a version of its own since glibc 2.35, which a wheel for older ones cannot use.
    let error = f64::from(problem.softmax_scale().abs()) * (of_q * of_q + of_k * of_k).sqrt() * ROUNDING;
    (error <= SHARE * problem.dtype.unit_roundoff()).then_some((for_q, for_k))
}

/// What the columns of a head of V are judged by.
#[derive(Clone, Debug, PartialEq)]
struct Columns {
    /// The most that a window's products can be: the largest sum of magnitudes over a window, or 8 times the largest
    /// magnitude.
    reach: Vec<f32>,
    /// The largest sum of squares over a window.
    loudest: Vec<f32>,
    /// The least sum of squares over [`WINDOW`] keys in sequence, without the largest of each sequence.
    quietest: Vec<f32>,
    /// Whether all elements are finite, and so are their squares.
    finite: bool,
}

/// The factor and the scale of a column of V.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Column {
    factor: f32,
    /// 1/s; 0 for a column of zeros, which rounding leaves as they are.
    inverse_scale: f32,
}

impl Columns {
    fn new(dim: usize) -> Columns {
        let of = |x| vec![x; dim];
        Columns { reach: of(0.0), loudest: of(0.0), quietest: of(f32::INFINITY), finite: true }
    }

    /// Takes over the keys of a window.
    fn add_window(&mut self, window: &Columnwise) {
        for (d, &sum) in window.sums.iter().enumerate() {
            let largest = window.largest[d];
            let squares = largest * largest + window.others[d];
            self.finite &= sum.is_finite() && squares.is_finite();
            self.reach[d] = self.reach[d].max(sum).max(8.0 * largest);
            self.loudest[d] = self.loudest[d].max(squares);
        }
    }

    /// Takes over [`WINDOW`] keys in sequence.
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
            // With fewer keys than a window the scale is infinite.
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

/// The error of a sum of products of a window's integer weights with numbers of such a sum of squares, the largest
/// weight being 1.
fn weight_error(squares: f32) -> f64 {
    ROUNDING * f64::from(squares).sqrt() / f64::from(WEIGHT_BITS).exp2()
}

/// Whether integers are enough for the rows of V. Norms are of rows whose columns are divided by their scales: the least
/// one, squared, and the largest sum of squares over a window.
fn rows_are_fine(roundoff: f64, columns: &[Column], least: f32, loudest: f32) -> bool {
    let error = |c: &Column| ROUNDING / f64::from(c.factor) * f64::from(c.inverse_scale);
    let of_values = columns.iter().map(|c| error(c).powi(2)).sum::<f64>().sqrt();
    let least = f64::from(least).sqrt();
    of_values <= SHARE * roundoff * least && weight_error(loudest) <= WEIGHTS_SHARE * roundoff * least
}

/// The factors of every head of a problem, each found when it is first asked for.
pub(crate) struct Heads<'a, T, P> {
    pairs: P,
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    block_kv: usize,
    /// Query heads that one task holds rows of; they have one factor.
    together: usize,
    queries: Vec<OnceLock<Extent>>,
    keys: Vec<OnceLock<Extent>>,
    values: Vec<OnceLock<Option<Vec<f32>>>>,
}

impl<'a, T: Element, P: Pairs> Heads<'a, T, P> {
    /// `None` if the problem is not one for 16 bits: f32, or so few rows that preparing K and V is most of the work.
    pub(crate) fn new(
        pairs: P,
        problem: &'a Problem,
        inputs: Inputs<'a, T>,
        plan: &CpuPlan,
        together: usize,
    ) -> Option<Self> {
        let p = problem;
        let fits = plan.isa.is_for(p) && p.head_dim <= MAX_DIM;
        let kv_heads = p.batch * p.heads_kv;
        fits.then(|| Heads {
            pairs,
            problem,
            inputs,
            block_kv: plan.block_kv,
            together,
            queries: (0..p.batch * p.heads_q / together).map(|_| OnceLock::new()).collect(),
            keys: (0..kv_heads).map(|_| OnceLock::new()).collect(),
            values: (0..kv_heads).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The factors of V's columns, if 16 bits are enough for the head.
    fn value_factors(&self, values: HeadRows<'_, T>) -> Option<Vec<f32>> {
        let roundoff = self.problem.dtype.unit_roundoff();
        let columns = self.columns(values).judge(roundoff)?;
        let inverse: Vec<f32> = columns.iter().map(|c| c.inverse_scale).collect();
        let (mut least, mut loudest) = (f32::INFINITY, 0.0f32);
        for range in self.windows(values.range.end) {
            let norms: RowNorms = self.pairs.row_norms(HeadRows { range, ..values }.rows(), &inverse);
            (least, loudest) = (least.min(norms.least), loudest.max(norms.sum));
        }
        rows_are_fine(roundoff, &columns, least, loudest)
            .then(|| columns.into_iter().map(|c| c.factor).collect())
    }

    /// The arithmetic of a head, if 16 bits are enough for it.
    fn arithmetic(&self, batch: usize, head: usize) -> Option<Narrowed<'_, P>> {
        let p = self.problem;
        let kv = head / p.group_size();
        let (at, at_kv) = ((batch * p.heads_q + head) / self.together, batch * p.heads_kv + kv);
        let of_queries = || {
            let heads = head..head + self.together;
            self.pairs
                .extent(heads.flat_map(|head| HeadRows::all(self.inputs.q, batch, head, p.seq_q).rows()))
        };
        let queries = self.queries[at].get_or_init(of_queries);
        let keys = self.keys[at_kv]
            .get_or_init(|| self.pairs.extent(HeadRows::all(self.inputs.k, batch, kv, p.seq_kv).rows()));
        let (q, k) = logit_factors(p, *queries, *keys)?;
        let values = HeadRows::all(self.inputs.v, batch, kv, p.seq_kv);
        let v = self.values[at_kv].get_or_init(|| self.value_factors(values)).as_deref()?;
        Some(Narrowed { pairs: self.pairs, factors: Factors { q, k, v } })
    }

    /// What V's columns are judged by.
    fn columns(&self, values: HeadRows<'_, T>) -> Columns {
        let dim = values.view.dim;
        let (mut columns, mut sums) = (Columns::new(dim), Columnwise::new(dim));
        let of = |sums: &mut Columnwise, range| {
            sums.clear();
            self.pairs.add_columns(HeadRows { range, ..values }.rows(), sums);
        };
        for range in self.windows(values.range.end) {
            of(&mut sums, range);
            columns.add_window(&sums);
            // A window at the end of a block may have fewer keys: those before it complete the sequence.
            if range.len() < WINDOW && range.end >= WINDOW {
                of(&mut sums, KeyRange { start: range.end - WINDOW, end: range.end });
            }
            if range.end >= WINDOW {
                columns.add_sequence(&sums);
            }
        }
        columns
    }

    /// The windows of every step: those of each block of keys.
    fn windows(&self, keys: usize) -> impl Iterator<Item = KeyRange> {
        let block_kv = self.block_kv;
        (0..keys).step_by(block_kv).flat_map(move |block| {
            let end = (block + block_kv).min(keys);
            (block..end).step_by(WINDOW).map(move |start| KeyRange { start, end: (start + WINDOW).min(end) })
        })
    }
}

impl<T: Element, P: Pairs> Faster for Heads<'_, T, P> {
    type Arithmetic<'a>
        = Narrowed<'a, P>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Narrowed<'_, P>)) -> bool {
        self.arithmetic(batch, head).map(work).is_some()
    }
}

/// 16-bit factors: words are pairs of integers, along the head dimension in Q and K, along the keys in V.
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

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim);
        let to = room.resize(rows.range.len() * ld);
        self.pairs.integers(rows.rows(), self.factors.k, to, ld);
        Rows { data: to, ld }
    }

    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = rows.view.dim;
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
    use problem::{DType, Layout};
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    use super::*;
    use crate::simd::PortablePairs;
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
        p.dtype = DType::Bf16;
        assert!(logit_factors(&p, norms(8.0 * 18.0), norms(8.0 * 18.0)).is_some());
    }

    /// `rows` rows of V: normal draws, then what `change` makes of them. Whether 16 bits are enough for them.
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
        let inputs = Inputs::check(&problem, [&q[..], &v, &v].map(Input::from)).unwrap();
        // The bounds are those of a 16-bit type; the elements are as they are here.
        let of_type = Problem { dtype, ..problem.clone() };
        let plan = CpuPlan::with_isa(&of_type, Isa::PortableIntegers);
        let heads = Heads::new(PortablePairs, &of_type, inputs, &plan, 1).unwrap();
        heads.value_factors(HeadRows::all(inputs.v, 0, 0, rows)).is_some()
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
                // Columns of other sizes, one of zeros, and a mean that is not 0.
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
                // 8 bits hold 100 beside a normal draw.
                let large = [100.0, 1000.0, 6e4].into_iter().skip(usize::from(dtype == DType::Bf16));
                for large in large {
                    assert!(!is_fine(dtype, rows, 64, |v| v[at * 64 + 5] = large), "{dtype} {rows} {at}");
                    // One such element in every column, and such a row.
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
            // Sixteen keys of one column, at the beginning or later, and rows of zeros.
            for first in [0, 48, 496] {
                let stretch = |v: &mut [f32]| (first..first + 16).for_each(|row| v[row * 64 + 5] *= small);
                assert!(!is_fine(dtype, 512, 64, stretch), "{dtype} {first}");
            }
            assert!(!is_fine(dtype, 512, 64, |v| v[40 * 64..41 * 64].fill(0.0)));
            assert!(is_fine(dtype, 512, 64, |v| v.fill(0.0)));
            // Too few keys to tell what is large.
            assert!(!is_fine(dtype, 15, 64, |_| {}));
        }
    }

    /// The scans of the instruction set are those of plain Rust.
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
            // Sums of small whole numbers are exact in any order.
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
