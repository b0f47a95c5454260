//! AVX-512 VNNI: 16-bit integers, multiplied and summed at twice the rate of f32.
#![allow(unsafe_code)] // intrinsics; an `Avx512Vnni` exists only where `detect` found the instructions

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx512bw::{Extent, LANES, extent, load, store};
use super::gemm::{Columns, Product, Rows, gemm};
use super::{Avx512, Simd};
use crate::element::Elements;
use crate::narrow::{WEIGHT_BITS, WINDOW};
use crate::peak;
use crate::tile::{self, Panel, Step};

/// Proof that the processor has AVX-512 VNNI, BW and VL, and all of [`Avx512`]. A word is 32 bits, carried as an f32 that
/// nobody calculates with: a pair of 16-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

/// Elements are pairs of 16-bit integers; the sum of their products, a 32-bit integer, becomes an f32. (Sums start
/// at zero: the bits of 0.0 are those of the integer.)
#[derive(Clone, Copy)]
struct Logits(Avx512Vnni);

/// The same, the sums multiplied by a factor for each lane and added to C.
#[derive(Clone, Copy)]
struct Weighted<const VECTORS: usize>(Avx512Vnni, [__m512; VECTORS]);

// SAFETY of both blocks: the `Avx512Vnni` is proof of the instructions.
impl Product<Avx512> for Logits {
    #[inline(always)]
    fn add(self, _: Avx512, a: __m512, b: __m512, sum: __m512) -> __m512 {
        unsafe { add_products(a, b, sum) }
    }
    #[inline(always)]
    fn finish(self, _: Avx512, sum: __m512, _: __m512, _: usize) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(sum)) }
    }
}

impl<const VECTORS: usize> Product<Avx512> for Weighted<VECTORS> {
    #[inline(always)]
    fn add(self, s: Avx512, a: __m512, b: __m512, sum: __m512) -> __m512 {
        Logits(self.0).add(s, a, b, sum)
    }
    #[inline(always)]
    fn finish(self, s: Avx512, sum: __m512, old: __m512, v: usize) -> __m512 {
        s.fma(Logits(self.0).finish(s, sum, old, v), self.1[v], old)
    }
}

/// `sum` + the sums of the products of pairs. As an intrinsic the compiler makes two instructions of it, VPMADDWD and
/// VPADDD, for their shorter latency; here the rate counts.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_products(a: __m512, b: __m512, mut sum: __m512) -> __m512 {
    // SAFETY: registers only.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

// SAFETY of every call: `self` is proof of the instructions.
impl Avx512Vnni {
    pub(crate) fn detect() -> Option<Avx512Vnni> {
        let short = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        let vnni = short && is_x86_feature_detected!("avx512vnni");
        Avx512::detect().filter(|_| vnni).map(Avx512Vnni)
    }

    /// Its vectors.
    pub(crate) fn vectors(self) -> Avx512 {
        self.0
    }

    /// As [`Simd::products`], of pairs of 16-bit integers: twice as many.
    pub(crate) fn products(self, rounds: usize) -> f64 {
        #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
        fn compiled(s: Avx512, rounds: usize) -> f64 {
            peak::accumulate(s, |a, b, sum| add_products(a, b, sum), rounds)
        }
        2.0 * unsafe { compiled(self.0, rounds) }
    }

