//! IEEE floating-point instructions of PTX: correctly rounded in every mode, in f16, bf16, f32 and f64.
//!
//! Scalars are passed as bits in `u64`, whatever the format. [`lanes`] works on whole registers for speed. A
//! NaN result is NVIDIA's canonical NaN: 0x7FFF, 0x7FFFFFFF, and for f64 0xFFF8000000000000. (PTX leaves NaN
//! payloads open; sm_70 to sm_90 return these.)

pub mod compare;
pub mod lanes;

use super::exact;
use super::round::{Decoded, Exact, Format, Rounding};

/// Modifiers that apply before and after the rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Modifiers {
    /// `.ftz` (f16 and f32): subnormal inputs and results become zeros of their sign.
    pub ftz: bool,
    /// `.sat`: clamp to [0, 1], NaN to +0.
    pub sat: bool,
    /// `.relu`: negative results become +0.
    pub relu: bool,
}

impl Modifiers {
    /// No modifiers.
    pub const NONE: Self = Self { ftz: false, sat: false, relu: false };
}

/// The NaN that instructions return in this format.
pub const fn nan(format: Format) -> u64 {
    match format.fraction_bits {
        52 => 0xFFF8_0000_0000_0000,
        _ => format.canonical_nan(),
    }
}

/// A correctly rounded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a · b.
    Mul,
    /// a · b + c, rounded once.
    Fma,
    /// a / b.
    Div,
    /// √a.
    Sqrt,
    /// 1 / a.
    Rcp,
}

/// `operation` on `[a, b, c]`. Operands that the operation does not use are ignored.
pub fn arithmetic(
    operation: Operation,
    format: Format,
    rounding: Rounding,
    modifiers: Modifiers,
    operands: [u64; 3],
) -> u64 {
    let flush = |bits: u64| if modifiers.ftz { flush_subnormal(format, bits) } else { bits };
    let [a, b, c] = operands.map(|bits| format.decode(flush(bits)));
    let one = Decoded::Finite(Exact { negative: false, magnitude: 1, exponent: 0 });
    let bits = match operation {
        Operation::Add => sum(format, rounding, a, b),
        Operation::Sub => sum(format, rounding, a, negated(b)),
        Operation::Mul => match product(a, b) {
            Decoded::Finite(exact) => exact.round_to(format, rounding),
            special => encode_special(format, special),
        },
        Operation::Fma => sum(format, rounding, product(a, b), c),
        Operation::Div => quotient(format, rounding, a, b),
        Operation::Rcp => quotient(format, rounding, one, a),
        Operation::Sqrt => root(format, rounding, a),
    };
    finish(format, modifiers, bits)
}

/// Applies `.ftz`, `.relu` and `.sat` to a result.
pub fn finish(format: Format, modifiers: Modifiers, bits: u64) -> u64 {
    let mut bits = if modifiers.ftz { flush_subnormal(format, bits) } else { bits };
    let is_nan = format.decode(bits) == Decoded::Nan;
    if is_nan {
        return if modifiers.sat { 0 } else { nan(format) };
    }
    let negative = bits >> format.sign_bit() == 1;
    if negative && (modifiers.relu || modifiers.sat) {
        bits = 0;
    }
    let one = (format.bias() as u64) << format.fraction_bits;
    if modifiers.sat { bits.min(one) } else { bits }
}

/// `bits`, or zero with their sign if they are subnormal.
pub fn flush_subnormal(format: Format, bits: u64) -> u64 {
    let magnitude = bits & format.canonical_nan();
    if magnitude < 1 << format.fraction_bits { bits & !format.canonical_nan() } else { bits }
}

fn negated(x: Decoded) -> Decoded {
    match x {
        Decoded::Nan => Decoded::Nan,
        Decoded::Infinity { negative } => Decoded::Infinity { negative: !negative },
        Decoded::Finite(exact) => Decoded::Finite(Exact { negative: !exact.negative, ..exact }),
    }
}

fn encode_special(format: Format, special: Decoded) -> u64 {
    match special {
        Decoded::Infinity { negative } => format.infinity() | u64::from(negative) << format.sign_bit(),
        Decoded::Nan | Decoded::Finite(_) => nan(format),
    }
}

fn sum(format: Format, rounding: Rounding, a: Decoded, b: Decoded) -> u64 {
    let (x, y) = match (a, b) {
        (Decoded::Finite(x), Decoded::Finite(y)) => (x, y),
        (Decoded::Nan, _) | (_, Decoded::Nan) => return nan(format),
        (Decoded::Infinity { negative: p }, Decoded::Infinity { negative: q }) if p != q => {
            return nan(format);
        }
        (infinity @ Decoded::Infinity { .. }, _) | (_, infinity) => return encode_special(format, infinity),
    };
    let total = exact::add(x, y);
    if total.magnitude != 0 {
        return total.round_to(format, rounding);
    }
    // IEEE 754 §6.3: an exact zero is −0 if both addends are negative, or if they cancel and rounding is
    // down.
    let both_zero = x.magnitude == 0 && y.magnitude == 0;
    let negative =
        if both_zero && x.negative == y.negative { x.negative } else { rounding == Rounding::Down };
    u64::from(negative) << format.sign_bit()
}

