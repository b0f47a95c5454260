//! The online softmax on 16-bit integers, for any vectors that multiply pairs of 16-bit integers.
//!
//! A word has 32 bits: a pair of 16-bit integers. It is stored as an f32, on which no f32 operation is done.
//! The code is generic, so that plain Rust ([`super::PortablePairs`]) computes the same as AVX-512 VNNI on
//! any machine.

use super::gemm::{Columns, Product, Rows, gemm};
use super::{MAX_LANES, Simd};
use crate::Elements;
use crate::narrow::{WEIGHT_BITS, WINDOW};
use crate::programs;
use crate::tile::{self, MAX_WIDTH, Panel, Step};
use crate::view::ElementRows;

/// The vector type of `P`.
type Vector<P> = <<P as Pairs>::Vectors as Simd>::V;

/// Vectors that multiply pairs of 16-bit integers. A value exists only if the processor has the instructions.
///
/// Methods before [`Pairs::integers`] are fast only when they are inlined into a function that is compiled
/// for the instruction set. The methods from there on are compiled for it.
pub(crate) trait Pairs: Copy + Send + Sync + 'static {
    /// The vectors of words.
    type Vectors: Simd;

    fn vectors(self) -> Self::Vectors;

    /// `sum` plus the sums of the products of the pairs of `a` and `b`, as 32-bit integers.
    fn add_products(self, a: Vector<Self>, b: Vector<Self>, sum: Vector<Self>) -> Vector<Self>;

    /// 32-bit integers as f32.
    fn to_f32(self, sums: Vector<Self>) -> Vector<Self>;

    /// Rounds two vectors to the nearest integers (ties to even) and combines them as pairs, lane by lane.
    /// The integers must fit 16 bits.
    fn pair(self, first: Vector<Self>, second: Vector<Self>) -> Vector<Self>;

    /// A vector of elements of a row from `at` on, with zeros after the last.
    fn load(self, from: Elements<'_>, at: usize) -> Vector<Self>;

    /// Writes the first words of the vector: as many as `to` has, at most a vector.
    fn store(self, words: Vector<Self>, to: &mut [f32]);

    /// Rows as integers `round(factor · x)`, saturated to 16 bits, `words` words per row. Neighbours in a row
    /// are pairs. The partner of an odd last element is 0.
    fn integers<'a>(self, rows: impl ElementRows<'a>, factor: f32, to: &mut [f32], words: usize);

    /// [`row_pairs`], compiled for the instruction set.
    fn row_pairs<'a>(self, rows: impl ElementRows<'a>, factors: &[f32], to: &mut [f32]);

    /// [`extent`], compiled for the instruction set.
    fn extent<'a>(self, rows: impl ElementRows<'a>) -> Extent;

    /// [`add_columns`], compiled for the instruction set.
    fn add_columns<'a>(self, rows: impl ElementRows<'a> + Clone, columns: &mut Columnwise);

    /// [`row_norms`], compiled for the instruction set.
    fn row_norms<'a>(self, rows: impl ElementRows<'a>, factors: &[f32]) -> RowNorms;

    /// [`run_step`], compiled for the instruction set.
    fn step(self, step: Step<'_>);
}

/// The magnitude of the elements of some rows. `norm_squared` is NaN if an element is NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Extent {
    /// Largest magnitude of an element.
    pub max: f32,
    /// Largest squared Euclidean norm of a row.
    pub norm_squared: f32,
}

/// Measures of some rows, column by column. A sum is not finite if an element is not finite.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columnwise {
    /// Sums of magnitudes.
    pub sums: Vec<f32>,
    /// Largest magnitudes.
    pub largest: Vec<f32>,
    /// Sums of the squares of all elements but the largest.
    pub others: Vec<f32>,
}

impl Columnwise {
    /// For no rows, with `dim` columns.
    pub(crate) fn new(dim: usize) -> Columnwise {
        Columnwise { sums: vec![0.0; dim], largest: vec![0.0; dim], others: vec![0.0; dim] }
    }

    /// Resets to no rows.
    pub(crate) fn clear(&mut self) {
        [&mut self.sums, &mut self.largest, &mut self.others].into_iter().for_each(|x| x.fill(0.0));
    }
}

/// Squared norms of some rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RowNorms {
    /// The smallest squared norm.
    pub least: f32,
    /// The sum of the squared norms.
    pub sum: f32,
}

