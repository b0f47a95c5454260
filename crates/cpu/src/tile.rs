//! The online softmax over blocks of keys, for one panel of query rows.
//!
//! Everything is transposed: a query row is a *lane*. S, P and O are stored as Sᵀ, Pᵀ, Oᵀ, so that maxima and
//! sums over keys are plain vector operations. K and V are read number by number in place. Only Q and O,
//! which are small, are ever transposed.

use std::cell::OnceCell;

use problem::KeyRange;

use crate::aligned::Aligned;
use crate::dims::InPlace;
use crate::programs::{self, Compiled, Layout, Region, Values};
use crate::simd::{Added, Columns, Fresh, MAX_LANES, Rows, Simd, gemm};
use crate::softcap::cap_logits;

/// Maximum number of query rows of a panel: the widest register tile of all instruction sets.
pub(crate) const MAX_WIDTH: usize = 64;

/// Lazy rescale: the running maximum is raised only when it grows by more than this (in log2). Weights stay
/// below 2⁸, sums far below f32's range, and O is rarely rescaled.
pub(crate) const LAZY_GROWTH: f32 = 8.0;

/// Largest shift (in log2) that is subtracted from scaled logits. The rounding error of a larger shift would
/// be visible in the weights, and from 2³¹ on would make them infinite or 0: there the maximum is subtracted
/// from the logits before they are scaled. Ordinary logits stay below it.
const LARGEST_SHIFT: f32 = 4096.0;

/// Whether a shift is too large to be subtracted from scaled logits. False for NaN.
pub(crate) fn is_large(shift: f32) -> bool {
    shift.abs() > LARGEST_SHIFT
}

/// One panel: up to `width` query rows and their running softmax. Matrices are dense with `width` numbers per
/// row.
pub(crate) struct Panel {
    /// Number of lanes, a multiple of the lanes of a vector.
    pub width: usize,
    /// Number of lanes that are query rows. The other lanes are padding.
    pub rows: usize,
    /// The keys that each row sees. Padding lanes repeat the last row's range.
    pub seen: [KeyRange; MAX_WIDTH],
    /// The range from the first to the last key that any row sees.
    pub by_any: KeyRange,
    /// The keys that every row sees.
    pub by_all: KeyRange,
    /// Qᵀ, `head_dim` rows.
    pub q: Aligned,
    /// Oᵀ before normalisation, `head_dim_v` rows.
    pub out: Aligned,
    /// Running maximum of the unscaled logits.
    pub max: [f32; MAX_WIDTH],
    /// `max · scale · log2(e)`, which is subtracted in the exponent: at most `f32::MAX` in size, and 0 while
    /// the maximum is −∞.
    pub shift: [f32; MAX_WIDTH],
    /// Sum of the weights.
    pub sum: [f32; MAX_WIDTH],
}

impl Panel {
    pub(crate) fn new() -> Panel {
        let none = KeyRange { start: 0, end: 0 };
        Panel {
            width: 0,
            rows: 0,
            seen: [none; MAX_WIDTH],
            by_any: none,
            by_all: none,
            q: Aligned::default(),
            out: Aligned::default(),
            max: [0.0; MAX_WIDTH],
            shift: [0.0; MAX_WIDTH],
            sum: [0.0; MAX_WIDTH],
        }
    }

    /// Prepares for `rows` new rows in `width` lanes. The caller fills Q; its padding is zero.
    pub(crate) fn reset(&mut self, rows: usize, width: usize, dim: usize, dim_v: usize) {
        (self.rows, self.width) = (rows, width);
        let q = self.q.resize(dim * width);
        if rows < width {
            q.fill(0.0);
        }
        self.out.resize(dim_v * width).fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.shift.fill(0.0);
        self.sum.fill(0.0);
    }

    /// Sets the keys that each lane sees.
    pub(crate) fn set_seen(&mut self, seen: impl Fn(usize) -> KeyRange) {
        for (lane, range) in self.seen[..self.width].iter_mut().enumerate() {
            *range = seen(lane);
        }
        let rows = &self.seen[..self.rows];
        let some = rows.iter().filter(|r| !r.is_empty());
        self.by_any = KeyRange {
            start: some.clone().map(|r| r.start).min().unwrap_or(0),
            end: some.map(|r| r.end).max().unwrap_or(0),
        };
        self.by_all = KeyRange {
            start: rows.iter().map(|r| r.start).max().unwrap_or(0),
            end: rows.iter().map(|r| r.end).min().unwrap_or(0),
        };
    }
}

