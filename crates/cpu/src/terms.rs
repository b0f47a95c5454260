//! Attention with numbers as sums of bf16 terms, whose products are AMX's: when it is right, and how numbers become terms.
//!
//! A bf16 has 8 significant bits, so a bf16 number is one term, and an f16 number exactly two. Products of terms are exact, and
//! are summed in f32. Logits are sums of all products, so nothing is lost but in these sums. Weights have as many terms as
//! the inputs: for bf16 they are rounded to the input type, as GPU kernels do; for f16 they have 16 bits, and their products
//! with V lack those of both low terms, which are below 2⁻¹⁷ of the others.
//!
//! f32 numbers would be three terms, and six products of them: tried, and no faster than FMAs for short sequences.
//!
//! # Bounds
//! Each product of a weight and an element of V errs by a share of itself: by 2⁻⁸ for bf16, as the weight is rounded, and
//! by 2⁻¹⁶ for f16. Neither Q, K nor V is rounded, and no element has a part in the error of another. So a large element,
//! visible or hidden, costs the others nothing.
//!
//! AMX takes subnormal numbers for 0, and makes 0 of subnormal results. A head is computed in f32 where that could be
//! seen: where Q or K has an element above 2⁶⁰, or V has one that is not 0 and below 2⁻⁸⁰ or above 2⁶⁰. So are heads with
//! elements that are not finite, whose low terms would be NaN.

use std::sync::OnceLock;

use problem::{DType, Problem};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows};
use crate::simd::{CHUNK, HasTiles, Magnitudes, Rows, Simd, Tiles};
use crate::tile::{MAX_WIDTH, Step};
use crate::view::{Inputs, View};
use crate::{CpuPlan, Element, Elements};

/// Rows and columns of a tile of f32.
pub(crate) const TILE: usize = 16;
/// Terms of a row of a tile, which are summed over; as many words are half of it.
pub(crate) const DEPTH: usize = 32;
/// Largest number: times a subnormal one it is nothing to a logit.
const LARGEST: f32 = (1u64 << 60) as f32;
/// Least of V's magnitudes but 0: times weights above 2⁻⁴⁶ it is a normal number.
const LEAST_VALUE: f32 = 1.0 / (1u128 << 80) as f32;
/// Largest scale.
const LARGEST_SCALE: f32 = (1 << 24) as f32;

/// Which heads of a problem are computed so, each found when it is first asked for.
pub(crate) struct Heads<'a, T, H> {
    tiles: H,
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    /// Query heads that one task holds rows of.
    together: usize,
    queries: Vec<OnceLock<bool>>,
    keys: Vec<OnceLock<bool>>,
}

impl<'a, T: Element, H: HasTiles> Heads<'a, T, H> {
    /// `None` if the problem is not one for terms.
    pub(crate) fn new(
        tiles: H,
        problem: &'a Problem,
        inputs: Inputs<'a, T>,
        plan: &CpuPlan,
        together: usize,
    ) -> Option<Self> {
        let p = problem;
        let fits = plan.isa.is_for(p) && p.softmax_scale().abs() <= LARGEST_SCALE;
        let locks = |count| (0..count).map(|_| OnceLock::new()).collect();
        fits.then(|| Heads {
            tiles,
            problem,
            inputs,
            together,
            queries: locks(p.batch * p.heads_q / together),
            keys: locks(p.batch * p.heads_kv),
        })
    }

    /// How large the elements of a head's rows are.
    fn magnitudes(&self, view: View<'_, T>, batch: usize, head: usize, rows: usize) -> Magnitudes {
        self.tiles.magnitudes(HeadRows::all(view, batch, head, rows).rows())
    }

    /// Whether a head is computed so.
    fn fits(&self, batch: usize, head: usize) -> bool {
        let p = self.problem;
        let kv = head / p.group_size();
        // Not so for NaN.
        let ordinary = |of: Magnitudes| of.largest <= LARGEST;
        let queries = || {
            (head..head + self.together)
                .all(|head| ordinary(self.magnitudes(self.inputs.q, batch, head, p.seq_q)))
        };
        let keys = || {
            let values = self.magnitudes(self.inputs.v, batch, kv, p.seq_kv);
            values.least >= LEAST_VALUE
                && ordinary(values)
                && ordinary(self.magnitudes(self.inputs.k, batch, kv, p.seq_kv))
        };
        *self.queries[(batch * p.heads_q + head) / self.together].get_or_init(queries)
            && *self.keys[batch * p.heads_kv + kv].get_or_init(keys)
    }
}

impl<T: Element, H: HasTiles> Faster for Heads<'_, T, H> {
    type Arithmetic<'a>
        = Terms<H::Tiles<'a>>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Terms<H::Tiles<'_>>)) -> bool {
        let fits = self.fits(batch, head);
        if fits {
            let terms = if T::DTYPE == DType::Bf16 { 1 } else { 2 };
            self.tiles.within(|tiles| work(Terms { tiles, terms }));
        }
        fits
    }
}

/// bf16 terms: words are pairs of them, along the head dimension in Q and K, along the keys in V, filled up with zeros to whole
/// tiles. A row of Q or K has all of one term before the next.
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

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim);
        // Tiles that reach beyond the last row give logits that nobody reads.
        let to = room.resize(rows.range.len().next_multiple_of(DEPTH) * ld);
        self.tiles.terms(rows.rows(), self.terms, false, to, ld);
        Rows { data: to, ld }
    }

    /// Columns of V as rows, all of one term before the next.
    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let (pairs, dim) = (rows.range.len().next_multiple_of(DEPTH) / 2, self.words_out(rows.view.dim));
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
        // Logits, and the terms of weights, for a chunk of them.
        (2 + self.terms) * CHUNK / 2 * MAX_WIDTH
    }
}