    /// How large the numbers of some rows are.
    pub(crate) fn extent<'a>(self, rows: impl Iterator<Item = Elements<'a>>) -> Extent {
        unsafe { extent(rows) }
    }

    /// Raises `reach`, column by column, to the sum of the magnitudes of some rows, and to 8 times the largest. `sums`
    /// is room for as many numbers. NaN stays.
    pub(crate) fn reach<'a>(
        self,
        window: impl Iterator<Item = Elements<'a>>,
        sums: &mut [f32],
        reach: &mut [f32],
    ) {
        unsafe { add_reach(window, sums, reach) }
    }

    /// The least squared norm of the rows, their columns multiplied by `factors`.
    pub(crate) fn least_norm_squared<'a>(
        self,
        rows: impl Iterator<Item = Elements<'a>>,
        factors: &[f32],
    ) -> f32 {
        unsafe { least_norm_squared(rows, factors) }
    }

    /// Rows as integers `round(factor · x)`, `words` a row: neighbours are pairs, an odd one's partner is 0.
    pub(crate) fn integers<'a>(
        self,
        rows: impl Iterator<Item = Elements<'a>>,
        factor: f32,
        to: &mut [f32],
        words: usize,
    ) {
        unsafe { integers(rows, factor, to, words) }
    }

    /// Rows as such integers, a factor for each column: those of one row and the next are pairs, an odd row's
    /// partners are 0.
    pub(crate) fn row_pairs<'a>(
        self,
        rows: impl Iterator<Item = Elements<'a>>,
        factors: &[f32],
        to: &mut [f32],
    ) {
        unsafe { row_pairs(rows, factors, to) }
    }

    /// Runs `step` on words: pairs along the head dimension in Q and K, along the keys in V.
    pub(crate) fn step(self, step: Step<'_>) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")]
        fn compiled<const VECTORS: usize>(vnni: Avx512Vnni, step: Step<'_>) {
            run_step::<VECTORS>(vnni.0, vnni, step);
        }
        match step.panel.width / LANES {
            4 => unsafe { compiled::<4>(self, step) },
            3 => unsafe { compiled::<3>(self, step) },
            2 => unsafe { compiled::<2>(self, step) },
            _ => unsafe { compiled::<1>(self, step) },
        }
    }
}

/// [`tile::run_step`] on integers.
#[inline(always)]
fn run_step<const VECTORS: usize>(s: Avx512, vnni: Avx512Vnni, step: Step<'_>) {
    let Step { panel, block, scale, weights, tile } = step;
    let (keys, width, tall) = (block.keys.len(), VECTORS * LANES, tile.rows_of(VECTORS));
    let logits = &mut weights[..keys * width];
    gemm::<_, _, _, VECTORS>(s, Logits(vnni), block.k, &panel.q, logits, [keys, block.k.ld], tall);
    if block.keys.start < panel.by_all.start || panel.by_all.end < block.keys.end {
        tile::mask::<_, VECTORS>(s, panel, block.keys.start, logits);
    }
    for (window, logits) in logits.chunks_mut(WINDOW * width).enumerate() {
        let pairs = (logits.len() / width).div_ceil(2);
        let max = tile::maximum::<_, VECTORS>(s, logits);
        tile::raise_maximum(s, panel, scale, max);
        let factor = weigh(s, panel, scale, max, logits);
        let Rows { data, ld } = block.v;
        let v = Columns { data: &data[window * WINDOW / 2 * ld..], ld };
        gemm::<_, _, _, VECTORS>(
            s,
            Weighted(vnni, factor),
            v,
            logits,
            &mut panel.out,
            [block.dim_v, pairs],
            tall,
        );
    }
}