/// The magnitude of the elements of some rows.
#[inline(always)]
pub(super) fn extent<'a, P: Pairs>(p: P, rows: impl ElementRows<'a>) -> Extent {
    let s = p.vectors();
    let mut max = s.splat(0.0);
    let mut norm = 0u32;
    for row in rows {
        let mut squares = s.splat(0.0);
        for at in (0..row.len()).step_by(P::Vectors::LANES) {
            let x = p.load(row, at);
            max = s.max(max, magnitude(s, x));
            squares = s.fma(x, x, squares);
        }
        // Sums of squares have the same order as their bits, and the bits of NaN are above all others.
        norm = norm.max(lanes(s, squares).into_iter().sum::<f32>().abs().to_bits());
    }
    let max = lanes(s, max).into_iter().fold(0.0, f32::max);
    Extent { max, norm_squared: f32::from_bits(norm) }
}

/// Adds rows to the measures of their columns.
#[inline(always)]
pub(super) fn add_columns<'a, P: Pairs>(p: P, rows: impl ElementRows<'a> + Clone, columns: &mut Columnwise) {
    let s = p.vectors();
    let Columnwise { sums, largest, others } = columns;
    for at in (0..sums.len()).step_by(P::Vectors::LANES) {
        let old = |of: &[f32]| p.load(Elements::F32(of), at);
        let (mut sum, mut most, mut rest) = (old(sums), old(largest), old(others));
        for row in rows.clone() {
            let x = magnitude(s, p.load(row, at));
            let other = s.select_lt(x, most, x, most);
            sum = s.add(sum, x);
            most = s.select_lt(most, x, x, most);
            rest = s.fma(other, other, rest);
        }
        p.store(sum, &mut sums[at..]);
        p.store(most, &mut largest[at..]);
        p.store(rest, &mut others[at..]);
    }
}

/// The squared norms of rows whose columns are multiplied by `factors`.
#[inline(always)]
pub(super) fn row_norms<'a, P: Pairs>(p: P, rows: impl ElementRows<'a>, factors: &[f32]) -> RowNorms {
    let s = p.vectors();
    let mut norms = RowNorms { least: f32::INFINITY, sum: 0.0 };
    for row in rows {
        let mut squares = s.splat(0.0);
        for at in (0..row.len()).step_by(P::Vectors::LANES) {
            let x = s.mul(p.load(row, at), p.load(Elements::F32(factors), at));
            squares = s.fma(x, x, squares);
        }
        let norm = lanes(s, squares).into_iter().sum::<f32>();
        norms = RowNorms { least: norms.least.min(norm), sum: norms.sum + norm };
    }
    norms
}

/// Rows as integers `round(factor · x)`, with one factor per column. Each row and the next are pairs. The
/// partners of an odd last row are 0.
#[inline(always)]
pub(super) fn row_pairs<'a, P: Pairs>(p: P, mut rows: impl ElementRows<'a>, factors: &[f32], to: &mut [f32]) {
    let s = p.vectors();
    for to in to.chunks_exact_mut(factors.len()) {
        let pair = [rows.next(), rows.next()];
        for at in (0..to.len()).step_by(P::Vectors::LANES) {
            let factor = p.load(Elements::F32(factors), at);
            let [first, second] =
                pair.map(|row| s.mul(row.map_or(s.splat(0.0), |row| p.load(row, at)), factor));
            p.store(p.pair(first, second), &mut to[at..]);
        }
    }
}

/// The larger of `x` and `−x`, lane by lane.
#[inline(always)]
fn magnitude<S: Simd>(s: S, x: S::V) -> S::V {
    s.max(x, s.sub(s.splat(0.0), x))
}

/// The lanes of a vector, followed by zeros.
#[inline(always)]
fn lanes<S: Simd>(s: S, v: S::V) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    s.store(v, &mut lanes);
    lanes
}

/// Elements are pairs of 16-bit integers. The sum of their products, a 32-bit integer, is converted to f32.
/// (Sums start at zero: the bits of 0.0 are the integer 0.)
#[derive(Clone, Copy)]
struct Logits<P>(P);

/// Like [`Logits`], but the sums are multiplied by a factor per lane and added to C.
#[derive(Clone, Copy)]
struct Weighted<P: Pairs, const VECTORS: usize>(P, [Vector<P>; VECTORS]);

impl<P: Pairs> Product<P::Vectors> for Logits<P> {
    #[inline(always)]
    fn add(self, _: P::Vectors, a: Vector<P>, b: Vector<P>, sum: Vector<P>) -> Vector<P> {
        self.0.add_products(a, b, sum)
    }
    #[inline(always)]
    fn finish(self, _: P::Vectors, sum: Vector<P>, _: Vector<P>, _: usize) -> Vector<P> {
        self.0.to_f32(sum)
    }
}

