//! Rounding of f32 numbers to other formats.

use half::{bf16, f16};

/// A number format to which f32 numbers are rounded.
pub(crate) trait Format {
    fn round(x: f32) -> f32;
}

impl Format for f32 {
    #[inline(always)]
    fn round(x: f32) -> f32 {
        x
    }
}

impl Format for f16 {
    /// The nearest number, ties to even, without branches: the compiler rounds many at once.
    #[inline(always)]
    fn round(x: f32) -> f32 {
        let size = x.abs();
        // Subnormals have the unit 2^-24, that of f32 between 1/2 and 1.
        let small = (size + 0.5) - 0.5;
        let large = f32::from_bits(even::<13>(size.to_bits()));
        let finite = if size < 2f32.powi(-14) { small } else { large };
        let rounded = if large > f32::from(f16::MAX) { f32::INFINITY } else { finite };
        if x.is_nan() { x } else { rounded.copysign(x) }
    }
}

impl Format for bf16 {
    #[inline(always)]
    fn round(x: f32) -> f32 {
        if x.is_nan() { x } else { f32::from_bits(even::<16>(x.to_bits())) }
    }
}

/// Drops the low `BITS` bits of a number's magnitude, to the nearest even.
#[inline(always)]
fn even<const BITS: u32>(bits: u32) -> u32 {
    let half = (1 << (BITS - 1)) - 1;
    bits.wrapping_add(half).wrapping_add(bits >> BITS & 1) >> BITS << BITS
}

/// 11 significant bits and the exponent range of f32.
pub(crate) struct Tf32;

impl Format for Tf32 {
    /// The nearest number, ties away from zero, as `cvt.rna.tf32.f32` rounds.
    fn round(x: f32) -> f32 {
        if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_as_half_rounds_them() {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let check = |bits: u32| {
            let x = f32::from_bits(bits);
            assert!(same(f16::round(x), f16::from_f32(x).to_f32()), "{x:e}");
            assert!(same(bf16::round(x), bf16::from_f32(x).to_f32()), "{x:e}");
        };
        // Each f16 and its midpoint with the next one, their neighbours, and all bf16 likewise.
        for bits in (0..=u32::MAX).step_by(1 << 12) {
            for near in [bits.wrapping_sub(1), bits, bits + 1] {
                check(near);
            }
        }
    }
}
