//! AVX-512 F: 16 lanes, 32 registers, and instructions for exponents.
#![allow(unsafe_code)] // intrinsics; an `Avx512` exists only where `detect` found the instructions

use std::arch::x86_64::*;

use half::{bf16, f16};
use problem::{E4m3, E5m2};

use super::{Simd, codes, exp2_polynomial, lookup};
use crate::backward;
use crate::dims::{self, InPlace};
use crate::peak;
use crate::programs::{self, Compiled, Loads, Operation, Region, Values};
use crate::tile::{self, Step};
use crate::{Element, Elements, ElementsMut};

/// 2^r − 1 = r · q(r) for r in [0, 1]: a relative minimax fit of degree 5 with p(0) = 1, error below 1.4·2⁻²⁴
/// (Lawson iteration in f64; coefficients rounded to f32).
const EXP2_FLOOR: [f32; 5] = [0.693_151_3, 0.240_164_44, 0.055_799_913, 0.009_017_03, 0.001_867_130_2];

/// A token: it exists only if the processor has AVX-512 F and DQ, and everything of [`super::Avx2`]; with
/// `BYTES`, also BW and VBMI, by which it widens 8-bit elements.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BYTES: bool = false>(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Avx512> {
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq");
        // Widening, and the transposition of remainders, use AVX2.
        (wide && super::Avx2::detect().is_some()).then_some(Avx512(()))
    }

    /// # Safety
    /// The processor has AVX-512 BW and VBMI.
    pub(super) unsafe fn with_bytes(self) -> Avx512<true> {
        Avx512(())
    }
}

