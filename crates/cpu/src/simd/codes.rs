//! Rows of numbers to codes of 8-bit floats and back: plain loops, compiled for the widest integers of the
//! processor.
#![allow(unsafe_code)] // functions that are compiled for an instruction set

use half::f16;
use problem::{DType, E4m3, E5m2};

/// The bits of the largest finite magnitude of a row. Bits of numbers that are not negative have the order of
/// the numbers.
pub(crate) fn largest_finite(row: &[f32]) -> i32 {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn compiled(row: &[f32]) -> i32 {
            largest_of(row)
        }
        // SAFETY: the processor has AVX2.
        return unsafe { compiled(row) };
    }
    largest_of(row)
}

#[inline(always)]
fn largest_of(row: &[f32]) -> i32 {
    let finite = |x: &f32| {
        let bits = (x.to_bits() & 0x7fff_ffff) as i32;
        if bits < 0x7f80_0000 { bits } else { 0 }
    };
    row.iter().map(finite).fold(0, i32::max)
}

/// The codes of a row's elements times `multiplier`. `to` has the same length as `row`.
pub(crate) fn codes(dtype: DType, row: &[f32], multiplier: f32, to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn compiled(dtype: DType, row: &[f32], multiplier: f32, to: &mut [u8]) {
            codes_of(dtype, row, multiplier, to);
        }
        // SAFETY: the processor has AVX2.
        return unsafe { compiled(dtype, row, multiplier, to) };
    }
    codes_of(dtype, row, multiplier, to);
}

#[inline(always)]
fn codes_of(dtype: DType, row: &[f32], multiplier: f32, to: &mut [u8]) {
    match dtype {
        DType::E5m2 => {
            to.iter_mut().zip(row).for_each(|(to, x)| *to = E5m2::from_f32(x * multiplier).to_bits())
        }
        _ => to.iter_mut().zip(row).for_each(|(to, x)| *to = E4m3::from_f32(x * multiplier).to_bits()),
    }
}

/// The numbers of a row of f16. A signalling NaN stays one.
#[inline(always)]
pub(super) fn widen_f16(from: &[f16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| {
        let magnitude = u32::from(x.to_bits()) & 0x7fff;
        let normal = (magnitude << 13) + ((127 - 15) << 23);
        let subnormal = (magnitude as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
        let special = magnitude << 13 | 0x7f80_0000;
        let finite = if magnitude < 0x400 { subnormal } else { normal };
        let bits = if magnitude >= 0x7c00 { special } else { finite };
        *to = f32::from_bits(bits | (u32::from(x.to_bits()) & 0x8000) << 16);
    });
}

/// The numbers of a row of e4m3 codes. `to` has the same length as `from`.
#[inline(always)]
pub(super) fn widen_e4m3(from: &[E4m3], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, code)| *to = number::<3, 7, 0x7f>(code.to_bits()));
}

/// The numbers of `LANES` e4m3 codes, for a vector that holds a NaN.
#[cold]
#[cfg(target_arch = "x86_64")]
pub(super) fn e4m3_with_nan<const LANES: usize>(from: &[E4m3]) -> [f32; LANES] {
    let mut numbers = [0.0; LANES];
    widen_e4m3(from, &mut numbers);
    numbers
}

/// The numbers of a row of e5m2 codes. `to` has the same length as `from`.
#[inline(always)]
pub(super) fn widen_e5m2(from: &[E5m2], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, code)| *to = number::<2, 15, 0x7c>(code.to_bits()));
}

/// The number of a code with `FRACTION` bits of fraction and a biased exponent. From the magnitude `SPECIAL`
/// on, codes are infinite (fraction 0 and e5m2 alone) or NaN.
#[inline(always)]
pub(super) const fn number<const FRACTION: u32, const BIAS: u32, const SPECIAL: u32>(code: u8) -> f32 {
    let magnitude = code as u32 & 0x7f;
    let normal = (magnitude << (23 - FRACTION)) + ((127 - BIAS) << 23);
    // Not by a multiplication of a subnormal f32, which many processors compute slowly.
    let unit = f32::from_bits((127 + 1 - BIAS - FRACTION) << 23);
    let subnormal = (magnitude as i32 as f32 * unit).to_bits();
    let infinity = 0x7f80_0000;
    let special =
        if SPECIAL == 0x7f { infinity | 1 << 22 } else { infinity | (magnitude.wrapping_sub(SPECIAL)) << 21 };
    let finite = if magnitude < 1 << FRACTION { subnormal } else { normal };
    let bits = if magnitude >= SPECIAL { special } else { finite };
    f32::from_bits(bits | (code as u32 & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use problem::Elements;

    use super::*;
    use crate::simd::{Portable, Simd, widen};

    fn widens_every_code<S: Simd>(s: S) {
        // Rows that end in the middle of a vector begin at each code.
        let codes = || (0..=255u8).chain(0..=255);
        let e4m3: Vec<E4m3> = codes().map(E4m3::from_bits).collect();
        let e5m2: Vec<E5m2> = codes().map(E5m2::from_bits).collect();
        let expected = |row: Elements<'_>| {
            let mut wide = vec![0.0; row.len()];
            row.widen(&mut wide);
            wide
        };
        for start in 0..256 {
            let rows = [Elements::from(&e4m3), Elements::from(&e5m2)];
            for row in rows.map(|row| row.range(start, start + 16 + start % 41)) {
                let mut wide = vec![0.0; row.len()];
                widen(s, row, &mut wide);
                for (wide, expected) in wide.into_iter().zip(expected(row)) {
                    let same = wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan();
                    assert!(same, "{}, from code {start:#x}: {wide}, expected {expected}", row.dtype());
                }
            }
        }
    }

    #[test]
    fn every_code_widens_to_its_number() {
        widens_every_code(Portable::<4>);
        #[cfg(target_arch = "x86_64")]
        crate::simd::Avx2::detect().into_iter().for_each(widens_every_code);
    }
}
