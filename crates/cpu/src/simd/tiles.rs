//! The online softmax on tiles of bf16 terms, for any vectors and tiles.
//!
//! A word has 32 bits: a pair of bf16 numbers. It is stored as an f32, on which no f32 operation is done. The
//! code is generic, so that plain Rust ([`super::PortableTiles`]) computes the same as AMX on any machine.

use super::Simd;
use crate::programs;
use crate::terms::{DEPTH, TILE};
use crate::tile::{self, Panel, Step};
use crate::view::ElementRows;

/// Words of a row of a tile.
pub(super) const WORDS: usize = DEPTH / 2;

/// Number of keys whose logits and weights stay in the L1 cache until they are used. A multiple of [`DEPTH`].
pub(crate) const CHUNK: usize = 64;

/// The vector type of `T`.
type Vector<T> = <<T as Tiles>::Vectors as Simd>::V;

/// A token: it exists only if the processor has tiles.
pub(crate) trait HasTiles: Copy + Send + Sync + 'static {
    /// Configured tiles.
    type Tiles<'a>: Tiles<Vectors = Self::Vectors>;
    /// The vectors used together with the tiles.
    type Vectors: Simd;

    fn vectors(self) -> Self::Vectors;

    /// The magnitudes of the elements of some rows.
    fn magnitudes<'a>(self, rows: impl ElementRows<'a>) -> Magnitudes;

    /// Calls `work` with tiles that are configured for the duration of the call.
    fn within<R>(self, work: impl for<'a> FnOnce(Self::Tiles<'a>) -> R) -> R;
}

/// The magnitudes of the elements of some rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Magnitudes {
    /// The smallest magnitude except 0; infinite if there is none.
    pub least: f32,
    /// The largest magnitude; NaN if an element is NaN.
    pub largest: f32,
}

impl Magnitudes {
    /// Converts from bits without the sign. These bits have the order of the magnitudes, with NaN above all.
    /// `least` is the smallest of the bits minus 1; with that offset, 0 is above all others.
    pub(super) fn of_bits(least: u32, largest: u32) -> Magnitudes {
        let infinity = f32::INFINITY.to_bits();
        let least = least.saturating_add(1).min(infinity);
        Magnitudes { least: f32::from_bits(least), largest: f32::from_bits(largest) }
    }
}

/// Tiles that are configured for products, and the vectors used together with them.
pub(crate) trait Tiles: Copy {
    /// The vectors of words.
    type Vectors: Simd;

    fn vectors(self) -> Self::Vectors;

    /// Rows as `terms` terms, negated if `negate`, `words` words per row. Each term of a row is padded with
    /// zeros.
    fn terms<'a>(self, rows: impl ElementRows<'a>, terms: usize, negate: bool, to: &mut [f32], words: usize);

    /// Rows as `terms` matrices of terms, `dim` words per row. Each row and the next are pairs. Words without
    /// elements are zero.
    fn row_pairs<'a>(self, rows: impl ElementRows<'a>, terms: usize, to: &mut [f32], dim: usize);

    /// The nearest bf16 numbers of two vectors, ties away from zero, as pairs. The remainders replace the
    /// vectors.
    fn split_pair(self, rest: &mut [Vector<Self>; 2]) -> Vector<Self>;

    /// C = Σ A · B, or C += Σ A · B, over the tiles at `steps`. B and C are dense and `VECTORS` vectors wide.
    /// `tall` tiles of A, at most two, are multiplied at a time with two of B.
    fn multiply<const VECTORS: usize>(
        self,
        a: Tall<'_>,
        b: &[f32],
        c: &mut [f32],
        sums: Sums,
        tall: usize,
        steps: impl Iterator<Item = Place>,
    );

    /// [`run_step`] on words that are pairs of terms, with `terms` terms per number, compiled for the
    /// instruction set.
    fn step(self, step: Step<'_>, terms: usize);
}

/// A matrix of words with whole tiles of rows, `ld` words from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Tall<'a> {
    pub data: &'a [f32],
    pub ld: usize,
    pub tiles: usize,
}

/// Whether a product of matrices overwrites C or adds to it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Sums {
    Fresh,
    Added,
}

/// A pair of tiles of A and B whose product is summed: the offsets, in words, of their first elements.
pub(crate) type Place = [usize; 2];