/// A block of keys and values as words: f32 numbers, or pairs of 16-bit integers or of bf16 terms.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    /// The range of keys.
    pub keys: KeyRange,
    /// Rows of K, including at least those of `keys`.
    pub k: Rows<'a>,
    /// Rows of V, pairs of its rows, or pairs along its columns, including at least those of `keys`.
    pub v: Rows<'a>,
    /// Number of elements of a row of V.
    pub dim_v: usize,
    /// Whether all words of V are finite; computed when a step first needs it.
    pub is_finite: &'a OnceCell<bool>,
    /// The elements, if the step reads them where they lie; `k` and `v` are empty then.
    pub in_place: Option<InPlace<'a>>,
}

impl Block<'_> {
    /// The block with only the keys before `end`.
    pub(crate) fn up_to(self, end: usize) -> Self {
        let keys = KeyRange { start: self.keys.start, end: self.keys.end.min(end) };
        Block { keys, ..self }
    }

    /// Whether all words of V are finite numbers. Valid only if the words are f32 numbers.
    #[inline(always)]
    pub(crate) fn is_finite<S: Simd>(&self, s: S) -> bool {
        // A closure of `get_or_init` would not be compiled for the instruction set.
        if let Some(&known) = self.is_finite.get() {
            return known;
        }
        let all = are_finite(s, self.v.data);
        *self.is_finite.get_or_init(|| all)
    }
}

/// Shape of a register tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Maximum number of rows.
    pub rows: usize,
    /// Number of vectors side by side.
    pub vectors: usize,
}

impl Tile {
    /// Maximum number of rows of a tile that is `vectors` vectors wide. Narrower tiles, for remaining
    /// columns, may be taller.
    #[inline(always)]
    pub(crate) fn rows_of(self, vectors: usize) -> usize {
        if vectors < self.vectors { self.rows.max(8) } else { self.rows }
    }
}

/// One step of the online softmax.
pub(crate) struct Step<'a> {
    pub panel: &'a mut Panel,
    pub block: Block<'a>,
    /// `|scale| · log2(e)`, or `softcap · log2(e)` if logits are capped, or `log2(e)` with a score program. A
    /// negative scale's sign is in Q.
    pub scale: f32,
    /// `|scale| / softcap`, if logits are capped.
    pub cap: Option<f32>,
    /// Buffer for Pᵀ: `keys × width`.
    pub weights: &'a mut [f32],
    /// The register tile.
    pub tile: Tile,
    /// The score program.
    pub scores: Option<Scores<'a>>,
    /// The evaluated mask program, if it hides some of the scores: a word for each weight.
    pub shown: Option<&'a [f32]>,
    /// The factors of dropout, one for each weight. Only steps in f32 take them.
    pub dropped: Option<&'a [f32]>,
}

/// A score program for a step.
pub(crate) struct Scores<'a> {
    pub program: &'a Compiled<'a>,
    pub values: &'a mut Values,
    /// The panel's number in its task.
    pub panel: usize,
    /// The factor that turns products of queries and keys, or the tanh of a cap, into logits.
    pub factor: f32,
}

impl Scores<'_> {
    /// Replaces products by the program's logits.
    #[inline(always)]
    pub(crate) fn apply<S: Simd>(self, s: S, keys: usize, layout: Layout, to: &mut [f32]) {
        let Scores { program, values, panel, factor } = self;
        s.evaluate(program, values, Region::Tile { panel, keys, layout, factor, to });
    }
}

/// S = K Qᵀ, capped and masked; P = exp2(S·c − m); O = O·α + P V, all transposed, for one panel and one
/// block.
#[inline(always)]
pub(crate) fn run_step<S: Simd, const VECTORS: usize>(s: S, step: Step<'_>) {
    let Step { panel, block, scale, cap, weights, tile, scores, shown, dropped } = step;
    let (keys, tall) = (block.keys.len(), tile.rows_of(VECTORS));
    let weights = &mut weights[..keys * VECTORS * S::LANES];
    gemm::<S, _, _, VECTORS>(s, Fresh, block.k, &panel.q, weights, [keys, block.k.ld], tall);
    if let Some(factor) = cap {
        cap_logits(s, factor, weights);
    }
    if let Some(scores) = scores {
        scores.apply(s, keys, Layout::Keys(VECTORS * S::LANES), weights);
    }
    if let Some(shown) = shown {
        programs::hide(shown, weights);
    }
    let partial = block.keys.start < panel.by_all.start || panel.by_all.end < block.keys.end;
    if partial {
        mask::<S, VECTORS>(s, panel, block.keys.start, weights);
    }
    let max = maximum::<S, VECTORS>(s, weights);
    raise_maximum(s, panel, scale, max);
    exponentiate::<S, VECTORS>(s, panel, scale, weights);
    if let Some(dropped) = dropped {
        multiply(weights, dropped);
    }
    if (partial || shown.is_some()) && !block.is_finite(s) {
        return accumulate_seen(s, panel, block, shown, weights);
    }
    let v = Columns { data: block.v.data, ld: block.v.ld };
    gemm::<S, _, _, VECTORS>(s, Added, v, weights, &mut panel.out, [block.dim_v, keys], tall);
}

