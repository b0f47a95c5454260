//! Attention with numbers as sums of bf16 terms, whose products AMX computes (split-bf16): the conversion,
//! and the conditions under which the result is accurate.
//!
//! A bf16 has 8 significant bits, so a bf16 number is one term, and an f16 number is exactly two. Products of
//! terms are exact and are summed in f32. Logits are the sums of all products, so only these sums round.
//! Weights have as many terms as the inputs. For bf16, weights are rounded to the input type, as GPU kernels
//! do. For f16, weights have 16 bits, and the products of the low terms of weight and V are left out; they
//! are below 2⁻¹⁷ of the other products.
//!
//! f32 numbers would need three terms and six products. That was tried, and was no faster than FMAs for short
//! sequences.
//!
//! # Bounds
//! The product of a weight and an element of V has a relative error of 2⁻⁸ for bf16, from rounding the
//! weight, and of 2⁻¹⁶ for f16. Q, K and V are not rounded, and no element affects the error of another. So a
//! large element, visible or hidden, does not increase the errors of the others.
//!
//! AMX treats subnormal inputs as 0 and flushes subnormal results to 0. A head is computed in f32 if that
//! could be visible: if Q, K or V has an element above 2⁶⁰, or V has an element below 2⁻⁸⁰ that is not 0.
//! Heads with elements that are not finite are computed in f32 too, because their low terms would be NaN.

use std::sync::OnceLock;

use problem::{DType, Span};

use crate::Elements;
use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows, HeadsOf};
use crate::simd::{CHUNK, HasTiles, Magnitudes, Rows, Simd, Tiles};
use crate::tile::{MAX_WIDTH, Step};
use crate::view::Any;

/// Rows of a tile, which are also its f32 columns.
pub(crate) const TILE: usize = 16;
/// Number of terms in a row of a tile, over which a product sums. A row has half as many words.
pub(crate) const DEPTH: usize = 32;
/// Maximum magnitude of an element. Its product with a flushed subnormal number is negligible in a logit.
const LARGEST: f32 = (1u64 << 60) as f32;
/// Minimum magnitude of a non-zero element of V. Its products with weights above 2⁻⁴⁶ are normal numbers.
const LEAST_VALUE: f32 = 1.0 / (1u128 << 80) as f32;
/// Maximum softmax scale.
const LARGEST_SCALE: f32 = (1 << 24) as f32;

/// Which heads of a problem are computed with terms. Each is determined on first use.
pub(crate) struct Heads<'a, H> {
    tiles: H,
    of: HeadsOf<'a>,
    queries: Vec<OnceLock<bool>>,
    keys: Vec<OnceLock<bool>>,
}

impl<'a, H: HasTiles> Heads<'a, H> {
    /// `None` if the problem is not suited to terms.
    pub(crate) fn new(tiles: H, of: HeadsOf<'a>) -> Option<Self> {
        let p = of.problem;
        let fits = of.fits && p.softmax_scale().abs() * of.largest_factor <= LARGEST_SCALE;
        let locks = |count| (0..count).map(|_| OnceLock::new()).collect();
        let (queries, keys) = (p.batch * p.heads_q / of.together, p.batch * p.heads_kv);
        fits.then(|| Heads { tiles, of, queries: locks(queries), keys: locks(keys) })
    }

    /// The magnitudes of the elements of a sequence in a head.
    fn magnitudes(&self, view: Any<'_>, span: Span, head: usize) -> Magnitudes {
        self.tiles.magnitudes(HeadRows::all(view, span, head).rows())
    }

    /// Whether a head is computed with terms.
    fn fits(&self, batch: usize, head: usize) -> bool {
        let HeadsOf { problem: p, sequences, inputs, together, .. } = &self.of;
        let (kv, sequence) = (head / p.group_size(), &sequences[batch]);
        // False for NaN.
        let ordinary = |of: Magnitudes| of.largest <= LARGEST;
        let queries =
            || (head..head + together).all(|head| ordinary(self.magnitudes(inputs.q, sequence.q, head)));
        let keys = || {
            let values = self.magnitudes(inputs.v, sequence.kv, kv);
            values.least >= LEAST_VALUE
                && ordinary(values)
                && ordinary(self.magnitudes(inputs.k, sequence.kv, kv))
        };
        *self.queries[(batch * p.heads_q + head) / together].get_or_init(queries)
            && *self.keys[batch * p.heads_kv + kv].get_or_init(keys)
    }
}

impl<H: HasTiles> Faster for Heads<'_, H> {
    type Arithmetic<'a>
        = Terms<H::Tiles<'a>>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Terms<H::Tiles<'_>>)) -> bool {
        let fits = self.fits(batch, head);
        if fits {
            let terms = if self.of.problem.dtypes.q == DType::Bf16 { 1 } else { 2 };
            self.tiles.within(|tiles| work(Terms { tiles, terms }));
        }
        fits
    }
}

/// bf16 terms. A word is a pair of terms, along the head dim in Q and K, along the keys in V, padded with
/// zeros to whole tiles. A row of Q or K holds all of one term before the next term.
#[derive(Clone, Copy)]
pub(crate) struct Terms<S> {
    tiles: S,
    terms: usize,
}

impl<S: Tiles> Arithmetic for Terms<S> {
    const LANES: usize = TILE;

    fn words(self, dim: usize) -> usize {
        self.terms * dim.next_multiple_of(DEPTH) / 2
    }

    fn words_out(self, dim: usize) -> usize {
        dim.next_multiple_of(TILE)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let words = to.len();
        self.tiles.terms(std::iter::once(row), self.terms, negate, to, words);
    }

    fn keys<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim());
        // Tiles that reach beyond the last row give logits that are not read.
        let to = room.resize(rows.range.len().next_multiple_of(DEPTH) * ld);
        self.tiles.terms(rows.rows(), self.terms, false, to, ld);
        Rows { data: to, ld }
    }

    /// Columns of V as rows, all of one term before the next term.
    fn values<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let (pairs, dim) = (rows.range.len().next_multiple_of(DEPTH) / 2, self.words_out(rows.view.dim()));
        let (to, by_rows) = room.resize(2 * self.terms * pairs * dim).split_at_mut(self.terms * pairs * dim);
        self.tiles.row_pairs(rows.rows(), self.terms, by_rows, dim);
        for (from, to) in by_rows.chunks_exact(pairs * dim).zip(to.chunks_exact_mut(pairs * dim)) {
            self.tiles.vectors().transpose(from, dim, to, pairs, pairs, dim);
        }
        Rows { data: to, ld: pairs }
    }

    fn step(self, step: Step<'_>) {
        self.tiles.step(step, self.terms);
    }

    fn weights(self, _: usize) -> usize {
        // Logits, and the terms of weights, for a chunk of keys.
        (2 + self.terms) * CHUNK / 2 * MAX_WIDTH
    }
}
