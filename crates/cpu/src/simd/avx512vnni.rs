//! AVX-512 VNNI: 16-bit integers, multiplied and summed at twice the rate of f32.
#![allow(unsafe_code)] // intrinsics; an `Avx512Vnni` exists only where `detect` found the instructions

use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512;
use super::avx512bw::{LANES, load, store};
use super::pairs::{self, Columnwise, Extent, Pairs, RowNorms};
use crate::Elements;
use crate::peak;
use crate::tile::Step;
use crate::view::ElementRows;

/// A token: it exists only if the processor has AVX-512 VNNI, BW and VL, and everything of [`Avx512`].
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

impl Avx512Vnni {
    pub(crate) fn detect() -> Option<Avx512Vnni> {
        let short = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        let vnni = short && is_x86_feature_detected!("avx512vnni");
        Avx512::detect().filter(|_| vnni).map(Avx512Vnni)
    }

    /// Like [`Simd::products`], with pairs of 16-bit integers: twice as many operations.
    pub(crate) fn products(self, rounds: usize) -> f64 {
        #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
        fn compiled(s: Avx512, rounds: usize) -> f64 {
            peak::accumulate(s, |a, b, sum| add_products(a, b, sum), rounds)
        }
        // SAFETY: `self` implies the instructions.
        2.0 * unsafe { compiled(self.0, rounds) }
    }
}

// SAFETY of every block below: `self` implies the instructions; loads and stores are masked or
// bounds-checked.
impl Pairs for Avx512Vnni {
    type Vectors = Avx512;

    #[inline(always)]
    fn vectors(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn add_products(self, a: __m512, b: __m512, sum: __m512) -> __m512 {
        unsafe { add_products(a, b, sum) }
    }
    #[inline(always)]
    fn to_f32(self, sums: __m512) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(sums)) }
    }
    #[inline(always)]
    fn pair(self, first: __m512, second: __m512) -> __m512 {
        unsafe {
            let lower = _mm512_and_si512(_mm512_cvtps_epi32(first), _mm512_set1_epi32(0xffff));
            let upper = _mm512_slli_epi32::<16>(_mm512_cvtps_epi32(second));
            _mm512_castsi512_ps(_mm512_or_si512(lower, upper))
        }
    }
    #[inline(always)]
    fn load(self, from: Elements<'_>, at: usize) -> __m512 {
        unsafe { load(from, at) }
    }
    #[inline(always)]
    fn store(self, words: __m512, to: &mut [f32]) {
        unsafe { store(_mm512_castps_si512(words), to) }
    }

    fn integers<'a>(self, rows: impl ElementRows<'a>, factor: f32, to: &mut [f32], words: usize) {
        unsafe { integers(rows, factor, to, words) }
    }

    fn row_pairs<'a>(self, rows: impl ElementRows<'a>, factors: &[f32], to: &mut [f32]) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<'a>(p: Avx512Vnni, rows: impl ElementRows<'a>, factors: &[f32], to: &mut [f32]) {
            pairs::row_pairs(p, rows, factors, to);
        }
        unsafe { compiled(self, rows, factors, to) }
    }

    fn extent<'a>(self, rows: impl ElementRows<'a>) -> Extent {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<'a>(p: Avx512Vnni, rows: impl ElementRows<'a>) -> Extent {
            pairs::extent(p, rows)
        }
        unsafe { compiled(self, rows) }
    }

    fn add_columns<'a>(self, rows: impl ElementRows<'a> + Clone, columns: &mut Columnwise) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<'a>(p: Avx512Vnni, rows: impl ElementRows<'a> + Clone, columns: &mut Columnwise) {
            pairs::add_columns(p, rows, columns);
        }
        unsafe { compiled(self, rows, columns) }
    }

    fn row_norms<'a>(self, rows: impl ElementRows<'a>, factors: &[f32]) -> RowNorms {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<'a>(p: Avx512Vnni, rows: impl ElementRows<'a>, factors: &[f32]) -> RowNorms {
            pairs::row_norms(p, rows, factors)
        }
        unsafe { compiled(self, rows, factors) }
    }

    fn step(self, step: Step<'_>) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")]
        fn compiled<const VECTORS: usize>(vnni: Avx512Vnni, step: Step<'_>) {
            pairs::run_step::<_, VECTORS>(vnni, step);
        }
        match step.panel.width / LANES {
            4 => unsafe { compiled::<4>(self, step) },
            3 => unsafe { compiled::<3>(self, step) },
            2 => unsafe { compiled::<2>(self, step) },
            _ => unsafe { compiled::<1>(self, step) },
        }
    }
}

/// `sum` plus the sums of the products of pairs. Inline assembly, because the compiler turns the intrinsic
/// into VPMADDWD and VPADDD. Those have a shorter latency, but here the throughput matters.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_products(a: __m512, b: __m512, mut sum: __m512) -> __m512 {
    // SAFETY: only registers change.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn integers<'a>(rows: impl ElementRows<'a>, factor: f32, to: &mut [f32], words: usize) {
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
