//! The multifunction unit (MUFU) of an H200, bit for bit: piecewise quadratic interpolation in fixed point,
//! as described by S. Oberman and M. Siu in "A High-Performance Area-Efficient Multifunction Interpolator"
//! (ARITH 2005).
//!
//! The leading 6 bits of a fraction (7 for the reciprocal) select a segment. The remaining bits are `x`. The
//! result of a segment is the sum of `C0`, `C1·x`, `C2·x²` and a constant that compensates for the
//! truncations, truncated at the last place of the result. For `x²`, only the partial products of column 19
//! and above are summed. The widths, the constant and all coefficients were derived from results of the
//! device: no other triple gives all results of its segment. The tests compare all 2²³ fractions (both
//! binades for the roots, both sides of 1 for the logarithm) with a digest of the device's results.

use super::super::Lanes32;
use super::tables::{EX2, LG2, RCP, RSQRT, SQRT, Segment};

const NAN: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;
const ONE: u32 = 0x3f80_0000;
/// Number of fraction bits below the 6 bits that select one of 64 segments.
const REST: u32 = 17;

impl Segment {
    /// `C0·2^shift + bias + C1·x + C2·x²·2^double`, where `x²` counts units of 2^19.
    #[inline(always)]
    fn at(self, x: u32, shift: u32, bias: i64, double: u32) -> i64 {
        let [c0, c1, c2] = [self.0, self.1, self.2].map(i64::from);
        let linear = (c0 << shift).wrapping_add(bias).wrapping_add(c1.wrapping_mul(i64::from(x)));
        linear.wrapping_add(c2.wrapping_mul(square(x)) << double)
    }
}

/// The square of 17 bits in units of 2^19, from the partial products that the hardware keeps. The product of
/// two different bits `i` and `j` occurs once, in column `i + j + 1`. The product of a bit with itself is in
/// column `2i`.
///
/// Therefore all products among the upper 8 bits are kept except the square of the lowest of them. No
/// products among the lower 9 bits are kept. Products of a lower bit `i` with an upper bit `j` are kept for
/// `i + j ≥ 18`.
#[inline(always)]
fn square(x: u32) -> i64 {
    let upper = x >> 9;
    let crossed =
        (2..=8).fold(0u32, |sum, i| sum.wrapping_add((x >> i & 1).wrapping_neg() & (x >> (18 - i))));
    i64::from((upper.wrapping_mul(upper) >> 1).wrapping_add(crossed))
}

/// Exponent without its bias, and fraction.
#[inline(always)]
const fn parts(x: u32) -> (i32, u32) {
    ((x >> 23 & 0xff) as i32 - 127, x & 0x7f_ffff)
}

/// A magnitude near 1 times a power of two. Subnormal results become 0.
#[inline(always)]
const fn scaled(near_one: u32, power: i32) -> u32 {
    let exponent = ((near_one >> 23) as i32).wrapping_add(power);
    let finite = (exponent as u32) << 23 | near_one & 0x7f_ffff;
    let bounded = if exponent >= 255 { INFINITY } else { finite };
    if exponent <= 0 { 0 } else { bounded }
}

#[inline(always)]
const fn is_nan(x: u32) -> bool {
    x & !SIGN > INFINITY
}

/// `MUFU.EX2`.
#[inline(always)]
pub(super) fn ex2(x: u32) -> u32 {
    let fixed = ex2_fixed(x);
    ex2_result(x, fixed, EX2[(fixed & 0x7f_ffff) as usize >> REST])
}

/// [`ex2`] of many numbers. The segments are looked up in a pass of their own, so that the compiler computes
/// the rest in vectors.
#[inline(always)]
pub(super) fn ex2_lanes(x: &Lanes32) -> Lanes32 {
    let [mut fixed, mut d] = [[0; 32]; 2];
    for lane in 0..32 {
        fixed[lane] = ex2_fixed(x[lane]);
    }
    let [mut c0, mut c1, mut c2] = [[0; 32]; 3];
    for lane in 0..32 {
        Segment(c0[lane], c1[lane], c2[lane]) = EX2[(fixed[lane] & 0x7f_ffff) as usize >> REST];
    }
    for lane in 0..32 {
        d[lane] = ex2_result(x[lane], fixed[lane], Segment(c0[lane], c1[lane], c2[lane]));
    }
    d
}

