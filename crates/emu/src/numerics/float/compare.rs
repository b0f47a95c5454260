//! Comparisons and tests (PTX ISA, "setp", "set", "testp").

use super::flush_subnormal;
use crate::numerics::round::{Decoded, Format};

/// A floating-point comparison. If an operand is NaN, the first six are false and the `…u` ones are true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    /// Neither operand is NaN.
    Num,
    /// An operand is NaN.
    Nan,
}

/// Whether `comparison` holds between a and b.
pub fn compare(comparison: Comparison, format: Format, ftz: bool, a: u64, b: u64) -> bool {
    use Comparison as C;
    use std::cmp::Ordering;
    let key = |bits: u64| match format.decode(if ftz { flush_subnormal(format, bits) } else { bits }) {
        Decoded::Nan => None,
        _ if bits & format.canonical_nan() == 0 => Some(0),
        _ if ftz && flush_subnormal(format, bits) != bits => Some(0),
        _ => {
            let magnitude = i128::from(bits & format.canonical_nan());
            Some(if bits >> format.sign_bit() & 1 == 1 { -magnitude } else { magnitude })
        }
    };
    let ordering = key(a).zip(key(b)).map(|(x, y)| x.cmp(&y));
    match comparison {
        C::Num => ordering.is_some(),
        C::Nan => ordering.is_none(),
        C::Equ | C::Neu | C::Ltu | C::Leu | C::Gtu | C::Geu if ordering.is_none() => true,
        C::Eq | C::Equ => ordering == Some(Ordering::Equal),
        C::Ne | C::Neu => ordering.is_some_and(Ordering::is_ne),
        C::Lt | C::Ltu => ordering.is_some_and(Ordering::is_lt),
        C::Le | C::Leu => ordering.is_some_and(Ordering::is_le),
        C::Gt | C::Gtu => ordering.is_some_and(Ordering::is_gt),
        C::Ge | C::Geu => ordering.is_some_and(Ordering::is_ge),
    }
}

/// A property that `testp` tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Property {
    Finite,
    Infinite,
    Number,
    NotANumber,
    /// Zeros count as normal.
    Normal,
    Subnormal,
}

/// The result of `testp`: whether `a` has the property.
pub fn test(property: Property, format: Format, a: u64) -> bool {
    let decoded = format.decode(a);
    let magnitude = a & format.canonical_nan();
    let subnormal = magnitude != 0 && magnitude < 1 << format.fraction_bits;
    match property {
        Property::Finite => matches!(decoded, Decoded::Finite(_)),
        Property::Infinite => matches!(decoded, Decoded::Infinity { .. }),
        Property::Number => decoded != Decoded::Nan,
        Property::NotANumber => decoded == Decoded::Nan,
        Property::Normal => matches!(decoded, Decoded::Finite(_)) && !subnormal,
        Property::Subnormal => subnormal,
    }
}