/// The logits of a window's keys to pairs of integers, in place, the largest of a lane to 2^[`WEIGHT_BITS`]; adds the
/// weights to the panel's sum. `max` are the largest logits. Returns what makes weights of integers.
#[inline(always)]
fn weigh<const VECTORS: usize>(
    s: Avx512,
    panel: &mut Panel,
    scale: f32,
    max: [__m512; VECTORS],
    logits: &mut [f32],
) -> [__m512; VECTORS] {
    let keys = logits.len() / (VECTORS * LANES);
    let (scale, bits) = (s.splat(scale), s.splat(WEIGHT_BITS));
    let mut raise = [bits; VECTORS];
    let mut factor = [bits; VECTORS];
    for v in 0..VECTORS {
        let shift = s.load(&panel.shift[v * LANES..]);
        // A lane without a key here has weights of 0, whatever their factor.
        let top = s.select_lt(max[v], s.splat(f32::MIN), shift, s.mul(max[v], scale));
        raise[v] = s.sub(bits, top);
        factor[v] = s.exp2(s.sub(s.sub(top, shift), bits));
    }
    let mut sum = [s.splat(0.0); VECTORS];
    for pair in 0..keys.div_ceil(2) {
        for v in 0..VECTORS {
            let at = (2 * pair * VECTORS + v) * LANES;
            let first = s.exp2(s.fma(s.load(&logits[at..]), scale, raise[v]));
            let mut second = s.splat(0.0);
            if 2 * pair + 1 < keys {
                second = s.exp2(s.fma(s.load(&logits[at + VECTORS * LANES..]), scale, raise[v]));
            }
            sum[v] = s.add(sum[v], s.add(first, second));
            // SAFETY: the `Avx512` is proof of the instructions.
            let word = unsafe {
                let upper = _mm512_slli_epi32::<16>(_mm512_cvtps_epi32(second));
                _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtps_epi32(first), upper))
            };
            // Over logits that have been read: pair ≤ 2 · pair.
            s.store(word, &mut logits[(pair * VECTORS + v) * LANES..]);
        }
    }
    for v in 0..VECTORS {
        let old = &mut panel.sum[v * LANES..];
        s.store(s.fma(sum[v], factor[v], s.load(old)), old);
    }
    factor
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add_reach<'a>(window: impl Iterator<Item = Elements<'a>>, sums: &mut [f32], reach: &mut [f32]) {
    sums.fill(0.0);
    for row in window {
        for at in (0..row.len()).step_by(LANES) {
            let x = _mm512_abs_ps(load(row, at));
            let sum = _mm512_add_ps(load(Elements::F32(sums), at), x);
            store(_mm512_castps_si512(sum), &mut sums[at..]);
            let most = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(8.0)), load(Elements::F32(reach), at));
            store(_mm512_castps_si512(most), &mut reach[at..]);
        }
    }
    for (reach, &mut sum) in reach.iter_mut().zip(sums) {
        *reach = if sum > *reach || sum.is_nan() { sum } else { *reach };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn least_norm_squared<'a>(rows: impl Iterator<Item = Elements<'a>>, factors: &[f32]) -> f32 {
    let mut least = f32::INFINITY;
    for row in rows {
        let mut squares = _mm512_setzero_ps();
        for at in (0..row.len()).step_by(LANES) {
            let x = _mm512_mul_ps(load(row, at), load(Elements::F32(factors), at));
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        least = least.min(_mm512_reduce_add_ps(squares));
    }
    least
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn integers<'a>(rows: impl Iterator<Item = Elements<'a>>, factor: f32, to: &mut [f32], words: usize) {
    let factor = _mm512_set1_ps(factor);
    for (row, to) in rows.zip(to.chunks_exact_mut(words)) {
        for at in (0..row.len()).step_by(LANES) {
            let integers = _mm512_cvtps_epi32(_mm512_mul_ps(load(row, at), factor));
            let words = _mm512_castsi256_si512(_mm512_cvtsepi32_epi16(integers));
            let end = (at + LANES).min(row.len()).div_ceil(2);
            store(words, &mut to[at / 2..end]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row_pairs<'a>(mut rows: impl Iterator<Item = Elements<'a>>, factors: &[f32], to: &mut [f32]) {
    for to in to.chunks_exact_mut(factors.len()) {
        let pair = [rows.next(), rows.next()];
        for at in (0..to.len()).step_by(LANES) {
            let factor = load(Elements::F32(factors), at);
            let [first, second] = pair.map(|row| {
                let row = row.map_or(_mm512_setzero_ps(), |row| load(row, at));
                _mm512_cvtps_epi32(_mm512_mul_ps(row, factor))
            });
            let lower = _mm512_and_si512(first, _mm512_set1_epi32(0xffff));
            store(_mm512_or_si512(lower, _mm512_slli_epi32::<16>(second)), &mut to[at..]);
        }
    }
}