/// Whether all numbers are finite: then their products with 0 are 0, and otherwise one is NaN.
#[inline(always)]
pub(crate) fn are_finite<S: Simd>(s: S, numbers: &[f32]) -> bool {
    let zero = s.splat(0.0);
    let mut sums = [zero; FINITE_SUMS];
    let mut several = numbers.chunks_exact(FINITE_SUMS * S::LANES);
    for numbers in &mut several {
        for (sum, numbers) in sums.iter_mut().zip(numbers.chunks_exact(S::LANES)) {
            *sum = s.fma(s.load(numbers), zero, *sum);
        }
    }
    let mut lanes = [0.0; MAX_LANES];
    let is_zero = |sum| {
        s.store(sum, &mut lanes);
        lanes.iter().all(|&lane| lane == 0.0)
    };
    sums.into_iter().all(is_zero) && several.remainder().iter().all(|x| x.is_finite())
}

/// Sums whose additions overlap.
const FINITE_SUMS: usize = 8;

/// Multiplies numbers by factors.
#[inline(always)]
pub(crate) fn multiply(numbers: &mut [f32], factors: &[f32]) {
    numbers.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
}

/// Sets the logits of keys that a row does not see to −∞.
#[inline(always)]
pub(crate) fn mask<S: Simd, const VECTORS: usize>(s: S, panel: &Panel, first: usize, logits: &mut [f32]) {
    let keys = logits.len() / (VECTORS * S::LANES);
    // Positions are relative to the block, so they are exact in f32 for all sequence lengths.
    let relative = |key: usize| key.saturating_sub(first).min(keys) as f32;
    let (mut start, mut end) = ([0.0f32; MAX_WIDTH], [0.0f32; MAX_WIDTH]);
    for lane in 0..panel.width {
        start[lane] = relative(panel.seen[lane].start);
        end[lane] = relative(panel.seen[lane].end);
    }
    let hidden = s.splat(f32::NEG_INFINITY);
    for (key, row) in logits.chunks_exact_mut(VECTORS * S::LANES).enumerate() {
        let key = s.splat(key as f32);
        for (v, logits) in row.chunks_exact_mut(S::LANES).enumerate() {
            let seen = s.select_lt(key, s.load(&end[v * S::LANES..]), s.load(logits), hidden);
            s.store(s.select_lt(key, s.load(&start[v * S::LANES..]), hidden, seen), logits);
        }
    }
}

/// The largest logit of each lane.
#[inline(always)]
pub(crate) fn maximum<S: Simd, const VECTORS: usize>(s: S, logits: &[f32]) -> [S::V; VECTORS] {
    let mut max = [s.splat(f32::NEG_INFINITY); VECTORS];
    for row in logits.chunks_exact(VECTORS * S::LANES) {
        for (max, logits) in max.iter_mut().zip(row.chunks_exact(S::LANES)) {
            *max = s.max(*max, s.load(logits));
        }
    }
    max
}

/// Raises the running maximum to the largest new logit if it grows by more than [`LAZY_GROWTH`], and rescales
/// O and the sum.
#[inline(always)]
pub(crate) fn raise_maximum<S: Simd, const VECTORS: usize>(
    s: S,
    panel: &mut Panel,
    scale: f32,
    max: [S::V; VECTORS],
) {
    let lanes = S::LANES;
    for (v, &max) in max.iter().enumerate() {
        let at = v * lanes;
        let old = s.load(&panel.max[at..]);
        let growth = s.mul(s.sub(max, old), s.splat(scale));
        let limit = s.splat(LAZY_GROWTH);
        if !s.any_lt(limit, growth) {
            continue;
        }
        let raised = s.select_lt(limit, growth, max, old);
        s.store(raised, &mut panel.max[at..]);
        // −∞ reaches exp2 only as the maximum of a lane without mass. Lanes that did not grow get α = 1,
        // lanes without mass α = 0.
        let old_shift = s.load(&panel.shift[at..]);
        let none = s.splat(f32::MIN);
        let scaled = finite(s, s.mul(raised, s.splat(scale)));
        let shift = s.select_lt(raised, none, s.splat(0.0), scaled);
        s.store(shift, &mut panel.shift[at..]);
        let zero = s.splat(0.0);
        let reduction = select_large(s, shift, s.sub(zero, growth), s.sub(old_shift, shift));
        let alpha = s.select_lt(limit, growth, s.exp2(reduction), s.splat(1.0));
        let alpha = s.select_lt(old, none, s.splat(0.0), alpha);
        s.store(s.mul(s.load(&panel.sum[at..]), alpha), &mut panel.sum[at..]);
        for row in panel.out.chunks_exact_mut(VECTORS * lanes) {
            let out = &mut row[at..at + lanes];
            s.store(s.mul(s.load(out), alpha), out);
        }
    }
}

