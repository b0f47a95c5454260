//! Attention with numbers as sums of bf16 terms, whose products are AMX's: when it is right, and how numbers become terms.
//!
//! A bf16 has 8 significant bits, so a bf16 number is one term, and an f16 number exactly two. Products of terms are exact, and
//! are summed in f32. Logits are sums of all products, so nothing is lost but in these sums. Weights have as many terms as
//! the inputs: for bf16 they are rounded to the input type, as GPU kernels do; for f16 they have 16 bits, and their products
//! with V lack those of both low terms, which are below 2⁻¹⁷ of the others.
//!
//! f32 numbers would be three terms, and six products of them: tried, and no faster than FMAs for short sequences.
//!
//! AMX takes subnormal numbers for 0. So that this is never seen, heads with very large or only very small numbers are computed
//! in f32, like those with numbers that are not finite, whose low terms would be NaN.

use std::sync::OnceLock;

use problem::{DType, Problem};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows};
use crate::simd::{Amx, CHUNK, Rows, Simd};
use crate::tile::{MAX_WIDTH, Step};
use crate::view::{Inputs, View};
use crate::{CpuPlan, Element, Elements};

/// Rows and columns of a tile of f32.
pub(crate) const TILE: usize = 16;
/// Terms of a row of a tile, which are summed over; as many words are half of it.
pub(crate) const DEPTH: usize = 32;
/// Largest number: times a subnormal one it is nothing to a logit.
const LARGEST: f32 = (1u64 << 60) as f32;
/// Least of V's largest numbers: times weights above 2⁻⁴⁶ it is a normal number.
const LEAST_VALUE: f32 = 1.0 / (1u128 << 80) as f32;
/// Largest scale.
const LARGEST_SCALE: f32 = (1 << 24) as f32;

/// Which heads of a problem are computed so, each found when it is first asked for.
pub(crate) struct Heads<'a, T> {
    amx: Amx,
    problem: &'a Problem,
    inputs: Inputs<'a, T>,
    /// Query heads that one task holds rows of.
    together: usize,
    queries: Vec<OnceLock<bool>>,
    keys: Vec<OnceLock<bool>>,
}

impl<'a, T: Element> Heads<'a, T> {
    /// `None` if the problem is not one for terms.
    pub(crate) fn new(
        amx: Amx,
        problem: &'a Problem,
        inputs: Inputs<'a, T>,
        plan: &CpuPlan,
        together: usize,
    ) -> Option<Self> {
        let p = problem;
        let fits = plan.isa.is_for(p) && p.softmax_scale().abs() <= LARGEST_SCALE;
        let locks = |count| (0..count).map(|_| OnceLock::new()).collect();
        fits.then(|| Heads {
            amx,
            problem,
            inputs,
            together,
            queries: locks(p.batch * p.heads_q / together),
            keys: locks(p.batch * p.heads_kv),
        })
    }

    /// The largest magnitude of some rows; NaN if one is.
    fn largest(&self, view: View<'_, T>, batch: usize, head: usize, rows: usize) -> f32 {
        self.amx.largest(HeadRows::all(view, batch, head, rows).rows())
    }
}

impl<T: Element> Faster for Heads<'_, T> {
    type Arithmetic<'a>
        = Terms
    where
        Self: 'a;

    fn arithmetic(&self, batch: usize, head: usize) -> Option<Terms> {
        let p = self.problem;
        let kv = head / p.group_size();
        let queries = || {
            (head..head + self.together)
                .all(|head| self.largest(self.inputs.q, batch, head, p.seq_q) <= LARGEST)
        };
        let keys = || {
            let value = self.largest(self.inputs.v, batch, kv, p.seq_kv);
            let values = value == 0.0 || (LEAST_VALUE..=LARGEST).contains(&value);
            values && self.largest(self.inputs.k, batch, kv, p.seq_kv) <= LARGEST
        };
        let fits = *self.queries[(batch * p.heads_q + head) / self.together].get_or_init(queries)
            && *self.keys[batch * p.heads_kv + kv].get_or_init(keys);
        fits.then_some(Terms { amx: self.amx, terms: if T::DTYPE == DType::Bf16 { 1 } else { 2 } })
    }
}

/// bf16 terms: words are pairs of them, along the head dimension in Q and K, along the keys in V, filled up with zeros to whole
/// tiles. A row of Q or K has all of one term before the next.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    amx: Amx,
    terms: usize,
}

impl Arithmetic for Terms {
    const LANES: usize = TILE;

    fn words(self, dim: usize) -> usize {
        self.terms * dim.next_multiple_of(DEPTH) / 2
    }

    fn words_out(self, dim: usize) -> usize {
        dim.next_multiple_of(TILE)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let words = to.len();
        self.amx.terms(std::iter::once(row), self.terms, negate, to, words);
    }

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim);
        // Tiles that reach beyond the last row give logits that nobody reads.
        let to = room.resize(rows.range.len().next_multiple_of(DEPTH) * ld);
        self.amx.terms(rows.rows(), self.terms, false, to, ld);
        Rows { data: to, ld }
    }

    /// Columns of V as rows, all of one term before the next.
    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let (pairs, dim) = (rows.range.len().next_multiple_of(DEPTH) / 2, self.words_out(rows.view.dim));
        let (to, by_rows) = room.resize(2 * self.terms * pairs * dim).split_at_mut(self.terms * pairs * dim);
        self.amx.row_pairs(rows.rows(), self.terms, by_rows, dim);
        for (from, to) in by_rows.chunks_exact(pairs * dim).zip(to.chunks_exact_mut(pairs * dim)) {
            self.amx.vectors().transpose(from, dim, to, pairs, pairs, dim);
        }
        Rows { data: to, ld: pairs }
    }

    fn step(self, step: Step<'_>) {
        self.amx.step(step, self.terms);
    }

    fn weights(self, _: usize) -> usize {
        // Logits, and the terms of weights, for a chunk of them.
        (2 + self.terms) * CHUNK / 2 * MAX_WIDTH
    }

    fn within<R>(self, work: impl FnOnce() -> R) -> R {
        self.amx.within(work)
    }
}
