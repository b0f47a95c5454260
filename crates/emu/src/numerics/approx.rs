//! The `.approx` functions. PTX gives them an error bound, not bits: a value inside the bound is computed here, as
//! close to the true one as is cheap, and the special values are exactly those of the PTX ISA's tables.
//!
//! [`error_bound`] is what a proof may assume of the hardware, and so of this stand-in.

use pulp::{Simd, WithSimd};

use super::Lanes32;
use super::float::lanes::{MIN_NORMAL, Packed, flush, narrow, widen};

/// An approximated f32 function, each with and without `.ftz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Function {
    /// 2^a.
    Ex2,
    /// log₂ a.
    Lg2,
    /// 1 / a.
    Rcp,
    /// 1 / √a.
    Rsqrt,
    /// √a.
    Sqrt,
    /// sin a, in radians.
    Sin,
    /// cos a, in radians.
    Cos,
    /// tanh a.
    Tanh,
}

impl Function {
    /// Every function.
    pub const ALL: [Self; 8] =
        [Self::Ex2, Self::Lg2, Self::Rcp, Self::Rsqrt, Self::Sqrt, Self::Sin, Self::Cos, Self::Tanh];
}

/// An approximated function of packed 16-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedFunction {
    /// 2^a.
    Ex2,
    /// tanh a.
    Tanh,
}

/// Any instruction of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApproxOp {
    /// `.approx{.ftz}.f32`.
    F32(Function),
    /// `.approx` of f16 or bf16, single or packed.
    Half(PackedFunction, Packed),
    /// `div.approx.f32`.
    DivApprox,
    /// `div.full.f32`.
    DivFull,
}

/// How far from the true value a result may lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// |result − f(a)| ≤ bound · |f(a)|, for results that are neither subnormal nor out of range.
    Relative(f64),
    /// |result − f(a)| ≤ bound.
    Absolute(f64),
    /// Within so many units in the last place.
    Ulp(u32),
    /// `Absolute` for inputs between the two numbers, `Relative` elsewhere.
    AbsoluteWithin {
        /// Inputs for which the absolute bound holds.
        range: (f64, f64),
        /// That bound.
        absolute: f64,
        /// The relative bound elsewhere.
        relative: f64,
    },
    /// `Absolute` for |a| up to the first limit, a wider one up to the second; none beyond.
    AbsoluteByMagnitude([(f64, f64); 2]),
}

impl Bound {
    /// Whether `found` is near enough to the true value `exact` of the function at `x`; `ulp` is the unit in the last place
    /// of the result.
    pub fn admits(self, x: f64, found: f64, exact: f64, ulp: f64) -> bool {
        let error = (found - exact).abs();
        let room = match self {
            Bound::Relative(r) => r * exact.abs(),
            Bound::Absolute(r) => r,
            Bound::Ulp(n) => f64::from(n) * ulp,
            Bound::AbsoluteWithin { range, absolute, relative } => {
                if x > range.0 && x < range.1 {
                    absolute
                } else {
                    relative * exact.abs()
                }
            }
            Bound::AbsoluteByMagnitude(limits) => {
                limits.iter().find(|(limit, _)| x.abs() <= *limit).map_or(f64::INFINITY, |(_, r)| *r)
            }
        };
        error <= room
    }
}

/// The bound that the PTX ISA states (version 8.x, the "Notes" of each instruction).
pub fn error_bound(op: ApproxOp) -> Bound {
    use std::f64::consts::PI;
    let two = |exponent: f64| exponent.exp2();
    match op {
        ApproxOp::F32(Function::Ex2) => Bound::Relative(two(-22.0)),
        ApproxOp::F32(Function::Lg2) => {
            Bound::AbsoluteWithin { range: (0.5, 2.0), absolute: two(-22.0), relative: two(-22.0) }
        }
        ApproxOp::F32(Function::Rcp) => Bound::Ulp(1),
        ApproxOp::F32(Function::Rsqrt) => Bound::Relative(two(-22.9)),
        ApproxOp::F32(Function::Sqrt) => Bound::Relative(two(-23.0)),
        ApproxOp::F32(Function::Sin | Function::Cos) => {
            Bound::AbsoluteByMagnitude([(2.0 * PI, two(-20.5)), (100.0 * PI, two(-14.7))])
        }
        ApproxOp::F32(Function::Tanh) => Bound::Relative(two(-11.0)),
        ApproxOp::Half(PackedFunction::Ex2, Packed::F16x2) => Bound::Relative(two(-9.9)),
        ApproxOp::Half(PackedFunction::Ex2, Packed::Bf16x2) => Bound::Relative(two(-7.0)),
        ApproxOp::Half(PackedFunction::Tanh, Packed::F16x2) => Bound::Absolute(two(-10.987)),
        ApproxOp::Half(PackedFunction::Tanh, Packed::Bf16x2) => Bound::Absolute(two(-8.0)),
        ApproxOp::DivApprox | ApproxOp::DivFull => Bound::Ulp(2),
    }
}