/// [`tile::run_step`] on terms.
#[inline(always)]
pub(super) fn run_step<T: Tiles, const TERMS: usize, const VECTORS: usize>(t: T, step: Step<'_>) {
    let s = t.vectors();
    let Step { panel, block, scale, weights, tile, shown, .. } = step;
    let width = VECTORS * T::Vectors::LANES;
    let (logits, weights) = weights.split_at_mut(CHUNK * width);
    let (depth, dim) = (block.k.ld / TERMS, block.dim_v.next_multiple_of(TILE));
    let of_values = dim * block.v.ld;
    for first in (0..block.keys.len()).step_by(CHUNK) {
        let keys = (block.keys.len() - first).min(CHUNK);
        let k =
            Tall { data: &block.k.data[first * block.k.ld..], ld: block.k.ld, tiles: keys.div_ceil(TILE) };
        // All products are included: logits are as exact as in f32.
        let steps = products::<TERMS>(2 * (TERMS - 1)).flat_map(|(key, query)| {
            (0..depth).step_by(WORDS).map(move |at| [key * depth + at, (query * depth + at) * width])
        });
        t.multiply::<VECTORS>(k, &panel.q, logits, Sums::Fresh, tile.rows, steps);
        let logits = &mut logits[..keys * width];
        if let Some(shown) = shown {
            programs::hide(&shown[first * width..], logits);
        }
        let (start, end) = (block.keys.start + first, block.keys.start + first + keys);
        if start < panel.by_all.start || panel.by_all.end < end {
            tile::mask::<_, VECTORS>(s, panel, start, logits);
        }
        let max = tile::maximum::<_, VECTORS>(s, logits);
        tile::raise_maximum(s, panel, scale, max);
        let pairs = keys.next_multiple_of(DEPTH) / 2;
        let weights = &mut weights[..TERMS * pairs * width];
        weigh::<T, TERMS, VECTORS>(t, panel, scale, logits, weights);
        let v = Tall { data: &block.v.data[first / 2..], ld: block.v.ld, tiles: dim / TILE };
        // All products except those of the low terms of both.
        let steps = products::<TERMS>(TERMS - 1).flat_map(|(value, weight)| {
            (0..pairs).step_by(WORDS).map(move |at| [value * of_values + at, (weight * pairs + at) * width])
        });
        t.multiply::<VECTORS>(v, weights, &mut panel.out, Sums::Added, tile.rows, steps);
    }
}

/// Pairs of terms (i, j) with i + j ≤ `most`. Small products come first.
#[inline(always)]
fn products<const TERMS: usize>(most: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let of_order = |order: usize| (0..=order).map(move |i| (i, order - i));
    (0..=most).rev().flat_map(of_order).filter(|&(i, j)| i < TERMS && j < TERMS)
}

/// Turns the logits of a panel's keys into weights: `TERMS` matrices of pairs along the keys, with zeros
/// after the last key. Adds the weights to the panel's sum. Large logits are changed.
#[inline(always)]
fn weigh<T: Tiles, const TERMS: usize, const VECTORS: usize>(
    t: T,
    panel: &mut Panel,
    scale: f32,
    logits: &mut [f32],
    weights: &mut [f32],
) {
    let (s, lanes) = (t.vectors(), T::Vectors::LANES);
    let width = VECTORS * lanes;
    let (keys, matrix) = (logits.len() / width, weights.len() / TERMS);
    let mut weigher = Lanes::<T, VECTORS> {
        scale: s.splat(scale),
        minus_shift: tile::minus_shifts(s, &panel.shift, &panel.max, logits),
        sum: [s.splat(0.0); VECTORS],
    };
    let mut terms = weights.chunks_exact_mut(matrix);
    let mut terms: [&mut [f32]; TERMS] = std::array::from_fn(|_| terms.next().unwrap_or_default());
    let mut rows = logits.chunks_exact(2 * width);
    for (pair, logits) in rows.by_ref().enumerate() {
        let (first, second) = logits.split_at(width);
        weigher.weigh_pair(t, first, Some(second), &mut terms, pair * width);
    }
    if let [_, ..] = rows.remainder() {
        weigher.weigh_pair(t, rows.remainder(), None, &mut terms, keys / 2 * width);
    }
    for term in terms {
        term[keys.div_ceil(2) * width..].fill(0.0);
    }
    for (v, &sum) in weigher.sum.iter().enumerate() {
        let total = &mut panel.sum[v * lanes..];
        s.store(s.add(s.load(total), sum), total);
    }
}

/// Scale and shifts of a panel's lanes, and the sums of their weights.
struct Lanes<T: Tiles, const VECTORS: usize> {
    scale: Vector<T>,
    minus_shift: [Vector<T>; VECTORS],
    sum: [Vector<T>; VECTORS],
}

impl<T: Tiles, const VECTORS: usize> Lanes<T, VECTORS> {
    /// Turns the logits of a key and the next, if there is one, into pairs of each of the terms, written `at`
    /// words from the beginning of each term's matrix.
    #[inline(always)]
    fn weigh_pair<const TERMS: usize>(
        &mut self,
        t: T,
        first: &[f32],
        second: Option<&[f32]>,
        terms: &mut [&mut [f32]; TERMS],
        at: usize,
    ) {
        let (s, lanes) = (t.vectors(), T::Vectors::LANES);
        for v in 0..VECTORS {
            let mut rest = [s.splat(0.0); 2];
            for (rest, logits) in rest.iter_mut().zip([Some(first), second]) {
                if let Some(logits) = logits {
                    *rest = s.exp2(s.fma(s.load(&logits[v * lanes..]), self.scale, self.minus_shift[v]));
                }
            }
            self.sum[v] = s.add(self.sum[v], s.add(rest[0], rest[1]));
            for term in terms.iter_mut() {
                s.store(t.split_pair(&mut rest), &mut term[at + v * lanes..]);
            }
        }
    }
}