/// A number as fixed point with 23 fraction bits, without branches.
#[inline(always)]
fn ex2_fixed(x: u32) -> u32 {
    let (exponent, fraction) = parts(x);
    let negative = (x as i32 >> 31) as u32;
    // Lower bits are dropped.
    let (up, down) = (exponent.clamp(0, 7) as u32, exponent.wrapping_neg().clamp(0, 31) as u32);
    let magnitude = (fraction | 0x80_0000) << up >> down;
    // A negative number is formed as the one's complement, without adding the last unit, except where it has
    // no fraction.
    let whole = u32::from(magnitude & 0x7f_ffff == 0);
    (magnitude ^ negative).wrapping_add(negative & whole)
}

/// [`ex2`] of a number from its fixed-point form and the segment of that, without branches.
#[inline(always)]
fn ex2_result(x: u32, fixed: u32, segment: Segment) -> u32 {
    let mantissa = segment.at(fixed & ((1 << REST) - 1), 13, 6114, 0) >> 15;
    let result = scaled(ONE.wrapping_add(mantissa as u32), fixed as i32 >> 23);
    let large = if x & SIGN == 0 { INFINITY } else { 0 };
    match (parts(x).0 >= 8, is_nan(x)) {
        (_, true) => NAN,
        (true, _) => large,
        _ => result,
    }
}

/// `MUFU.RCP`.
#[inline(always)]
pub(super) fn rcp(x: u32) -> u32 {
    let (exponent, fraction) = parts(x);
    let sign = x & SIGN;
    if is_nan(x) {
        return NAN;
    }
    if exponent == -127 {
        return sign | INFINITY;
    }
    if exponent == 128 {
        return sign;
    }
    // 128 segments. The remaining bits are one fewer and are shifted left by one for the square.
    let segment = RCP[(fraction >> 16) as usize];
    let rest = fraction & 0xffff;
    let [c0, c1, c2] = [segment.0, segment.1, segment.2].map(i64::from);
    let mantissa = ((c0 << 13) + 2023 + c1 * i64::from(rest) + c2 * square(rest << 1)) >> 15;
    // The result lies in (½, 1], in units of 2^-24.
    sign | scaled(0x3f00_0000 + mantissa as u32, -exponent)
}

/// `MUFU.RSQ`.
#[inline(always)]
pub(super) fn rsqrt(x: u32) -> u32 {
    let (exponent, fraction) = parts(x);
    if is_nan(x) {
        return NAN;
    }
    if exponent == -127 {
        return x & SIGN | INFINITY;
    }
    if x & SIGN != 0 {
        return NAN;
    }
    if exponent == 128 {
        return 0;
    }
    // The root of a power of four is exact, although its segment begins one unit lower.
    if fraction == 0 && exponent & 1 == 0 {
        return scaled(ONE, -(exponent >> 1));
    }
    let mantissa = root(&RSQRT, exponent, fraction).at(fraction & ((1 << REST) - 1), 14, 16383, 1) >> 16;
    scaled(0x3f00_0000 + mantissa as u32, -(exponent >> 1))
}

/// `MUFU.SQRT`.
#[inline(always)]
pub(super) fn sqrt(x: u32) -> u32 {
    let (exponent, fraction) = parts(x);
    if is_nan(x) {
        return NAN;
    }
    if exponent == -127 {
        return x & SIGN;
    }
    if x & SIGN != 0 {
        return NAN;
    }
    if exponent == 128 {
        return x;
    }
    let mantissa = root(&SQRT, exponent, fraction).at(fraction & ((1 << REST) - 1), 15, 32767, 1) >> 17;
    scaled(ONE + mantissa.clamp(0, 0x7f_ffff) as u32, exponent >> 1)
}

/// The segment of a root. The table has 64 segments for even exponents, then 64 for odd ones.
#[inline(always)]
fn root(table: &[Segment; 128], exponent: i32, fraction: u32) -> Segment {
    table[(exponent & 1) as usize * 64 + (fraction >> REST) as usize]
}