/// `d = function(a)` in the lanes of `active`; the others keep `d`.
pub fn f32_function(function: Function, ftz: bool, active: u32, d: &mut Lanes32, a: &Lanes32) {
    let arch = pulp::Arch::new();
    match function {
        Function::Ex2 => arch.dispatch(Lanes { f: exp2, ftz, active, d, a }),
        Function::Lg2 => arch.dispatch(Lanes { f: log2, ftz, active, d, a }),
        Function::Rcp => arch.dispatch(Lanes { f: |x: f32| 1.0 / x, ftz, active, d, a }),
        Function::Rsqrt => arch.dispatch(Lanes { f: rsqrt, ftz, active, d, a }),
        Function::Sqrt => arch.dispatch(Lanes { f: |x: f32| x.sqrt(), ftz, active, d, a }),
        Function::Sin => arch.dispatch(Lanes { f: |x: f32| f64::from(x).sin() as f32, ftz, active, d, a }),
        Function::Cos => arch.dispatch(Lanes { f: |x: f32| f64::from(x).cos() as f32, ftz, active, d, a }),
        Function::Tanh => arch.dispatch(Lanes { f: |x: f32| f64::from(x).tanh() as f32, ftz, active, d, a }),
    }
}

struct Lanes<'a, F> {
    f: F,
    ftz: bool,
    active: u32,
    d: &'a mut Lanes32,
    a: &'a Lanes32,
}

impl<F: Fn(f32) -> f32> WithSimd for Lanes<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { f, ftz, active, d, a } = self;
        let kept = if ftz { MIN_NORMAL } else { 0 };
        for lane in 0..32 {
            let result = f(f32::from_bits(flush(a[lane], kept)));
            let bits = if result.is_nan() { 0x7FFF_FFFF } else { flush(result.to_bits(), kept) };
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

/// (ln 2)^k / k! for k = 7 … 1: the series of 2^f. Cut after f^7 it errs by 2^-27 for |f| ≤ ½.
const EXP2_SERIES: [f32; 7] = {
    let mut series = [0.0; 7];
    let (mut term, mut k) = (1.0, 1);
    while k <= 7 {
        term *= std::f64::consts::LN_2 / k as f64;
        series[7 - k] = term as f32;
        k += 1;
    }
    series
};

/// 2^x to about one unit in the last place.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    // Beyond these ends the result is zero or infinity all the same.
    let clamped = x.clamp(-160.0, 160.0);
    // Adding 1.5·2^23 rounds to a whole number, found in the low bits.
    let shifted = clamped + 12_582_912.0;
    let f = clamped - (shifted - 12_582_912.0);
    let n = shifted.to_bits().wrapping_sub(12_582_912f32.to_bits()) as i32;
    let series = EXP2_SERIES.iter().fold(0.0, |sum: f32, &c| sum.mul_add(f, c));
    let fraction = series.mul_add(f, 1.0);
    // In two steps, since 2^n alone may be out of range.
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    fraction * power(half) * power(n - half)
}

/// log₂ x through f64: log₂ m = (2 / ln 2)·artanh((m − 1) / (m + 1)).
#[inline(always)]
fn log2(x: f32) -> f32 {
    let bits = f64::from(x).to_bits();
    // The exponent is the one that leaves a mantissa between √½ and √2.
    let offset = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let exponent = (offset as i64 >> 52) as i32;
    let m = f64::from_bits(bits.wrapping_sub((i64::from(exponent) << 52) as u64));
    let s = (m - 1.0) / (m + 1.0);
    let q = s * s;
    // |s| < 0.172: the term left out is below 2^-45.
    let series = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0]
        .iter()
        .fold(0.0, |sum: f64, &c| sum.mul_add(q, c));
    let value = (2.0 * std::f64::consts::LOG2_E * s).mul_add(series, f64::from(exponent)) as f32;
    let special = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    if x > 0.0 && x < f32::INFINITY {
        value
    } else if x == f32::INFINITY {
        x
    } else {
        special
    }
}

#[inline(always)]
fn rsqrt(x: f32) -> f32 {
    // √−0 = −0, whose reciprocal is the −∞ of PTX's table.
    (1.0 / f64::from(x).sqrt()) as f32
}

