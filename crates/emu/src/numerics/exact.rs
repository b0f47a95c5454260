//! Arithmetic on [`Exact`] values. Results are exact, or have a sticky last bit so that any later rounding is
//! correct.

use super::round::Exact;

/// Position of the leading bit of a normalised magnitude. It leaves headroom for a carry.
const TOP: u32 = 125;

/// Moves the leading bit to [`TOP`]; zero stays zero.
fn normalise(x: Exact) -> Exact {
    let up = x.magnitude.leading_zeros() as i32 - (127 - TOP as i32);
    match x.magnitude {
        0 => x,
        _ if up >= 0 => Exact { magnitude: x.magnitude << up, exponent: x.exponent - up, ..x },
        _ => x,
    }
}

/// a + b. Operands have at most 108 significant bits, so bits lost in the alignment are far below any
/// rounding position and are kept as a sticky last bit. A zero sum is positive; the caller sets its sign.
pub fn add(a: Exact, b: Exact) -> Exact {
    if a.magnitude == 0 || b.magnitude == 0 {
        return if a.magnitude == 0 { b } else { a };
    }
    let (a, b) = (normalise(a), normalise(b));
    let (large, small) = if (a.exponent, a.magnitude) >= (b.exponent, b.magnitude) { (a, b) } else { (b, a) };
    let shift = (large.exponent - small.exponent) as u32;
    let (aligned, lost) = match shift {
        0 => (small.magnitude, false),
        1..=127 => (small.magnitude >> shift, small.magnitude << (128 - shift) != 0),
        _ => (0, true),
    };
    let aligned = aligned | u128::from(lost);
    let magnitude =
        if large.negative == small.negative { large.magnitude + aligned } else { large.magnitude - aligned };
    Exact { negative: large.negative && magnitude != 0, magnitude, exponent: large.exponent }
}

/// a · b, exactly. The magnitudes together have at most 128 bits.
pub fn mul(a: Exact, b: Exact) -> Exact {
    Exact {
        negative: a.negative != b.negative,
        magnitude: a.magnitude * b.magnitude,
        exponent: a.exponent + b.exponent,
    }
}

/// a / b for b ≠ 0, with at least 60 bits and a sticky bit.
pub fn div(a: Exact, b: Exact) -> Exact {
    let a = normalise(a);
    let quotient = a.magnitude / b.magnitude;
    let sticky = u128::from(!a.magnitude.is_multiple_of(b.magnitude));
    // The shift makes room for the sticky bit.
    Exact {
        negative: a.negative != b.negative,
        magnitude: quotient << 1 | sticky,
        exponent: a.exponent - b.exponent - 1,
    }
}

/// √a for a ≥ 0, with at least 60 bits and a sticky bit.
pub fn sqrt(a: Exact) -> Exact {
    let mut a = normalise(a);
    if a.exponent & 1 == 1 {
        a = Exact { magnitude: a.magnitude << 1, exponent: a.exponent - 1, ..a };
    }
    let root = a.magnitude.isqrt();
    let sticky = u128::from(root * root != a.magnitude);
    Exact { negative: a.negative, magnitude: root << 1 | sticky, exponent: a.exponent / 2 - 1 }
}
