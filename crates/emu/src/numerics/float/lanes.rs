//! f32 `.rn` and packed f16 and bf16 arithmetic on whole registers: the operations that dominate attention
//! kernels.
//!
//! Inactive lanes of `d` keep their values. Vector instructions and fused multiply-adds are used where the
//! CPU has them. The results are the same without them.

use pulp::{Simd, WithSimd};

use crate::numerics::Lanes32;

/// A lane-wise f32 operation, rounded to nearest even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum F32Op {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a · b.
    Mul,
    /// a · b + c, rounded once.
    Fma,
    /// a · b + c, rounded once and clamped to [0, 1] (`.sat`, which turns NaN into 0).
    FmaSat,
    /// a · b + c, rounded down: `.rm`.
    FmaDown,
    /// The smaller operand. If one operand is NaN, the result is the other operand.
    Min,
    /// The larger operand. If one operand is NaN, the result is the other operand.
    Max,
}

/// `d = op(a, b, c)` in the lanes of `active`. Only the fused operations read `c`.
#[inline]
pub fn f32_op(op: F32Op, ftz: bool, active: u32, d: &mut Lanes32, [a, b, c]: [&Lanes32; 3]) {
    let arch = pulp::Arch::new();
    match op {
        F32Op::Add => {
            arch.dispatch(Lanewise { f: |[a, b, _]: [f32; 3]| a + b, ftz, active, d, inputs: [a, b, c] })
        }
        F32Op::Sub => {
            arch.dispatch(Lanewise { f: |[a, b, _]: [f32; 3]| a - b, ftz, active, d, inputs: [a, b, c] })
        }
        F32Op::Mul => {
            arch.dispatch(Lanewise { f: |[a, b, _]: [f32; 3]| a * b, ftz, active, d, inputs: [a, b, c] })
        }
        F32Op::Fma => arch.dispatch(Lanewise {
            f: |[a, b, c]: [f32; 3]| a.mul_add(b, c),
            ftz,
            active,
            d,
            inputs: [a, b, c],
        }),
        F32Op::FmaSat => arch.dispatch(Lanewise {
            f: |[a, b, c]: [f32; 3]| clamped(a.mul_add(b, c)),
            ftz,
            active,
            d,
            inputs: [a, b, c],
        }),
        F32Op::FmaDown => arch.dispatch(Lanewise {
            f: |[a, b, c]: [f32; 3]| fma_down(a, b, c),
            ftz,
            active,
            d,
            inputs: [a, b, c],
        }),
        F32Op::Min => arch.dispatch(Lanewise {
            f: |[a, b, _]: [f32; 3]| smaller(a, b),
            ftz,
            active,
            d,
            inputs: [a, b, c],
        }),
        F32Op::Max => arch.dispatch(Lanewise {
            f: |[a, b, _]: [f32; 3]| -smaller(-a, -b),
            ftz,
            active,
            d,
            inputs: [a, b, c],
        }),
    }
}

macro_rules! smaller {
    ($name:ident, $float:ty) => {
        /// The smaller of two values. −0 is below +0. The result is NaN only if both are NaN.
        #[inline(always)]
        fn $name(a: $float, b: $float) -> $float {
            let equal = <$float>::from_bits(a.to_bits() | b.to_bits());
            let ordered = if a < b {
                a
            } else if a == b {
                equal
            } else {
                b
            };
            // A comparison with NaN is false, which selects b.
            if b.is_nan() { a } else { ordered }
        }
    };
}
smaller!(smaller, f32);
smaller!(smaller64, f64);