// SAFETY of every block below: `self` implies the instructions; loads and stores are bounds-checked slices.
impl<const BYTES: bool> Simd for Avx512<BYTES> {
    const LANES: usize = 16;
    const MAX_VECTORS: usize = 4;
    const IN_PLACE: bool = true;
    const FOUR: bool = BYTES;
    // 6 · 4 sums, 4 vectors of B and a broadcast: 29 of 32 registers.
    const TILE_ROWS: [usize; 4] = [12, 12, 8, 6];
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        unsafe { _mm512_loadu_ps(from[..16].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32]) {
        unsafe { _mm512_storeu_ps(to[..16].as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn any_lt(self, a: __m512, b: __m512) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) != 0 }
    }
    #[inline(always)]
    fn exp2(self, t: __m512) -> __m512 {
        unsafe {
            // VREDUCE gives t − floor(t) (0 for −∞), VSCALEF multiplies by 2^floor(t).
            let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t);
            _mm512_scalef_ps(exp2_polynomial(self, r, &EXP2_FLOOR), t)
        }
    }
    #[inline(always)]
    fn sum_each<const ROWS: usize, const KEYS: usize>(self, of: &[[__m512; KEYS]; ROWS]) -> __m512 {
        unsafe { sum_each(|i| of[i / KEYS][i % KEYS]) }
    }

    fn step<const VECTORS: usize>(self, step: Step<'_>) {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled<const VECTORS: usize>(s: Avx512, step: Step<'_>) {
            tile::run_step::<Avx512, VECTORS>(s, step);
        }
        unsafe { compiled::<VECTORS>(Avx512(()), step) }
    }

    fn step_dims(self, step: Step<'_>) {
        if let Some(bytes) = step.block.in_place.filter(InPlace::is_bytes)
            && let Some(s) = Avx512::detect_bytes()
        {
            return s.step_bytes(step, bytes);
        }
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, step: Step<'_>) {
            dims::run_step(s, step);
        }
        unsafe { compiled(Avx512(()), step) }
    }

    fn backward(self, stage: backward::TileStep<'_>) {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, stage: backward::TileStep<'_>) {
            backward::run(s, stage);
        }
        unsafe { compiled(Avx512(()), stage) }
    }

    fn evaluate(self, program: &Compiled<'_>, values: &mut Values, region: Region<'_>) {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, program: &Compiled<'_>, values: &mut Values, region: Region<'_>) {
            programs::evaluate(s, program, values, region);
        }
        unsafe { compiled(Avx512(()), program, values, region) }
    }

    fn compute(self, operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]) {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]) {
            programs::compute(s, operation, loads, to);
        }
        unsafe { compiled(Avx512(()), operation, loads, to) }
    }

    fn products(self, rounds: usize) -> f64 {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, rounds: usize) -> f64 {
            peak::chains(s, rounds)
        }
        unsafe { compiled(Avx512(()), rounds) }
    }

    fn read(self, from: &[f32]) {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn compiled(s: Avx512, from: &[f32]) {
            peak::sum(s, from);
        }
        unsafe { compiled(Avx512(()), from) }
    }

    #[inline(always)]
    fn load_wide<T: Element>(self, from: &[T]) -> __m512 {
        match T::elements(&from[..16]) {
            Elements::F32(from) => self.load(from),
            // Each type is `repr(transparent)` over its bits.
            Elements::F16(from) => unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) },
            Elements::Bf16(from) => unsafe {
                let narrow = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(narrow))
            },
            Elements::E4m3(from) => unsafe {
                match super::avx2::e4m3_as_f16(_mm_loadu_si128(from.as_ptr().cast())) {
                    Some(halves) => _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0)),
                    None => self.load(&codes::e4m3_with_nan::<16>(from)),
                }
            },
            Elements::E5m2(from) => unsafe {
                let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
                _mm512_cvtph_ps(_mm256_slli_epi16::<8>(codes))
            },
            Elements::I32(_) | Elements::U8(_) => self.splat(f32::NAN), // types of no tensor
        }
    }
    #[inline(always)]
    fn load_four<T: Element>(self, from: &[T]) -> [__m512; 4] {
        let from = &from[..64];
        // Each type is `repr(transparent)` over its bits.
        match T::elements(from) {
            Elements::E4m3(codes) if BYTES => unsafe {
                lookup::widen(&*codes.as_ptr().cast(), &lookup::E4M3)
            },
            Elements::E5m2(codes) if BYTES => unsafe {
                lookup::widen(&*codes.as_ptr().cast(), &lookup::E5M2)
            },
            _ => {
                let mut wide = [self.splat(0.0); 4];
                for (i, wide) in wide.iter_mut().enumerate() {
                    *wide = self.load_wide(&from[i * Self::LANES..]);
                }
                wide
            }
        }
    }
    #[inline(always)]
    fn prefetch<T: Element>(self, row: &[T]) {
        super::avx2::prefetch(row);
    }

    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        unsafe { super::avx2::widen_f16(from, to) }
    }

    fn widen_e4m3(self, from: &[E4m3], to: &mut [f32]) {
        unsafe { super::avx2::widen_e4m3(from, to) }
    }

    fn widen_e5m2(self, from: &[E5m2], to: &mut [f32]) {
        unsafe { super::avx2::widen_e5m2(from, to) }
    }

    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        unsafe { super::avx2::widen_bf16(from, to) }
    }

    fn narrow_scaled<T: Element>(self, from: &[f32], factor: f32, to: &mut [T]) {
        match T::elements_mut(to) {
            ElementsMut::F32(to) => unsafe { scale(from, factor, to) },
            ElementsMut::F16(to) => unsafe { narrow_scaled_f16(from, factor, to) },
            ElementsMut::Bf16(to) => unsafe { narrow_scaled_bf16(from, factor, to) },
            ElementsMut::E4m3(_) | ElementsMut::E5m2(_) => T::narrow_scaled(from, factor, to),
        }
    }

    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
        unsafe { transpose(from, from_ld, to, to_ld, rows, cols) }
    }
}

/// The sums of the lanes of sixteen vectors, as one vector. Neighbours are added over 2, 4, 8 and 16 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn sum_each(of: impl Fn(usize) -> __m512) -> __m512 {
    // For vectors a, b: each quarter holds a0 + a2, b0 + b2, a1 + a3, b1 + b3.
    let two = |i: usize| {
        let (a, b) = (of(i), of(i + 1));
        _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)))
    };
    // For vectors a to d: each quarter holds its own sums of a, b, c and d.
    let four = |i: usize| {
        let (ab, cd) = (two(i), two(i + 2));
        let [low, high] =
            [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)].map(|v| _mm512_castpd_ps(v));
        _mm512_add_ps(low, high)
    };
    // Quarters 0 and 2 of a, then of b, plus quarters 1 and 3.
    let quarters = |a, b| {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
        )
    };
    quarters(quarters(four(0), four(4)), quarters(four(8), four(12)))
}

