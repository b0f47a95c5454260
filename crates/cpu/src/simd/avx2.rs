//! AVX2, FMA and F16C: 8 lanes, 16 registers.
#![allow(unsafe_code)] // intrinsics; an `Avx2` exists only where `detect` found the instructions

use std::arch::x86_64::*;

use half::{bf16, f16};
use problem::{E4m3, E5m2};

use super::compiled::compiled_steps;
use super::{Simd, codes, exp2_by_shift, transpose_plain, widen_bf16_plain};
use crate::{Element, Elements};

/// A token: it exists only if the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Avx2> {
        let arithmetic = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        (arithmetic && is_x86_feature_detected!("f16c")).then_some(Avx2(()))
    }
}

// SAFETY of every block below: `self` implies the instructions; loads and stores are bounds-checked slices.
impl Simd for Avx2 {
    const LANES: usize = 8;
    const MAX_VECTORS: usize = 2;
    const IN_PLACE: bool = true;
    const TILE_ROWS: [usize; 4] = [12, 6, 0, 0];
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
    fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
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
    #[inline(always)]
    fn sum_each<const ROWS: usize, const KEYS: usize>(self, of: &[[__m256; KEYS]; ROWS]) -> __m256 {
        unsafe { sum_each(|i| of[i / KEYS][i % KEYS]) }
    }

    compiled_steps!(Avx2, target_feature(enable = "avx2,fma"));

    #[inline(always)]
    fn load_wide<T: Element>(self, from: &[T]) -> __m256 {
        match T::elements(&from[..8]) {
            Elements::F32(from) => self.load(from),
            // Each type is `repr(transparent)` over its bits.
            Elements::F16(from) => unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) },
            Elements::Bf16(from) => unsafe {
                let narrow = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(narrow))
            },
            Elements::E4m3(from) => unsafe {
                match e4m3_as_f16(_mm_loadl_epi64(from.as_ptr().cast())) {
                    Some(halves) => {
                        let narrow = _mm256_castsi256_si128(halves);
                        _mm256_mul_ps(_mm256_cvtph_ps(narrow), _mm256_set1_ps(256.0))
                    }
                    None => self.load(&codes::e4m3_with_nan::<8>(from)),
                }
            },
            Elements::E5m2(from) => unsafe {
                let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.as_ptr().cast()));
                _mm256_cvtph_ps(_mm_slli_epi16::<8>(codes))
            },
            Elements::I32(_) | Elements::U8(_) => self.splat(f32::NAN), // types of no tensor
        }
    }
    #[inline(always)]
    fn prefetch<T: Element>(self, row: &[T]) {
        prefetch(row);
    }

    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        unsafe { widen_f16(from, to) }
    }

    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        unsafe { widen_bf16(from, to) }
    }

    fn widen_e4m3(self, from: &[E4m3], to: &mut [f32]) {
        unsafe { widen_e4m3(from, to) }
    }

    fn widen_e5m2(self, from: &[E5m2], to: &mut [f32]) {
        unsafe { widen_e5m2(from, to) }
    }

    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
        unsafe { transpose(from, from_ld, to, to_ld, rows, cols) }
    }
}

/// The sums of the lanes of eight vectors, as one vector. Neighbours are added over 2, 4 and 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_each(of: impl Fn(usize) -> __m256) -> __m256 {
    let two = |i: usize| _mm256_hadd_ps(of(i), of(i + 1));
    // Each half holds its own sums of four vectors.
    let four = |i: usize| _mm256_hadd_ps(two(i), two(i + 2));
    let (a, b) = (four(0), four(4));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}

/// Widens 8 elements at a time, and the rest one by one.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_f16(from: &[f16], to: &mut [f32]) {
    let whole = from.len() - from.len() % 8;
    for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
        unsafe {
            // An f16 is its 16 bits (`repr(transparent)`).
            let narrow = _mm_loadu_si128(from.as_ptr().cast());
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(narrow));
        }
    }
    for (from, to) in from[whole..].iter().zip(&mut to[whole..]) {
        *to = from.to_f32();
    }
}

/// Asks for the cache lines of elements, in the L2 cache: rows that are a power of two apart share so few
/// sets of the L1 cache that they would be evicted before they are read.
#[inline(always)]
pub(super) fn prefetch<T>(of: &[T]) {
    let std::ops::Range { start, end } = of.as_ptr_range();
    let mut line = start.cast::<i8>();
    line = line.wrapping_sub(line.addr() % 64);
    while line < end.cast() {
        // SAFETY: a prefetch does not access memory.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
        line = line.wrapping_add(64);
    }
}