#[inline(always)]
fn clamped(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// a · b + c rounded toward −∞. The product of two f32 is exact in f64. The sum is computed together with its
/// error. If the nearest f32 is above the exact result, the next lower f32 is returned.
#[inline(always)]
fn fma_down(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let (sum, error) = two_sum(product, c);
    if sum == 0.0 {
        // The sum is exact, because no operand is small enough to underflow in f64. Terms that cancel give −0
        // when rounding down (IEEE 754, 6.3).
        return if product.is_sign_positive() && c.is_sign_positive() { 0.0 } else { -0.0 };
    }
    let near = sum as f32;
    let above = f64::from(near) > sum || (f64::from(near) == sum && error < 0.0);
    if above { near.next_down() } else { near }
}

/// A struct rather than a closure, so that its body is certain to be compiled for the chosen vector
/// instructions.
struct Lanewise<'a, F> {
    f: F,
    ftz: bool,
    active: u32,
    d: &'a mut Lanes32,
    inputs: [&'a Lanes32; 3],
}

impl<F: Fn([f32; 3]) -> f32 + Copy> WithSimd for Lanewise<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { f, ftz, active, d, inputs: [a, b, c] } = self;
        let kept = if ftz { MIN_NORMAL } else { 0 };
        for lane in 0..32 {
            let operands = [a[lane], b[lane], c[lane]].map(|x| f32::from_bits(flush(x, kept)));
            let result = f(operands);
            let bits = if result.is_nan() { 0x7FFF_FFFF } else { flush(result.to_bits(), kept) };
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

/// Bits of the smallest normal f32.
pub(in crate::numerics) const MIN_NORMAL: u32 = 0x0080_0000;

/// Turns magnitudes below `kept` into zero.
#[inline(always)]
pub(in crate::numerics) fn flush(bits: u32, kept: u32) -> u32 {
    if bits & 0x7FFF_FFFF < kept { bits & 0x8000_0000 } else { bits }
}

/// A 16-bit format, two values to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packed {
    /// `.f16x2`.
    F16x2,
    /// `.bf16x2`.
    Bf16x2,
}

/// A packed operation, each half rounded once to nearest even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedOp {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a · b.
    Mul,
    /// a · b + c.
    Fma,
    /// max(a · b + c, 0): `.relu`.
    FmaRelu,
    /// The smaller operand. If one operand is NaN, the result is the other operand.
    Min,
    /// The larger operand. If one operand is NaN, the result is the other operand.
    Max,
}

/// `d = op(a, b, c)` on both halves of the lanes of `active`.
pub fn packed_op(format: Packed, op: PackedOp, active: u32, d: &mut Lanes32, inputs: [&Lanes32; 3]) {
    match format {
        Packed::F16x2 => packed_in::<10, 5>(op, active, d, inputs),
        Packed::Bf16x2 => packed_in::<7, 8>(op, active, d, inputs),
    }
}

/// Each closure gives the value before the single rounding, or a value that rounds to the same result.
fn packed_in<const F: u32, const E: u32>(op: PackedOp, active: u32, d: &mut Lanes32, inputs: [&Lanes32; 3]) {
    match op {
        PackedOp::Add => packed::<F, E>(active, d, inputs, |[a, b, _]| sum_to_odd(a, b)),
        PackedOp::Sub => packed::<F, E>(active, d, inputs, |[a, b, _]| sum_to_odd(a, -b)),
        // The product has at most 22 bits and is exact.
        PackedOp::Mul => packed::<F, E>(active, d, inputs, |[a, b, _]| a * b),
        PackedOp::Fma => packed::<F, E>(active, d, inputs, |[a, b, c]| sum_to_odd(a * b, c)),
        PackedOp::FmaRelu => packed::<F, E>(active, d, inputs, |[a, b, c]| {
            let sum = sum_to_odd(a * b, c);
            if sum <= 0.0 { 0.0 } else { sum }
        }),
        PackedOp::Min => packed::<F, E>(active, d, inputs, |[a, b, _]| smaller64(a, b)),
        PackedOp::Max => packed::<F, E>(active, d, inputs, |[a, b, _]| -smaller64(-a, -b)),
    }
}

fn packed<const FRACTION: u32, const EXPONENT: u32>(
    active: u32,
    d: &mut Lanes32,
    inputs: [&Lanes32; 3],
    f: impl Fn([f64; 3]) -> f64,
) {
    pulp::Arch::new().dispatch(PackedLanes::<_, FRACTION, EXPONENT> { f, active, d, inputs });
}

/// `cvt.rn.{f16x2,bf16x2}.f32 d, a, b` in the lanes of `active`: a goes to the upper half, b to the lower
/// half.
pub fn pack(format: Packed, active: u32, d: &mut Lanes32, inputs: [&Lanes32; 2]) {
    let arch = pulp::Arch::new();
    match format {
        Packed::F16x2 => arch.dispatch(PackLanes::<10, 5> { active, d, inputs }),
        Packed::Bf16x2 => arch.dispatch(PackLanes::<7, 8> { active, d, inputs }),
    }
}

/// `cvt.f32.{f16,bf16} d, a` in the lanes of `active`.
pub fn unpack(format: Packed, active: u32, d: &mut Lanes32, a: &Lanes32) {
    let arch = pulp::Arch::new();
    match format {
        Packed::F16x2 => arch.dispatch(UnpackLanes::<10> { active, d, a }),
        Packed::Bf16x2 => arch.dispatch(UnpackLanes::<7> { active, d, a }),
    }
}

struct UnpackLanes<'a, const FRACTION: u32> {
    active: u32,
    d: &'a mut Lanes32,
    a: &'a Lanes32,
}

