//! The online softmax for few query rows, as in decoding. If lanes were query rows, many would be idle, so
//! the lanes are along the head dim. S is computed as sums over the lanes of products, sixteen at a time. A
//! row of P is contiguous. O is a plain matrix product.
//!
//! With few rows, the step reads elements of K and V where they lie and widens them in registers. More rows
//! share a block that was widened to memory. Both ways have the same sums, bit for bit.

mod in_place;

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
pub(crate) use in_place::run_bytes;
pub(crate) use in_place::{InPlace, MOST_KEYS as MOST_KEYS_IN_PLACE, is_in_place};

use crate::programs::{self, Layout};
use crate::simd::{Added, MAX_LANES, Part, Rows, Simd, gemm_part};
use crate::softcap::cap_logits;
use crate::tile::{Block, LAZY_GROWTH, Panel, Step, are_finite, is_large, multiply};

/// Query rows of a panel. Each block of K and V is read from the cache once for all rows.
pub(crate) const PANEL_ROWS: usize = 8;

/// Numbers of O that are kept until a product has shown that V is finite.
const MOST_KEPT: usize = 1024;

/// Rows of K, of which a step reads a vector at a time.
#[allow(unsafe_code)] // bounds are asserted once a call, not once a multiplication
pub(crate) trait Keys<S: Simd>: Copy {
    /// The elements from `at` on of a row.
    ///
    /// # Safety
    /// The row exists and has a vector of elements from `at` on.
    unsafe fn line(self, s: S, row: usize, at: usize) -> S::V;

    /// Four vectors of elements from `at` on of a row.
    ///
    /// # Safety
    /// The row exists and has four vectors of elements from `at` on.
    unsafe fn four(self, s: S, row: usize, at: usize) -> [S::V; 4];

    /// Called once for each row that is read.
    fn touch(self, s: S, row: usize);
}

