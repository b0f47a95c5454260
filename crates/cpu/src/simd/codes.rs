//! Rows of numbers to codes of 8-bit floats: plain loops, compiled for the widest integers of the processor.
#![allow(unsafe_code)] // functions that are compiled for an instruction set

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
