//! The `.approx` functions, for which PTX specifies an error bound instead of exact bits.
//!
//! ex2, lg2, rcp, rsqrt, sqrt and the divisions are computed as on an H200, bit for bit (`mufu`), including
//! the instructions that ptxas adds around the MUFU for subnormals. For other architectures, these values are
//! within the error bound but may differ in bits. sin, cos and tanh are the rounded true value on every
//! architecture. [`is_exact`] says which results are exact, and [`error_bound`] gives the bound that holds on
//! any hardware.

mod mufu;
mod tables;

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

/// Any instruction that this module implements.
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

/// The maximum distance of a result from the true value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ErrorBound {
    /// |result − f(a)| ≤ bound · |f(a)|, for results that are neither subnormal nor out of range.
    Relative(f64),
    /// |result − f(a)| ≤ bound.
    Absolute(f64),
    /// Within this number of units in the last place.
    Ulp(u32),
    /// `absolute` for inputs within `range`, `relative` elsewhere.
    AbsoluteWithin {
        /// Inputs for which the absolute bound holds.
        range: (f64, f64),
        /// The absolute bound.
        absolute: f64,
        /// The relative bound elsewhere.
        relative: f64,
    },
    /// Pairs of a limit and a bound. `Absolute` with the first bound for |a| up to the first limit, with the
    /// second bound up to the second limit. There is no bound beyond.
    AbsoluteByMagnitude([(f64, f64); 2]),
}

impl ErrorBound {
    /// Whether `found` is within the bound of the true value `exact` of the function at `x`. `ulp` is the
    /// unit in the last place of the result.
    pub fn admits(self, x: f64, found: f64, exact: f64, ulp: f64) -> bool {
        let error = (found - exact).abs();
        let room = match self {
            ErrorBound::Relative(r) => r * exact.abs(),
            ErrorBound::Absolute(r) => r,
            ErrorBound::Ulp(n) => f64::from(n) * ulp,
            ErrorBound::AbsoluteWithin { range, absolute, relative } => {
                if x > range.0 && x < range.1 {
                    absolute
                } else {
                    relative * exact.abs()
                }
            }
            ErrorBound::AbsoluteByMagnitude(limits) => {
                limits.iter().find(|(limit, _)| x.abs() <= *limit).map_or(f64::INFINITY, |(_, r)| *r)
            }
        };
        error <= room
    }
}

/// The bound that the PTX ISA states (version 8.x, the "Notes" of each instruction).
pub fn error_bound(op: ApproxOp) -> ErrorBound {
    use std::f64::consts::PI;
    let two = |exponent: f64| exponent.exp2();
    match op {
        ApproxOp::F32(Function::Ex2) => ErrorBound::Relative(two(-22.0)),
        ApproxOp::F32(Function::Lg2) => {
            ErrorBound::AbsoluteWithin { range: (0.5, 2.0), absolute: two(-22.0), relative: two(-22.0) }
        }
        ApproxOp::F32(Function::Rcp) => ErrorBound::Ulp(1),
        ApproxOp::F32(Function::Rsqrt) => ErrorBound::Relative(two(-22.9)),
        ApproxOp::F32(Function::Sqrt) => ErrorBound::Relative(two(-23.0)),
        ApproxOp::F32(Function::Sin | Function::Cos) => {
            // The PTX ISA states 2^-20.5 and 2^-14.7. cos.approx of an H200 slightly exceeds the bound, and
            // even 2^-20.45, for a few of millions of inputs (`evidence/h200.jsonl`, suite selftest). The
            // exponents are therefore relaxed by 0.1.
            ErrorBound::AbsoluteByMagnitude([(2.0 * PI, two(-20.4)), (100.0 * PI, two(-14.6))])
        }
        ApproxOp::F32(Function::Tanh) => ErrorBound::Relative(two(-11.0)),
        ApproxOp::Half(PackedFunction::Ex2, Packed::F16x2) => ErrorBound::Relative(two(-9.9)),
        ApproxOp::Half(PackedFunction::Ex2, Packed::Bf16x2) => ErrorBound::Relative(two(-7.0)),
        ApproxOp::Half(PackedFunction::Tanh, Packed::F16x2) => ErrorBound::Absolute(two(-10.987)),
        ApproxOp::Half(PackedFunction::Tanh, Packed::Bf16x2) => ErrorBound::Absolute(two(-8.0)),
        ApproxOp::DivApprox | ApproxOp::DivFull => ErrorBound::Ulp(2),
    }
}

/// Whether results equal those of the architecture bit for bit.
pub const fn is_exact(op: ApproxOp, sm: u32) -> bool {
    match op {
        ApproxOp::F32(Function::Ex2 | Function::Lg2 | Function::Rcp | Function::Rsqrt | Function::Sqrt)
        | ApproxOp::Half(PackedFunction::Ex2, _)
        | ApproxOp::DivApprox
        | ApproxOp::DivFull => sm == 90,
        ApproxOp::F32(Function::Sin | Function::Cos | Function::Tanh)
        | ApproxOp::Half(PackedFunction::Tanh, _) => false,
    }
}