/// Rows of V, by which a step multiplies rows of P.
pub(crate) trait ValueRows<S: Simd>: Copy {
    /// O += P V over some keys of the block: `rows` rows of P, and of O from `out` on, `dim` elements apart.
    /// The register tile is `tall × vectors`.
    fn add(self, s: S, p: Rows<'_>, keys: Range<usize>, out: &mut [f32], shape: [usize; 2], tile: [usize; 2]);
}

/// S = Q Kᵀ; P = exp2(S·c − m); O = O·α + P V for one panel and one block. Rows of Q, K, V and O are whole
/// vectors.
#[inline(always)]
pub(crate) fn run_step<S: Simd>(s: S, step: Step<'_>) {
    match step.block.in_place {
        Some(rows) if S::IN_PLACE => in_place::run_step(s, step, rows),
        _ => {
            let Block { k, v, .. } = step.block;
            run_with(s, step, (k, k.ld), v);
        }
    }
}

/// The step with K, whose rows have a number of elements, and V.
#[inline(always)]
fn run_with<S: Simd>(s: S, step: Step<'_>, (k, dim): (impl Keys<S>, usize), v: impl ValueRows<S>) {
    let Step { panel, block, scale, cap, weights, tile, scores, shown, dropped } = step;
    let keys = block.keys.len();
    let ld = keys.next_multiple_of(S::LANES);
    let weights = &mut weights[..panel.rows * ld];
    logits(s, panel, (k, [keys, dim]), weights, ld);
    if let Some(factor) = cap {
        cap_logits(s, factor, weights);
    }
    if let Some(scores) = scores {
        scores.apply(s, keys, Layout::Rows(ld), weights);
    }
    if let Some(shown) = shown {
        programs::hide(shown, weights);
    }
    for row in 0..panel.rows {
        let logits = &mut weights[row * ld..][..ld];
        let seen = seen(panel, block, row);
        logits[..seen.start].fill(f32::NEG_INFINITY);
        logits[seen.end..].fill(f32::NEG_INFINITY);
        let max = largest(s, logits);
        raise_maximum(s, panel, row, scale, max);
        panel.sum[row] += exponentiate(s, logits, scale, panel.shift[row], panel.max[row]);
    }
    if let Some(dropped) = dropped {
        multiply(weights, dropped);
    }
    let ld_out = panel.out.len() / panel.rows;
    let all = |row| seen(panel, block, row).len() == keys;
    // A value that is not finite makes its sums NaN or infinite, also with the weight 0 of a hidden key. So
    // the sums of few rows show whether V is finite, and V is not read once more.
    let shows = shown.is_some() && panel.out.len() <= MOST_KEPT;
    let is_whole = (0..panel.rows).all(all) && (shown.is_none() || shows || block.is_finite(s));
    if let Some(shown) = shown.filter(|_| !is_whole && !block.is_finite(s)) {
        return accumulate_seen(s, panel, block, shown, weights, ld);
    }
    let kept = shown.filter(|_| is_whole && shows).map(|shown| {
        let mut kept = [0.0; MOST_KEPT];
        kept[..panel.out.len()].copy_from_slice(&panel.out);
        (shown, kept)
    });
    // If not all rows see all keys, the products are computed row by row, because a weight of 0 for a hidden
    // key must not be multiplied by a value that is not finite.
    let (rows, tall) = if is_whole { (panel.rows, tile.rows) } else { (1, 1) };
    for row in (0..panel.rows).step_by(rows) {
        let seen = if is_whole { 0..keys } else { seen(panel, block, row) };
        let p = Rows { data: &weights[row * ld + seen.start..], ld };
        v.add(s, p, seen, &mut panel.out[row * ld_out..], [rows, ld_out], [tall, tile.vectors]);
    }
    if let Some((shown, kept)) = kept
        && !are_finite(s, &panel.out)
        && !block.is_finite(s)
    {
        let out = panel.out.len();
        panel.out.copy_from_slice(&kept[..out]);
        accumulate_seen(s, panel, block, shown, weights, ld);
    }
}

/// [`crate::tile::accumulate_seen`] for rows: O += P V with a check of every key. The sums equal those of the
/// product of all keys, bit for bit.
#[inline(always)]
fn accumulate_seen<S: Simd>(
    s: S,
    panel: &mut Panel,
    block: Block<'_>,
    shown: &[f32],
    weights: &[f32],
    ld: usize,
) {
    let ld_out = panel.out.len() / panel.rows;
    for row in 0..panel.rows {
        let keys = seen(panel, block, row);
        let out = &mut panel.out[row * ld_out..][..ld_out];
        for (part, out) in out.chunks_exact_mut(S::LANES).enumerate() {
            let mut sum = s.splat(0.0);
            for key in keys.clone().filter(|key| shown[row * ld + key].to_bits() != 0) {
                let values = &block.v.data[key * block.v.ld + part * S::LANES..];
                sum = s.fma(s.splat(weights[row * ld + key]), s.load(values), sum);
            }
            s.store(s.add(s.load(out), sum), out);
        }
    }
}

/// The keys of a block that a row sees, relative to the block's first key.
#[inline(always)]
fn seen(panel: &Panel, block: Block<'_>, row: usize) -> std::ops::Range<usize> {
    let inside = |key: usize| key.clamp(block.keys.start, block.keys.end) - block.keys.start;
    let (start, end) = (inside(panel.seen[row].start), inside(panel.seen[row].end));
    start..end.max(start)
}

/// Unscaled logits of all rows and keys, `ld` numbers from row to row. Numbers beyond the last key are
/// unspecified. K has `[keys, dim]` elements.
#[inline(always)]
fn logits<S: Simd>(s: S, panel: &Panel, k: (impl Keys<S>, [usize; 2]), to: &mut [f32], ld: usize) {
    let [_, dim] = k.1;
    let mut row = 0;
    while row < panel.rows {
        let q = &panel.q[row * dim..];
        let to = &mut to[row * ld..];
        row += match (panel.rows - row, S::LANES) {
            (4.., 16) => dots::<S, _, 4, 4>(s, q, k, to, ld),
            (2.., 16) => dots::<S, _, 2, 8>(s, q, k, to, ld),
            (_, 16) => dots::<S, _, 1, 16>(s, q, k, to, ld),
            (4.., 8) => dots::<S, _, 4, 2>(s, q, k, to, ld),
            (2.., 8) => dots::<S, _, 2, 4>(s, q, k, to, ld),
            (_, 8) => dots::<S, _, 1, 8>(s, q, k, to, ld),
            (2.., _) => dots::<S, _, 2, 2>(s, q, k, to, ld),
            _ => dots::<S, _, 1, 4>(s, q, k, to, ld),
        };
    }
}

/// Logits of `ROWS` rows, `KEYS` keys at a time, so that the number of sums equals the lanes of a vector.
/// Returns `ROWS`.
#[inline(always)]
#[allow(unsafe_code)] // bounds are asserted once a call, not once a multiplication
fn dots<S: Simd, K: Keys<S>, const ROWS: usize, const KEYS: usize>(
    s: S,
    q: &[f32],
    (k, [keys, dim]): (K, [usize; 2]),
    to: &mut [f32],
    ld: usize,
) -> usize {
    assert!(ROWS * KEYS == S::LANES && dim % S::LANES == 0 && ROWS * dim <= q.len());
    for first in (0..keys).step_by(KEYS) {
        let mut acc = [[s.splat(0.0); KEYS]; ROWS];
        // Keys beyond the last one are replaced by the last key.
        let mut key = [0; KEYS];
        for (j, key) in key.iter_mut().enumerate() {
            *key = (first + j).min(keys - 1);
            k.touch(s, *key);
        }
        let fours = if S::FOUR { dim - dim % (4 * S::LANES) } else { 0 };
        for at in (0..fours).step_by(4 * S::LANES) {
            for j in 0..KEYS {
                // SAFETY: as below.
                let lines = unsafe { k.four(s, key[j], at) };
                for (v, &k) in lines.iter().enumerate() {
                    for (row, acc) in acc.iter_mut().enumerate() {
                        // SAFETY: as below.
                        let q = unsafe { line_of(s, q, row * dim + at + v * S::LANES) };
                        acc[j] = s.fma(q, k, acc[j]);
                    }
                }
            }
        }
        for at in (fours..dim).step_by(S::LANES) {
            let mut lines = [s.splat(0.0); ROWS];
            for (row, line) in lines.iter_mut().enumerate() {
                // SAFETY: rows below `ROWS` of q have whole vectors at `at` below `dim`, by the assertion.
                *line = unsafe { line_of(s, q, row * dim + at) };
            }
            for j in 0..KEYS {
                // SAFETY: K has rows up to `keys`, of `dim` elements.
                let k = unsafe { k.line(s, key[j], at) };
                for row in 0..ROWS {
                    acc[row][j] = s.fma(lines[row], k, acc[row][j]);
                }
            }
        }
        let mut sums = [0.0; MAX_LANES];
        s.store(s.sum_each(&acc), &mut sums);
        for row in 0..ROWS {
            to[row * ld + first..][..KEYS].copy_from_slice(&sums[row * KEYS..][..KEYS]);
        }
    }
    ROWS
}

/// The largest logit; any logit if one is NaN.
#[inline(always)]
fn largest<S: Simd>(s: S, logits: &[f32]) -> f32 {
    let mut max = s.splat(f32::NEG_INFINITY);
    for logits in logits.chunks_exact(S::LANES) {
        max = s.max(max, s.load(logits));
    }
    let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
    s.store(max, &mut lanes);
    lanes.into_iter().fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max })
}

