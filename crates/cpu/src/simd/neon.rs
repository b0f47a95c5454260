//! NEON of AArch64: 4 lanes, 32 registers.
#![allow(unsafe_code)] // intrinsics; a `Neon` exists only where `detect` found the instructions

use std::arch::aarch64::*;

use super::compiled::compiled_steps;
use super::{Simd, exp2_by_shift, transpose_plain};

/// A token: it exists only if the processor has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

// SAFETY of every block below: `self` implies the instructions; loads and stores are bounds-checked slices.
impl Simd for Neon {
    const LANES: usize = 4;
    const MAX_VECTORS: usize = 4;
    const IN_PLACE: bool = true;
    const TILE_ROWS: [usize; 4] = [12, 12, 8, 6];
    type V = float32x4_t;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> float32x4_t {
        unsafe { vld1q_f32(from[..4].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: float32x4_t, to: &mut [f32]) {
        unsafe { vst1q_f32(to[..4].as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    fn select_lt(self, a: float32x4_t, b: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    fn any_lt(self, a: float32x4_t, b: float32x4_t) -> bool {
        unsafe { vmaxvq_u32(vcltq_f32(a, b)) != 0 }
    }
    #[inline(always)]
    fn exp2(self, t: float32x4_t) -> float32x4_t {
        exp2_by_shift(self, t, |v| unsafe {
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(v)))
        })
    }
    #[inline(always)]
    fn sum_each<const ROWS: usize, const KEYS: usize>(self, of: &[[float32x4_t; KEYS]; ROWS]) -> float32x4_t {
        let at = |i: usize| of[i / KEYS][i % KEYS];
        unsafe { vpaddq_f32(vpaddq_f32(at(0), at(1)), vpaddq_f32(at(2), at(3))) }
    }

    compiled_steps!(Neon, target_feature(enable = "neon"));

    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
        transpose_plain(from, from_ld, to, to_ld, rows, cols);
    }
}