/// `d = function(a)` in the lanes of `active`. The other lanes of `d` keep their values.
pub fn f32_function(function: Function, ftz: bool, active: u32, d: &mut Lanes32, a: &Lanes32) {
    let arch = pulp::Arch::new();
    match (function, ftz) {
        (Function::Ex2, _) => arch.dispatch(Exponentials { ftz, active, d, a }),
        (Function::Lg2, true) => arch.dispatch(Lanes { f: unit(mufu::lg2), ftz, active, d, a }),
        (Function::Rcp, true) => arch.dispatch(Lanes { f: unit(mufu::rcp), ftz, active, d, a }),
        (Function::Rsqrt, true) => arch.dispatch(Lanes { f: unit(mufu::rsqrt), ftz, active, d, a }),
        (Function::Sqrt, true) => arch.dispatch(Lanes { f: unit(mufu::sqrt), ftz, active, d, a }),
        (Function::Lg2, false) => arch.dispatch(Lanes { f: lg2, ftz, active, d, a }),
        (Function::Rcp, false) => arch.dispatch(Lanes { f: rcp, ftz, active, d, a }),
        (Function::Rsqrt, false) => arch.dispatch(Lanes { f: rsqrt, ftz, active, d, a }),
        (Function::Sqrt, false) => arch.dispatch(Lanes { f: sqrt, ftz, active, d, a }),
        (Function::Sin, _) => {
            arch.dispatch(Lanes { f: |x: f32| f64::from(x).sin() as f32, ftz, active, d, a });
        }
        (Function::Cos, _) => {
            arch.dispatch(Lanes { f: |x: f32| f64::from(x).cos() as f32, ftz, active, d, a });
        }
        (Function::Tanh, _) => {
            arch.dispatch(Lanes { f: |x: f32| f64::from(x).tanh() as f32, ftz, active, d, a });
        }
    }
}

/// A function of the MUFU, on floats instead of bits.
#[inline(always)]
fn unit(f: impl Fn(u32) -> u32) -> impl Fn(f32) -> f32 {
    move |x| f32::from_bits(f(x.to_bits()))
}

/// 2^24, the factor that makes subnormal operands normal.
const UP: f32 = 16_777_216.0;
/// 2^126. The reciprocal of a larger number is subnormal.
const HUGE: f32 = 8.507_059e37;

// The code that ptxas (13.0, sm_90) generates for the forms without `.ftz`, because the MUFU treats
// subnormals as 0.

/// The function by its name: a closure would not be certain to be compiled for the vector instructions.
#[inline(always)]
fn ex2_unit(x: f32) -> f32 {
    f32::from_bits(mufu::ex2(x.to_bits()))
}

#[inline(always)]
fn lg2(x: f32) -> f32 {
    let low = x.abs() < f32::MIN_POSITIVE;
    let y = unit(mufu::lg2)(if low { x * UP } else { x });
    if low { y - 24.0 } else { y }
}

#[inline(always)]
fn rcp(x: f32) -> f32 {
    let factor = if x.abs() > HUGE {
        0.25
    } else if x.abs() < f32::MIN_POSITIVE {
        UP
    } else {
        1.0
    };
    factor * unit(mufu::rcp)(x * factor)
}

#[inline(always)]
fn rsqrt(x: f32) -> f32 {
    let low = x.abs() < f32::MIN_POSITIVE;
    let y = unit(mufu::rsqrt)(if low { x * UP } else { x });
    if low { y * 4096.0 } else { y }
}

#[inline(always)]
fn sqrt(x: f32) -> f32 {
    let low = x.abs() < f32::MIN_POSITIVE;
    let y = unit(mufu::sqrt)(if low { x * UP } else { x });
    if low { y / 4096.0 } else { y }
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

/// `ex2.approx.f32`. Without `.ftz`, a result below the normal numbers is the square of that of half the
/// exponent.
struct Exponentials<'a> {
    ftz: bool,
    active: u32,
    d: &'a mut Lanes32,
    a: &'a Lanes32,
}