/// [`crate::tile::raise_maximum`] for one row.
#[inline(always)]
fn raise_maximum<S: Simd>(s: S, panel: &mut Panel, row: usize, scale: f32, max: f32) {
    let old = panel.max[row];
    // The condition is false for NaN, which results from a NaN logit and from −∞ minus −∞.
    let grows = (max - old) * scale > LAZY_GROWTH;
    if !grows {
        return;
    }
    let shift = (max * scale).clamp(f32::MIN, f32::MAX); // not for −∞, which does not grow
    let reduction = if is_large(shift) { (old - max) * scale } else { panel.shift[row] - shift };
    let alpha = if old < f32::MIN { 0.0 } else { exp2(s, reduction) };
    (panel.max[row], panel.shift[row]) = (max, shift);
    panel.sum[row] *= alpha;
    let ld = panel.out.len() / panel.rows;
    let alpha = s.splat(alpha);
    for out in panel.out[row * ld..][..ld].chunks_exact_mut(S::LANES) {
        s.store(s.mul(s.load(out), alpha), out);
    }
}

#[inline(always)]
fn exp2<S: Simd>(s: S, t: f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    s.store(s.exp2(s.splat(t)), &mut lanes);
    lanes[0]
}

/// Turns logits into weights, in place. Returns their sum.
#[inline(always)]
fn exponentiate<S: Simd>(s: S, logits: &mut [f32], scale: f32, shift: f32, max: f32) -> f32 {
    let mut minus_shift = s.splat(-shift);
    if is_large(shift) {
        logits.iter_mut().for_each(|logit| *logit -= max);
        minus_shift = s.splat(0.0);
    }
    let scale = s.splat(scale);
    let mut sum = s.splat(0.0);
    for logits in logits.chunks_exact_mut(S::LANES) {
        let weight = s.exp2(s.fma(s.load(logits), scale, minus_shift));
        sum = s.add(sum, weight);
        s.store(weight, logits);
    }
    let mut lanes = [0.0; MAX_LANES];
    s.store(sum, &mut lanes);
    lanes.into_iter().sum()
}