/// `div.approx.f32` and `div.full.f32`: the rounded quotient, and for |b| in (2^126, 2^128) the zero (or, for an
/// infinite a, the NaN) that PTX prescribes for `div.approx`.
pub fn div_f32(op: DivApprox, ftz: bool, a: u32, b: u32) -> u32 {
    let kept = if ftz { MIN_NORMAL } else { 0 };
    let [a, b] = [a, b].map(|bits| f32::from_bits(flush(bits, kept)));
    let huge = op == DivApprox::Approx && b.abs() > 2f32.powi(126) && b.is_finite();
    let quotient = if huge { a * (0.0 * b) } else { a / b };
    if quotient.is_nan() { 0x7FFF_FFFF } else { flush(quotient.to_bits(), kept) }
}

/// The approximate divisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DivApprox {
    /// `div.approx.f32`.
    Approx,
    /// `div.full.f32`.
    Full,
}

/// `d = function(a)` on both halves of the lanes of `active`.
pub fn packed_function(function: PackedFunction, format: Packed, active: u32, d: &mut Lanes32, a: &Lanes32) {
    let arch = pulp::Arch::new();
    match (function, format) {
        (PackedFunction::Ex2, Packed::F16x2) => arch.dispatch(Halves::<_, 10, 5> { f: exp2, active, d, a }),
        (PackedFunction::Ex2, Packed::Bf16x2) => arch.dispatch(Halves::<_, 7, 8> { f: exp2, active, d, a }),
        (PackedFunction::Tanh, Packed::F16x2) => {
            arch.dispatch(Halves::<_, 10, 5> { f: f32::tanh, active, d, a })
        }
        (PackedFunction::Tanh, Packed::Bf16x2) => {
            arch.dispatch(Halves::<_, 7, 8> { f: f32::tanh, active, d, a })
        }
    }
}

struct Halves<'a, F, const FRACTION: u32, const EXPONENT: u32> {
    f: F,
    active: u32,
    d: &'a mut Lanes32,
    a: &'a Lanes32,
}

