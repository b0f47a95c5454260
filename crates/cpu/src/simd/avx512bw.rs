//! Rows of elements of any type and length as AVX-512 vectors (BW and VL).
#![allow(unsafe_code)] // intrinsics and masked loads, called from code compiled for them

use std::arch::x86_64::*;

use super::{Avx512, Simd};
use crate::Elements;

/// f32 lanes of a vector.
pub(super) const LANES: usize = <Avx512>::LANES;

/// [`LANES`] elements of a row from `at` on, with zeros after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn load(from: Elements<'_>, at: usize) -> __m512 {
    let at = at.min(from.len());
    let mask = lanes(from.len() - at);
    // SAFETY: the mask excludes elements that do not exist.
    unsafe {
        match from {
            Elements::F32(x) => _mm512_maskz_loadu_ps(mask, x.as_ptr().add(at)),
            Elements::F16(x) => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x.as_ptr().add(at).cast())),
            Elements::Bf16(x) => {
                let halves = _mm256_maskz_loadu_epi16(mask, x.as_ptr().add(at).cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
            }
            Elements::I32(_) | Elements::U8(_) | Elements::E4m3(_) | Elements::E5m2(_) => {
                let mut wide = [0.0; LANES];
                let count = (from.len() - at).min(LANES);
                from.range(at, at + count).widen(&mut wide);
                _mm512_loadu_ps(wide.as_ptr())
            }
        }
    }
}

/// A mask of the first `count` lanes.
fn lanes(count: usize) -> __mmask16 {
    if count < LANES { !(!0 << count) } else { !0 }
}

/// Writes the first words of the vector: as many as `to` has, at most [`LANES`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(words: __m512i, to: &mut [f32]) {
    // SAFETY: the mask excludes elements that do not exist.
    unsafe { _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), lanes(to.len()), words) }
}