impl WithSimd for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { ftz, active, d, a } = self;
        let kept = if ftz { MIN_NORMAL } else { 0 };
        let is_low = |x: f32| !ftz && x < -126.0;
        let mut inputs = *a;
        for input in &mut inputs {
            let x = f32::from_bits(flush(*input, kept));
            *input = if is_low(x) { x * 0.5 } else { x }.to_bits();
        }
        let results = mufu::ex2_lanes(&inputs);
        for lane in 0..32 {
            let result = f32::from_bits(results[lane]);
            let low = is_low(f32::from_bits(a[lane]));
            let result = if low { result * result } else { result };
            let bits = if result.is_nan() { 0x7FFF_FFFF } else { flush(result.to_bits(), kept) };
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

/// `div.approx.f32` and `div.full.f32`: a product with the reciprocal of the MUFU. For a huge divisor
/// `div.approx` gives 0; `div.full` scales both operands. Without `.ftz`, both scale the operands for a
/// subnormal divisor too.
#[inline(always)]
pub fn div_f32(op: DivApprox, ftz: bool, a: u32, b: u32) -> u32 {
    let kept = if ftz { MIN_NORMAL } else { 0 };
    let [a, b] = [a, b].map(|bits| f32::from_bits(flush(bits, kept)));
    let factor = if op == DivApprox::Full && b.abs() > HUGE {
        0.25
    } else if !ftz && b.abs() < f32::MIN_POSITIVE {
        UP
    } else {
        1.0
    };
    let scaled = |x: f32| f32::from_bits(flush((x * factor).to_bits(), kept));
    let quotient = unit(mufu::rcp)(scaled(b)) * scaled(a);
    if quotient.is_nan() { 0x7FFF_FFFF } else { flush(quotient.to_bits(), kept) }
}

/// [`div_f32`] in the lanes of `active`. The other lanes of `d` keep their values.
pub fn div_lanes(op: DivApprox, ftz: bool, active: u32, d: &mut Lanes32, inputs: [&Lanes32; 2]) {
    pulp::Arch::new().dispatch(Quotients { op, ftz, active, d, inputs });
}

struct Quotients<'a> {
    op: DivApprox,
    ftz: bool,
    active: u32,
    d: &'a mut Lanes32,
    inputs: [&'a Lanes32; 2],
}

impl WithSimd for Quotients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { op, ftz, active, d, inputs: [a, b] } = self;
        for lane in 0..32 {
            let quotient = div_f32(op, ftz, a[lane], b[lane]);
            d[lane] = if active >> lane & 1 == 1 { quotient } else { d[lane] };
        }
    }
}

/// The approximate divisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DivApprox {
    /// `div.approx.f32`.
    Approx,
    /// `div.full.f32`.
    Full,
}

/// `d = function(a)` on both halves of the lanes of `active`. ex2 is the MUFU's f32 result truncated; tanh is
/// rounded.
pub fn packed_function(function: PackedFunction, format: Packed, active: u32, d: &mut Lanes32, a: &Lanes32) {
    let arch = pulp::Arch::new();
    match (function, format) {
        (PackedFunction::Ex2, Packed::F16x2) => {
            arch.dispatch(Halves::<_, 10, 5> { f: ex2_f16, active, d, a });
        }
        (PackedFunction::Ex2, Packed::Bf16x2) => {
            arch.dispatch(Halves::<_, 7, 8> { f: ex2_bf16, active, d, a });
        }
        (PackedFunction::Tanh, Packed::F16x2) => {
            arch.dispatch(Halves::<_, 10, 5> { f: |x: f32| f64::from(x.tanh()), active, d, a });
        }
        (PackedFunction::Tanh, Packed::Bf16x2) => {
            arch.dispatch(Halves::<_, 7, 8> { f: |x: f32| f64::from(x.tanh()), active, d, a });
        }
    }
}

/// 2^x truncated to an f16 with 10 fraction bits, fewer for a subnormal.
#[inline(always)]
fn ex2_f16(x: f32) -> f64 {
    let y = f64::from(ex2_unit(x));
    // Below 2^-14, the smallest normal number, the unit in the last place is 2^-24.
    let unit = if y >= 2f64.powi(-14) { power_below(y) / 1024.0 } else { 2f64.powi(-24) };
    if y < 65_536.0 { (y / unit).floor() * unit } else { y }
}

/// 2^x truncated to a bf16.
#[inline(always)]
fn ex2_bf16(x: f32) -> f64 {
    let y = mufu::ex2(x.to_bits());
    // Truncation keeps a NaN a NaN.
    f64::from(f32::from_bits(y & 0xffff_0000))
}

/// The largest power of two that is not greater than `y`.
#[inline(always)]
fn power_below(y: f64) -> f64 {
    f64::from_bits(y.to_bits() & 0x7ff0_0000_0000_0000)
}

struct Halves<'a, F, const FRACTION: u32, const EXPONENT: u32> {
    f: F,
    active: u32,
    d: &'a mut Lanes32,
    a: &'a Lanes32,
}

impl<F: Fn(f32) -> f64, const FRACTION: u32, const EXPONENT: u32> WithSimd
    for Halves<'_, F, FRACTION, EXPONENT>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { f, active, d, a } = self;
        for lane in 0..32 {
            let half = |shift: u32| {
                let x = widen::<FRACTION>(a[lane] >> shift & 0xFFFF) as f32;
                narrow::<FRACTION, EXPONENT>(f(x))
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
                                bound.admits(x, found, exact, 0.0),
                                "{function:?} {format:?} {x:e} {found:e}"
                            );
                        } else if (function, format) == (PackedFunction::Ex2, Packed::Bf16x2) {
                            // The instruction has no form without `.ftz`.
                            assert_eq!(found, 0.0);
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