/// A vector of numbers from `at` on.
///
/// # Safety
/// There are as many.
#[inline(always)]
#[allow(unsafe_code)] // bounds are asserted once a call, not once a multiplication
unsafe fn line_of<S: Simd>(s: S, data: &[f32], at: usize) -> S::V {
    debug_assert!(at + S::LANES <= data.len());
    // SAFETY: this function's own contract.
    s.load(unsafe { std::slice::from_raw_parts(data.as_ptr().add(at), S::LANES) })
}

/// Widened rows.
impl<S: Simd> Keys<S> for Rows<'_> {
    #[inline(always)]
    #[allow(unsafe_code)] // the trait's contract
    unsafe fn line(self, s: S, row: usize, at: usize) -> S::V {
        // SAFETY: the vector lies in the row, by the trait's contract.
        unsafe { line_of(s, self.data, row * self.ld + at) }
    }

    #[inline(always)]
    #[allow(unsafe_code)] // the trait's contract
    unsafe fn four(self, s: S, row: usize, at: usize) -> [S::V; 4] {
        let at = row * self.ld + at;
        debug_assert!(at + 4 * S::LANES <= self.data.len());
        // SAFETY: the vectors lie in the row, by the trait's contract.
        s.load_four(unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(at), 4 * S::LANES) })
    }

    #[inline(always)]
    fn touch(self, _: S, _: usize) {}
}

impl<S: Simd> ValueRows<S> for Rows<'_> {
    #[inline(always)]
    fn add(
        self,
        s: S,
        p: Rows<'_>,
        keys: Range<usize>,
        out: &mut [f32],
        [rows, dim]: [usize; 2],
        [tall, vectors]: [usize; 2],
    ) {
        let v = &self.data[keys.start * self.ld..];
        let (mut at, keys) = (0, keys.len());
        while at < dim && keys > 0 {
            let left = ((dim - at) / S::LANES).min(vectors).min(S::MAX_VECTORS);
            let (v, out) = (Part { from: &v[at..], ld: self.ld }, (&mut out[at..], dim));
            let shape = [rows, keys];
            match left {
                4 if S::MAX_VECTORS >= 4 => gemm_part::<S, _, _, 4>(s, Added, p, v, out, shape, tall),
                3 if S::MAX_VECTORS >= 3 => gemm_part::<S, _, _, 3>(s, Added, p, v, out, shape, tall),
                2 => gemm_part::<S, _, _, 2>(s, Added, p, v, out, shape, tall),
                _ => gemm_part::<S, _, _, 1>(s, Added, p, v, out, shape, tall),
            }
            at += left.max(1) * S::LANES;
        }
    }
}