impl<P: Pairs, const VECTORS: usize> Product<P::Vectors> for Weighted<P, VECTORS> {
    #[inline(always)]
    fn add(self, _: P::Vectors, a: Vector<P>, b: Vector<P>, sum: Vector<P>) -> Vector<P> {
        self.0.add_products(a, b, sum)
    }
    #[inline(always)]
    fn finish(self, s: P::Vectors, sum: Vector<P>, old: Vector<P>, v: usize) -> Vector<P> {
        s.fma(self.0.to_f32(sum), self.1[v], old)
    }
}

/// [`tile::run_step`] on integers. Pairs are along the head dim in Q and K, along the keys in V.
#[inline(always)]
pub(super) fn run_step<P: Pairs, const VECTORS: usize>(p: P, step: Step<'_>) {
    let s = p.vectors();
    let Step { panel, block, scale, weights, tile, shown, .. } = step;
    let (keys, width, tall) = (block.keys.len(), VECTORS * P::Vectors::LANES, tile.rows_of(VECTORS));
    let logits = &mut weights[..keys * width];
    gemm::<_, _, _, VECTORS>(s, Logits(p), block.k, &panel.q, logits, [keys, block.k.ld], tall);
    if let Some(shown) = shown {
        programs::hide(shown, logits);
    }
    if block.keys.start < panel.by_all.start || panel.by_all.end < block.keys.end {
        tile::mask::<_, VECTORS>(s, panel, block.keys.start, logits);
    }
    for (window, logits) in logits.chunks_mut(WINDOW * width).enumerate() {
        let pairs = (logits.len() / width).div_ceil(2);
        let max = tile::maximum::<_, VECTORS>(s, logits);
        tile::raise_maximum(s, panel, scale, max);
        let factor = weigh(p, panel, scale, max, logits);
        let Rows { data, ld } = block.v;
        let v = Columns { data: &data[window * WINDOW / 2 * ld..], ld };
        let product = Weighted(p, factor);
        gemm::<_, _, _, VECTORS>(s, product, v, logits, &mut panel.out, [block.dim_v, pairs], tall);
    }
}

/// Turns the logits of a window's keys into weights as pairs of integers, in place. The largest weight of a
/// lane becomes 2^[`WEIGHT_BITS`]. Adds the weights to the panel's sum. `max` holds the largest logits.
/// Returns the factors that turn integers into weights.
#[inline(always)]
fn weigh<P: Pairs, const VECTORS: usize>(
    p: P,
    panel: &mut Panel,
    scale: f32,
    max: [Vector<P>; VECTORS],
    logits: &mut [f32],
) -> [Vector<P>; VECTORS] {
    let (s, lanes) = (p.vectors(), P::Vectors::LANES);
    let keys = logits.len() / (VECTORS * lanes);
    let (scale, bits) = (s.splat(scale), s.splat(WEIGHT_BITS));
    let mut factor = [bits; VECTORS];
    let (mut tops, mut maxima) = ([0.0; MAX_WIDTH], [0.0; MAX_WIDTH]);
    for v in 0..VECTORS {
        let at = v * lanes;
        let (shift, running) = (s.load(&panel.shift[at..]), s.load(&panel.max[at..]));
        // A lane that sees no key here has integer weights of 0, for any factor.
        let choose = |none, some| s.select_lt(max[v], s.splat(f32::MIN), none, some);
        let top = choose(shift, tile::finite(s, s.mul(max[v], scale)));
        let max = choose(running, max[v]);
        let distance = tile::select_large(s, top, s.mul(s.sub(max, running), scale), s.sub(top, shift));
        factor[v] = s.exp2(s.sub(distance, bits));
        s.store(top, &mut tops[at..]);
        s.store(max, &mut maxima[at..]);
    }
    let raise = tile::minus_shifts::<_, VECTORS>(s, &tops, &maxima, logits).map(|minus| s.add(bits, minus));
    let mut sum = [s.splat(0.0); VECTORS];
    for pair in 0..keys.div_ceil(2) {
        for v in 0..VECTORS {
            let at = (2 * pair * VECTORS + v) * lanes;
            let first = s.exp2(s.fma(s.load(&logits[at..]), scale, raise[v]));
            let mut second = s.splat(0.0);
            if 2 * pair + 1 < keys {
                second = s.exp2(s.fma(s.load(&logits[at + VECTORS * lanes..]), scale, raise[v]));
            }
            sum[v] = s.add(sum[v], s.add(first, second));
            // This overwrites logits that have been read: pair ≤ 2 · pair.
            s.store(p.pair(first, second), &mut logits[(pair * VECTORS + v) * lanes..]);
        }
    }
    for v in 0..VECTORS {
        let old = &mut panel.sum[v * lanes..];
        s.store(s.fma(sum[v], factor[v], s.load(old)), old);
    }
    factor
}