/// `MUFU.LG2`.
#[inline(always)]
pub(super) fn lg2(x: u32) -> u32 {
    let (exponent, fraction) = parts(x);
    if is_nan(x) {
        return NAN;
    }
    if exponent == -127 {
        return SIGN | INFINITY;
    }
    if x & SIGN != 0 {
        return NAN;
    }
    if exponent == 128 {
        return x;
    }
    if x == ONE {
        return 0;
    }
    // A fixed-point number with 36 fraction bits.
    let of_fraction = LG2[(fraction >> REST) as usize].at(fraction & ((1 << REST) - 1), 12, 837, 1) >> 2;
    let fixed = (i64::from(exponent) << 36) + of_fraction;
    let magnitude = if fixed < 0 { !fixed } else { fixed } as u64;
    // A negative number is formed as the one's complement, without adding the last unit. Bits beyond 24 are
    // dropped.
    if magnitude == 0 {
        return 0;
    }
    let top = 63 - magnitude.leading_zeros();
    let significand = if top > 23 { magnitude >> (top - 23) } else { magnitude << (23 - top) } as u32;
    let sign = if fixed < 0 { SIGN } else { 0 };
    sign | (top + 127 - 36) << 23 | significand & 0x7f_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Σ yᵢ·(i·φ + 1) mod 2⁶⁴ over consecutive results yᵢ.
    fn digest(f: fn(u32) -> u32, first: f32, count: u32) -> u64 {
        (0..count).fold(0, |sum: u64, i| {
            let weight = u64::from(i).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
            sum.wrapping_add(u64::from(f(first.to_bits() + i)).wrapping_mul(weight))
        })
    }

    /// The digests are of all results of an H200 (driver 580.159.04).
    #[test]
    fn every_fraction_gives_the_device_s_bits() {
        assert_eq!(digest(ex2, 1.0, 1 << 23), 0x553a_2bb8_c2e3_eefe, "ex2");
        assert_eq!(digest(rcp, 1.0, 1 << 23), 0x43dc_d38d_8502_70de, "rcp");
        assert_eq!(digest(rsqrt, 1.0, 1 << 24), 0x1474_1757_d44a_5b05, "rsqrt");
        assert_eq!(digest(sqrt, 1.0, 1 << 24), 0xab6a_963a_65a5_5edf, "sqrt");
        assert_eq!(digest(lg2, 0.5, 1 << 24), 0x5bc6_d795_ce76_d645, "lg2");
    }

    /// Results of the same H200 for exponents and special values that the digests do not cover.
    #[test]
    fn ends_and_exponents_are_the_device_s() {
        for (f, x, y) in [
            (ex2 as fn(u32) -> u32, 0xbf80_0001, 0x3eff_fffe),
            (ex2, 0xbf7f_ffff, 0x3f00_0000),
            (ex2, 0xbf80_0000, 0x3f00_0000),
            (ex2, 0x33be_cd85, 0x3f80_0000),
            (ex2, 0x8080_0000, 0x3f80_0000),
            (ex2, 0xc2fc_0000, 0x0080_0000),
            (ex2, 0xc300_0000, 0),
            (ex2, 0x4300_0000, INFINITY),
            (rcp, 0x7e80_0000, 0x0080_0000),
            (rcp, 0xff7f_ffff, SIGN),
            (rcp, 0x0086_76ff, 0x7e73_b126),
            (rcp, 0x807f_ffff, SIGN | INFINITY),
            (rsqrt, 0x00bf_87c8, 0x5ed1_477a),
            (rsqrt, 0x7f7f_ffff, 0x1f80_0000),
            (rsqrt, SIGN, SIGN | INFINITY),
            (sqrt, 0x00b0_ddd2, 0x2016_765a),
            (sqrt, 0x7f7f_ffff, 0x5f7f_ffff),
            (sqrt, SIGN, SIGN),
            (lg2, 0x0080_0000, 0xc2fb_ffff),
            (lg2, 0x42fc_0000, 0x40df_45e0),
            (lg2, 0x7f7f_ffff, 0x42ff_ffff),
            (lg2, 0x3f80_0000, 0),
            (lg2, 0xbf80_0000, NAN),
        ] {
            assert_eq!(f(x), y, "{x:08x}: {:08x}", f(x));
        }
        for f in [ex2, rcp, rsqrt, sqrt, lg2] {
            assert_eq!((f(0x7f80_0001), f(u32::MAX)), (NAN, NAN));
        }
    }
}