/// Lanes of `yes` where the shift is large, otherwise of `no`.
#[inline(always)]
pub(crate) fn select_large<S: Simd>(s: S, shift: S::V, yes: S::V, no: S::V) -> S::V {
    let size = s.max(shift, s.sub(s.splat(0.0), shift));
    s.select_lt(s.splat(LARGEST_SHIFT), size, yes, no)
}

/// ±∞ becomes the nearest finite number.
#[inline(always)]
pub(crate) fn finite<S: Simd>(s: S, x: S::V) -> S::V {
    let (least, most) = (s.splat(f32::MIN), s.splat(f32::MAX));
    let x = s.select_lt(most, x, most, x);
    s.select_lt(x, least, least, x)
}

/// Returns the addends that turn the scaled logits of each lane into exponents: minus the shift. A lane with
/// a large shift has the addend 0, and this function subtracts its maximum from its logits.
#[inline(always)]
pub(crate) fn minus_shifts<S: Simd, const VECTORS: usize>(
    s: S,
    shifts: &[f32],
    maxima: &[f32],
    logits: &mut [f32],
) -> [S::V; VECTORS] {
    let zero = s.splat(0.0);
    let mut minus_shift = [zero; VECTORS];
    for (v, minus_shift) in minus_shift.iter_mut().enumerate() {
        let at = v * S::LANES;
        let shift = s.load(&shifts[at..]);
        *minus_shift = select_large(s, shift, zero, s.sub(zero, shift));
        let subtracted = select_large(s, shift, s.splat(1.0), zero);
        if s.any_lt(zero, subtracted) {
            let subtracted = select_large(s, shift, s.load(&maxima[at..]), zero);
            for row in logits.chunks_exact_mut(VECTORS * S::LANES) {
                let logits = &mut row[at..at + S::LANES];
                s.store(s.sub(s.load(logits), subtracted), logits);
            }
        }
    }
    minus_shift
}

/// Turns logits into weights, in place, and adds their sum to the panel's.
#[inline(always)]
fn exponentiate<S: Simd, const VECTORS: usize>(s: S, panel: &mut Panel, scale: f32, logits: &mut [f32]) {
    let lanes = S::LANES;
    let scale = s.splat(scale);
    let minus_shift: [S::V; VECTORS] = minus_shifts(s, &panel.shift, &panel.max, logits);
    // Each block has its own sum: one long chain of additions would have a larger error than all other errors
    // of a row.
    let mut sum = [s.splat(0.0); VECTORS];
    for row in logits.chunks_exact_mut(VECTORS * lanes) {
        for (v, logits) in row.chunks_exact_mut(lanes).enumerate() {
            let weight = s.exp2(s.fma(s.load(logits), scale, minus_shift[v]));
            sum[v] = s.add(sum[v], weight);
            s.store(weight, logits);
        }
    }
    for (v, &sum) in sum.iter().enumerate() {
        let total = &mut panel.sum[v * lanes..];
        s.store(s.add(s.load(total), sum), total);
    }
}

/// O += P V with a check of every key: if V is not finite, the weight 0 of a hidden key must not be
/// multiplied by it. The sums equal those of the product of all keys, bit for bit.
#[inline(always)]
fn accumulate_seen<S: Simd>(
    s: S,
    panel: &mut Panel,
    block: Block<'_>,
    shown: Option<&[f32]>,
    weights: &[f32],
) {
    let width = panel.width;
    let keys = weights.len() / width;
    let sees = |key: usize, lane: usize| {
        let in_band = (panel.seen[lane].start..panel.seen[lane].end).contains(&(block.keys.start + key));
        in_band && shown.is_none_or(|shown| shown[key * width + lane].to_bits() != 0)
    };
    let flags: Vec<f32> =
        (0..keys * width).map(|i| f32::from(u8::from(sees(i / width, i % width)))).collect();
    let half = s.splat(0.5);
    for (d, out) in panel.out.chunks_exact_mut(width).enumerate() {
        for (v, out) in out.chunks_exact_mut(S::LANES).enumerate() {
            let mut sum = s.splat(0.0);
            for key in 0..keys {
                let at = key * width + v * S::LANES;
                let value = s.splat(block.v.data[key * block.v.ld + d]);
                let added = s.fma(value, s.load(&weights[at..]), sum);
                sum = s.select_lt(half, s.load(&flags[at..]), added, sum);
            }
            s.store(s.add(s.load(out), sum), out);
        }
    }
}