/// Transposes in blocks of 16 × 16, and the rest as AVX2 does.
#[target_feature(enable = "avx512f,avx2")]
fn transpose(from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
    let (whole_rows, whole_cols) = (rows - rows % 16, cols - cols % 16);
    for row in (0..whole_rows).step_by(16) {
        for col in (0..whole_cols).step_by(16) {
            transpose_16x16(&from[row * from_ld + col..], from_ld, &mut to[col * to_ld + row..], to_ld);
        }
    }
    // Without rows, slices may be empty.
    if whole_cols < cols && whole_rows > 0 {
        let (from, to) = (&from[whole_cols..], &mut to[whole_cols * to_ld..]);
        super::avx2::transpose(from, from_ld, to, to_ld, whole_rows, cols - whole_cols);
    }
    if whole_rows < rows {
        let (from, to) = (&from[whole_rows * from_ld..], &mut to[whole_rows..]);
        super::avx2::transpose(from, from_ld, to, to_ld, rows - whole_rows, cols);
    }
}

/// Swaps pairs of 32, then of 64 bits, then quarters of vectors, which are 4 × 4 blocks.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16x16(from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize) {
    // SAFETY of the loads and stores: slices of 16 elements.
    let row = |i: usize| unsafe { _mm512_loadu_ps(from[i * from_ld..][..16].as_ptr()) };
    // Quarter q of quads[4 · g + c] holds column 4 · q + c of rows 4 · g to 4 · g + 3.
    let mut quads = [_mm512_setzero_ps(); 16];
    for g in 0..4 {
        let [a, b, c, d] = [row(4 * g), row(4 * g + 1), row(4 * g + 2), row(4 * g + 3)];
        let low = [_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d)].map(|v| _mm512_castps_pd(v));
        let high = [_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d)].map(|v| _mm512_castps_pd(v));
        for (half, [first, last]) in [low, high].into_iter().enumerate() {
            quads[4 * g + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, last));
            quads[4 * g + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, last));
        }
    }
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    for c in 0..4 {
        let [first, second, third, fourth] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        let even = [_mm512_shuffle_f32x4::<EVEN>(first, second), _mm512_shuffle_f32x4::<EVEN>(third, fourth)];
        let odd = [_mm512_shuffle_f32x4::<ODD>(first, second), _mm512_shuffle_f32x4::<ODD>(third, fourth)];
        let columns = [
            _mm512_shuffle_f32x4::<EVEN>(even[0], even[1]),
            _mm512_shuffle_f32x4::<EVEN>(odd[0], odd[1]),
            _mm512_shuffle_f32x4::<ODD>(even[0], even[1]),
            _mm512_shuffle_f32x4::<ODD>(odd[0], odd[1]),
        ];
        for (quarter, column) in columns.into_iter().enumerate() {
            unsafe { _mm512_storeu_ps(to[(4 * quarter + c) * to_ld..][..16].as_mut_ptr(), column) };
        }
    }
}

#[target_feature(enable = "avx512f")]
fn scale(from: &[f32], factor: f32, to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from * factor;
    }
}

#[target_feature(enable = "avx512f")]
fn narrow_scaled_f16(from: &[f32], factor: f32, to: &mut [f16]) {
    let (whole, rest) = from.as_chunks::<16>();
    let (to_whole, to_rest) = to.as_chunks_mut::<16>();
    let factors = _mm512_set1_ps(factor);
    for (from, to) in whole.iter().zip(to_whole) {
        // SAFETY: both are arrays of 16 elements.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(from.as_ptr()), factors);
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(scaled);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
    }
    f16::narrow_scaled(rest, factor, to_rest);
}

#[target_feature(enable = "avx512f")]
fn narrow_scaled_bf16(from: &[f32], factor: f32, to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = (from * factor).to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could turn a NaN into infinity, or change its sign.
        let quiet = bits >> 16 | 0x40;
        *to = bf16::from_bits(if (from * factor).is_nan() { quiet } else { rounded } as u16);
    }
}