impl<F: Fn(f32) -> f32, const FRACTION: u32, const EXPONENT: u32> WithSimd
    for Halves<'_, F, FRACTION, EXPONENT>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { f, active, d, a } = self;
        for lane in 0..32 {
            let half = |shift: u32| {
                let x = widen::<FRACTION>(a[lane] >> shift & 0xFFFF) as f32;
                narrow::<FRACTION, EXPONENT>(f64::from(f(x)))
            };
            let bits = half(0) | half(16) << 16;
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(function: Function, ftz: bool, x: f32) -> f32 {
        let mut d = [0; 32];
        f32_function(function, ftz, 1, &mut d, &[x.to_bits(); 32]);
        assert_eq!(d[1], 0, "an inactive lane was written");
        f32::from_bits(d[0])
    }

    fn truth(function: Function, x: f64) -> f64 {
        match function {
            Function::Ex2 => x.exp2(),
            Function::Lg2 => x.log2(),
            Function::Rcp => 1.0 / x,
            Function::Rsqrt => 1.0 / x.sqrt(),
            Function::Sqrt => x.sqrt(),
            Function::Sin => x.sin(),
            Function::Cos => x.cos(),
            Function::Tanh => x.tanh(),
        }
    }

    #[test]
    fn every_f32_function_keeps_its_bound() {
        for function in Function::ALL {
            let bound = error_bound(ApproxOp::F32(function));
            // Every 4093rd bit pattern: all exponents, both signs, 32 lanes at a time.
            let mut bits = 0u64;
            while bits < 1 << 32 {
                let a: Lanes32 = std::array::from_fn(|lane| (bits + 4093 * lane as u64) as u32);
                bits += 4093 * 32;
                let mut d = [0; 32];
                f32_function(function, false, u32::MAX, &mut d, &a);
                for lane in 0..32 {
                    let x = f64::from(f32::from_bits(a[lane]));
                    let (found, exact) = (f32::from_bits(d[lane]), truth(function, x));
                    if exact.is_nan() {
                        assert_eq!(d[lane], 0x7FFF_FFFF, "{function:?} {x:e}");
                    } else if exact.abs() >= f64::from(f32::MAX) {
                        assert!(
                            found.abs() >= f32::MAX && f64::from(found) * exact > 0.0,
                            "{function:?} {x:e}"
                        );
                    } else if exact.abs() < f64::from(f32::MIN_POSITIVE) {
                        assert!(
                            (f64::from(found) - exact).abs() <= 2f64.powi(-148),
                            "{function:?} {x:e} {found:e}"
                        );
                    } else {
                        let ulp = f64::from(found.abs().next_up()) - f64::from(found.abs());
                        assert!(
                            bound.admits(x, f64::from(found), exact, ulp),
                            "{function:?} {x:e}: {found:e}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn special_values_are_those_of_the_tables() {
        use Function as F;
        const INF: f32 = f32::INFINITY;
        let tiny = f32::from_bits(5);
        for (function, x, expected) in [
            (F::Ex2, -INF, 0.0),
            (F::Ex2, -tiny, 1.0),
            (F::Ex2, -0.0, 1.0),
            (F::Ex2, INF, INF),
            (F::Ex2, 3.0, 8.0),
            (F::Ex2, -140.0, 0.0),
            (F::Lg2, -tiny, -INF),
            (F::Lg2, -0.0, -INF),
            (F::Lg2, tiny, -INF),
            (F::Lg2, INF, INF),
            (F::Rcp, -INF, -0.0),
            (F::Rcp, -tiny, -INF),
            (F::Rcp, 0.0, INF),
            (F::Rsqrt, -tiny, -INF),
            (F::Rsqrt, -0.0, -INF),
            (F::Rsqrt, INF, 0.0),
            (F::Sqrt, -tiny, -0.0),
            (F::Sqrt, -0.0, -0.0),
            (F::Sin, -tiny, -0.0),
            (F::Cos, -0.0, 1.0),
            (F::Tanh, -INF, -1.0),
            (F::Tanh, INF, 1.0),
        ] {
            assert_eq!(one(function, true, x).to_bits(), expected.to_bits(), "{function:?}({x:e})");
        }
        for (function, x) in
            [(F::Lg2, -1.0), (F::Lg2, -INF), (F::Sqrt, -1.0), (F::Rsqrt, -1.0), (F::Sin, INF)]
        {
            assert_eq!(one(function, true, x).to_bits(), 0x7FFF_FFFF);
        }
        assert_eq!(one(F::Ex2, false, -149.0), f32::from_bits(1));
        assert_eq!(one(F::Lg2, false, f32::from_bits(1)), -149.0);
        assert_eq!(one(F::Ex2, false, f32::NAN).to_bits(), 0x7FFF_FFFF);
    }

    #[test]
    fn halves_keep_their_bounds() {
        for format in [Packed::F16x2, Packed::Bf16x2] {
            for (function, f) in
                [(PackedFunction::Ex2, f64::exp2 as fn(f64) -> f64), (PackedFunction::Tanh, f64::tanh)]
            {
                let bound = error_bound(ApproxOp::Half(function, format));
                let read = |bits: u32| match format {
                    Packed::F16x2 => half::f16::from_bits(bits as u16).to_f64(),
                    Packed::Bf16x2 => half::bf16::from_bits(bits as u16).to_f64(),
                };
                let (smallest, largest) = match format {
                    Packed::F16x2 => (2f64.powi(-14), 65504.0),
                    Packed::Bf16x2 => (2f64.powi(-126), 3e38),
                };
                for bits in (0..0x1_0000u32).step_by(32) {
                    let a = std::array::from_fn(|lane| (bits + lane as u32) << 16 | 0x3C00);
                    let mut d = [0; 32];
                    packed_function(function, format, u32::MAX, &mut d, &a);
                    for lane in 0..32 {
                        let (x, found) = (read(a[lane] >> 16), read(d[lane] >> 16));
                        let exact = f(x);
                        if exact.is_nan() {
                            assert_eq!(d[lane] >> 16, 0x7FFF);
                        } else if exact.abs() > largest {
                            assert!(found.is_infinite());
                        } else if exact.abs() >= smallest {
                            assert!(
                                within(bound, x, found, exact, 0.0),
                                "{function:?} {format:?} {x:e} {found:e}"
                            );
                        } else {
                            assert!((found - exact).abs() <= smallest * 2f64.powi(-8));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn approximate_division_gives_up_on_huge_divisors() {
        let run = |op, a: f32, b: f32| f32::from_bits(div_f32(op, false, a.to_bits(), b.to_bits()));
        assert_eq!(run(DivApprox::Approx, 6.0, 3.0), 2.0);
        assert_eq!(run(DivApprox::Approx, 1e38, 1.5e38), 0.0);
        assert!(run(DivApprox::Approx, f32::INFINITY, 1.5e38).is_nan());
        assert_eq!(run(DivApprox::Full, 1.5e38, 1.5e38), 1.0);
        assert_eq!(run(DivApprox::Full, 1.0, 0.0), f32::INFINITY);
    }
}
