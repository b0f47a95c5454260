//! AVX2 and FMA: 8 lanes, 16 registers.
#![allow(unsafe_code)] // intrinsics; an `Avx2` exists only where `detect` found the instructions

use std::arch::x86_64::*;

use super::{Simd, exp2_by_shift, transpose_plain};
use crate::tile::{self, Step};

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Avx2(()))
    }
}

// SAFETY of every block below: `self` is proof of the instructions; loads and stores are bounds-checked slices.
impl Simd for Avx2 {
    const LANES: usize = 8;
    const MAX_VECTORS: usize = 2;
    const WIDE_ROWS: usize = 6;
    type V = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        unsafe { _mm256_loadu_ps(from[..8].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: __m256, to: &mut [f32]) {
        unsafe { _mm256_storeu_ps(to[..8].as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn any_lt(self, a: __m256, b: __m256) -> bool {
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) != 0 }
    }
    #[inline(always)]
    fn exp2(self, t: __m256) -> __m256 {
        exp2_by_shift(self, t, |v| unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)))
        })
    }

    fn step<const VECTORS: usize>(self, step: Step<'_>) {
        #[target_feature(enable = "avx2,fma")]
        fn compiled<const VECTORS: usize>(s: Avx2, step: Step<'_>) {
            tile::run_step::<Avx2, VECTORS>(s, step);
        }
        unsafe { compiled::<VECTORS>(self, step) }
    }

    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
        transpose_plain(from, from_ld, to, to_ld, rows, cols);
    }
}