fn product(a: Decoded, b: Decoded) -> Decoded {
    match (a, b) {
        (Decoded::Finite(x), Decoded::Finite(y)) => Decoded::Finite(exact::mul(x, y)),
        (Decoded::Nan, _) | (_, Decoded::Nan) => Decoded::Nan,
        (Decoded::Infinity { negative: p }, Decoded::Infinity { negative: q }) => {
            Decoded::Infinity { negative: p != q }
        }
        (Decoded::Infinity { negative }, Decoded::Finite(x))
        | (Decoded::Finite(x), Decoded::Infinity { negative }) => {
            if x.magnitude == 0 {
                Decoded::Nan
            } else {
                Decoded::Infinity { negative: negative != x.negative }
            }
        }
    }
}

fn quotient(format: Format, rounding: Rounding, a: Decoded, b: Decoded) -> u64 {
    let signed = |bits: u64, negative: bool| bits | u64::from(negative) << format.sign_bit();
    match (a, b) {
        (Decoded::Nan, _) | (_, Decoded::Nan) => nan(format),
        (Decoded::Infinity { .. }, Decoded::Infinity { .. }) => nan(format),
        (Decoded::Infinity { negative }, Decoded::Finite(y)) => {
            signed(format.infinity(), negative != y.negative)
        }
        (Decoded::Finite(x), Decoded::Infinity { negative }) => signed(0, negative != x.negative),
        (Decoded::Finite(x), Decoded::Finite(y)) => match (x.magnitude, y.magnitude) {
            (0, 0) => nan(format),
            (0, _) => signed(0, x.negative != y.negative),
            (_, 0) => signed(format.infinity(), x.negative != y.negative),
            _ => exact::div(x, y).round_to(format, rounding),
        },
    }
}

fn root(format: Format, rounding: Rounding, a: Decoded) -> u64 {
    match a {
        Decoded::Infinity { negative: false } => format.infinity(),
        Decoded::Finite(x) if x.magnitude == 0 => u64::from(x.negative) << format.sign_bit(),
        Decoded::Finite(x) if !x.negative => exact::sqrt(x).round_to(format, rounding),
        Decoded::Nan | Decoded::Infinity { .. } | Decoded::Finite(_) => nan(format),
    }
}

/// Selects `min` or `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extremum {
    /// `min`.
    Min,
    /// `max`.
    Max,
}

/// How `min` and `max` treat NaN and signs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExtremumModifiers {
    /// `.ftz`.
    pub ftz: bool,
    /// `.NaN`: a NaN operand makes the result NaN; otherwise the other operand is returned.
    pub nan: bool,
    /// `.xorsign.abs`: compares magnitudes and gives the result the exclusive-or of the signs.
    pub xorsign_abs: bool,
}

/// `min` and `max`; −0 is below +0 (PTX ISA, "min", "max").
pub fn extremum(which: Extremum, format: Format, modifiers: ExtremumModifiers, a: u64, b: u64) -> u64 {
    let sign = 1 << format.sign_bit();
    let prepare = |bits: u64| {
        let bits = if modifiers.ftz { flush_subnormal(format, bits) } else { bits };
        if modifiers.xorsign_abs { bits & !sign } else { bits }
    };
    let (x, y) = (prepare(a), prepare(b));
    let is_nan = |bits| format.decode(bits) == Decoded::Nan;
    let result = match (is_nan(x), is_nan(y)) {
        (true, true) => return nan(format),
        (true, false) | (false, true) if modifiers.nan => return nan(format),
        (true, false) => y,
        (false, true) => x,
        (false, false) => {
            let x_below = order_key(format, x) < order_key(format, y);
            match which {
                Extremum::Min if x_below => x,
                Extremum::Max if !x_below => x,
                Extremum::Min | Extremum::Max => y,
            }
        }
    };
    if modifiers.xorsign_abs { result | (a ^ b) & sign } else { result }
}

/// An integer with the same order as the values. −0 is below +0.
pub(super) fn order_key(format: Format, bits: u64) -> i128 {
    let magnitude = i128::from(bits & format.canonical_nan());
    if bits >> format.sign_bit() & 1 == 1 { -magnitude - 1 } else { magnitude }
}

/// `abs`. A NaN keeps its payload in every format.
pub fn abs(format: Format, ftz: bool, a: u64) -> u64 {
    let bits = if ftz { flush_subnormal(format, a) } else { a };
    bits & format.canonical_nan()
}

/// `neg`: flips the sign, including that of a NaN.
pub fn neg(format: Format, ftz: bool, a: u64) -> u64 {
    let bits = if ftz { flush_subnormal(format, a) } else { a };
    bits ^ 1 << format.sign_bit()
}

/// `copysign d, a, b`: the sign of a on the value of b.
pub fn copysign(format: Format, a: u64, b: u64) -> u64 {
    b & format.canonical_nan() | a & 1 << format.sign_bit()
}

/// Applies `f` to the two 16-bit halves of each operand: the `.f16x2` and `.bf16x2` instructions.
pub fn halves<const N: usize>(operands: [u32; N], f: impl Fn([u64; N]) -> u64) -> u32 {
    let low = f(operands.map(|x| u64::from(x & 0xFFFF)));
    let high = f(operands.map(|x| u64::from(x >> 16)));
    low as u32 & 0xFFFF | (high as u32) << 16
}

#[cfg(test)]
mod tests;