impl<const FRACTION: u32> WithSimd for UnpackLanes<'_, FRACTION> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { active, d, a } = self;
        for lane in 0..32 {
            let value = widen::<FRACTION>(a[lane] & 0xFFFF) as f32;
            let bits = if value.is_nan() { 0x7FFF_FFFF } else { value.to_bits() };
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

struct PackLanes<'a, const FRACTION: u32, const EXPONENT: u32> {
    active: u32,
    d: &'a mut Lanes32,
    inputs: [&'a Lanes32; 2],
}

impl<const FRACTION: u32, const EXPONENT: u32> WithSimd for PackLanes<'_, FRACTION, EXPONENT> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { active, d, inputs: [a, b] } = self;
        for lane in 0..32 {
            let [high, low] =
                [a[lane], b[lane]].map(|bits| narrow::<FRACTION, EXPONENT>(f64::from(f32::from_bits(bits))));
            d[lane] = if active >> lane & 1 == 1 { high << 16 | low } else { d[lane] };
        }
    }
}

struct PackedLanes<'a, F, const FRACTION: u32, const EXPONENT: u32> {
    f: F,
    active: u32,
    d: &'a mut Lanes32,
    inputs: [&'a Lanes32; 3],
}

impl<F, const FRACTION: u32, const EXPONENT: u32> WithSimd for PackedLanes<'_, F, FRACTION, EXPONENT>
where
    F: Fn([f64; 3]) -> f64,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { f, active, d, inputs: [a, b, c] } = self;
        let mut halves = [[0; 32]; 2];
        for (half, shift) in halves.iter_mut().zip([0, 16]) {
            for lane in 0..32 {
                let operands = [a[lane], b[lane], c[lane]].map(|x| widen::<FRACTION>(x >> shift & 0xFFFF));
                half[lane] = narrow::<FRACTION, EXPONENT>(f(operands));
            }
        }
        for lane in 0..32 {
            let bits = halves[0][lane] | halves[1][lane] << 16;
            d[lane] = if active >> lane & 1 == 1 { bits } else { d[lane] };
        }
    }
}

/// x + y rounded to odd. A later rounding to fewer bits gives the same result as for the exact sum (Boldo and
/// Melquiond, IEEE TC 2008).
#[inline(always)]
fn sum_to_odd(x: f64, y: f64) -> f64 {
    let (sum, error) = two_sum(x, y);
    let bits = sum.to_bits();
    // An inexact sum with an even last bit moves one unit toward the exact sum.
    let moved = if (error > 0.0) == (sum > 0.0) { bits + 1 } else { bits.wrapping_sub(1) };
    if error != 0.0 && error.is_finite() && bits & 1 == 0 { f64::from_bits(moved) } else { sum }
}

/// Knuth's two-sum: sum + error = x + y exactly.
#[inline(always)]
fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let y_part = sum - x;
    (sum, (x - (sum - y_part)) + (y - y_part))
}

/// A 16-bit float as f64.
#[inline(always)]
pub(in crate::numerics) fn widen<const FRACTION: u32>(bits: u32) -> f64 {
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7FFF;
    let value = if FRACTION == 7 {
        f32::from_bits(magnitude << 16)
    } else {
        // The bits of an f16 read as an f32 are too small by a factor of 2^112. The product with 2^112 is
        // exact, also for subnormals.
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
        if magnitude >= 0x7C00 { f32::from_bits(magnitude << 13 | 0x7F80_0000) } else { scaled }
    };
    f64::from(f32::from_bits(value.to_bits() | sign))
}

/// Rounds to nearest even. Adding and subtracting 1.5·2^52 units leaves a whole number of units.
#[inline(always)]
pub(in crate::numerics) fn narrow<const FRACTION: u32, const EXPONENT: u32>(value: f64) -> u32 {
    let bias = (1 << (EXPONENT - 1)) - 1;
    let exponent = ((value.to_bits() >> 52 & 0x7FF) as i32 - 1023).clamp(1 - bias, bias + 1);
    let magic = f64::from_bits(((exponent - FRACTION as i32 + 52 + 1023) as u64) << 52) * 1.5;
    let magnitude = ((value.abs() + magic) - magic) as f32;
    let sign = (value.to_bits() >> 63 << 15) as u32;
    let infinity = 0x7FFF >> FRACTION << FRACTION;
    let bits = if FRACTION == 7 {
        magnitude.to_bits() >> 16
    } else {
        // An f16 is an f32 with another bias and 13 fewer fraction bits. Below 2^-14, an f16 counts units of
        // 2^-24, which is the unit in the last place of an f32 just above one half.
        let normal = (magnitude.to_bits() >> 13).wrapping_sub(112 << 10).min(infinity);
        let subnormal = (magnitude + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        if magnitude < 6.103_515_6e-5 { subnormal } else { normal }
    };
    if value.is_nan() { 0x7FFF } else { sign | if value.is_infinite() { infinity } else { bits } }
}