/// Sixteen e4m3 codes as f16 numbers 2⁻⁸ times as large; `None` if a code is NaN.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn e4m3_as_f16(codes: __m128i) -> Option<__m256i> {
    let magnitude = _mm_set1_epi8(0x7f);
    let nans = _mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude);
    // The sign in bits 15 and 14, then the magnitude.
    let signed = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
    let halves = _mm256_and_si256(signed, _mm256_set1_epi16(0xbfff_u16 as i16));
    (_mm_testz_si128(nans, nans) == 1).then_some(halves)
}

/// Widens 16 codes at a time, and the rest one by one. The bits of an e4m3 number are those of an f16 number
/// 2⁻⁸ times as large: the conversion also handles subnormal numbers. NaN codes, which are no f16 NaN, are
/// looked for on the way and written at the end.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_e4m3(from: &[E4m3], to: &mut [f32]) {
    let whole = from.len() - from.len() % 16;
    let (magnitude, exponent) = (_mm_set1_epi8(0x7f), _mm256_set1_ps(256.0));
    let all_but_bit_14 = _mm256_set1_epi16(0xbfff_u16 as i16);
    let mut nans = _mm_setzero_si128();
    for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(16)) {
        unsafe {
            // An `E4m3` is its 8 bits (`repr(transparent)`).
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            nans = _mm_or_si128(nans, _mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude));
            // The sign in bits 15 and 14, then the magnitude.
            let signed = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
            let narrow = _mm256_and_si256(signed, all_but_bit_14);
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(narrow));
            let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(narrow));
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_mul_ps(low, exponent));
            _mm256_storeu_ps(to[8..].as_mut_ptr(), _mm256_mul_ps(high, exponent));
        }
    }
    codes::widen_e4m3(&from[whole..], &mut to[whole..]);
    if _mm_testz_si128(nans, nans) == 0 {
        codes::widen_e4m3(from, to);
    }
}

/// Widens 8 codes at a time, and the rest one by one: a code is the upper half of an f16 number.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_e5m2(from: &[E5m2], to: &mut [f32]) {
    let whole = from.len() - from.len() % 8;
    for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
        unsafe {
            // An `E5m2` is its 8 bits (`repr(transparent)`).
            let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.as_ptr().cast()));
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_slli_epi16::<8>(codes)));
        }
    }
    codes::widen_e5m2(&from[whole..], &mut to[whole..]);
}

/// The plain loop, compiled for AVX2.
#[target_feature(enable = "avx2")]
pub(super) fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    widen_bf16_plain(from, to);
}

/// Transposes in blocks of 8 × 8, and the rest element by element.
#[target_feature(enable = "avx2")]
pub(super) fn transpose(
    from: &[f32],
    from_ld: usize,
    to: &mut [f32],
    to_ld: usize,
    rows: usize,
    cols: usize,
) {
    let (whole_rows, whole_cols) = (rows - rows % 8, cols - cols % 8);
    for row in (0..whole_rows).step_by(8) {
        for col in (0..whole_cols).step_by(8) {
            transpose_8x8(&from[row * from_ld + col..], from_ld, &mut to[col * to_ld + row..], to_ld);
        }
    }
    // Without rows, slices may be empty.
    if whole_cols < cols && whole_rows > 0 {
        let (from, to) = (&from[whole_cols..], &mut to[whole_cols * to_ld..]);
        transpose_plain(from, from_ld, to, to_ld, whole_rows, cols - whole_cols);
    }
    if whole_rows < rows {
        let (from, to) = (&from[whole_rows * from_ld..], &mut to[whole_rows..]);
        transpose_plain(from, from_ld, to, to_ld, rows - whole_rows, cols);
    }
}

/// Swaps pairs of 32, then of 64, then of 128 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize) {
    let row = |i: usize| unsafe { _mm256_loadu_ps(from[i * from_ld..][..8].as_ptr()) };
    let mut pairs = [_mm256_setzero_ps(); 8];
    for i in 0..4 {
        let (a, b) = (row(2 * i), row(2 * i + 1));
        pairs[2 * i] = _mm256_unpacklo_ps(a, b);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(a, b);
    }
    // quads[i] holds columns i and i + 4 of rows 0 to 3, quads[i + 4] those of rows 4 to 7.
    let mut quads = [_mm256_setzero_ps(); 8];
    for half in 0..2 {
        for i in 0..2 {
            let (a, b) = (pairs[4 * half + i], pairs[4 * half + 2 + i]);
            quads[4 * half + 2 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
            quads[4 * half + 2 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
        }
    }
    for i in 0..4 {
        let low = _mm256_permute2f128_ps::<0x20>(quads[i], quads[i + 4]);
        let high = _mm256_permute2f128_ps::<0x31>(quads[i], quads[i + 4]);
        unsafe {
            _mm256_storeu_ps(to[i * to_ld..][..8].as_mut_ptr(), low);
            _mm256_storeu_ps(to[(i + 4) * to_ld..][..8].as_mut_ptr(), high);
        }
    }
}
