//! Exact binary values and their rounding to a floating-point format. All conversions, directed rounding and
//! the output stage of the tensor cores use them.

/// The rounding of a value between two representable ones (PTX ISA, "Rounding modifiers").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// `.rn`: to nearest, ties to even.
    NearestEven,
    /// `.rna`: to nearest, ties away from zero.
    NearestAway,
    /// `.rz`: toward zero.
    Zero,
    /// `.rm`: toward −∞.
    Down,
    /// `.rp`: toward +∞.
    Up,
}

/// A binary floating-point format: one sign bit, then exponent, then fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// Bits of the exponent field.
    pub exponent_bits: u32,
    /// Bits of the fraction field, without the hidden bit.
    pub fraction_bits: u32,
    /// The meaning of the highest exponent field.
    pub specials: Specials,
}

/// The meaning of the highest exponent field of a [`Format`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Specials {
    /// IEEE: infinity and NaN.
    Ieee,
    /// OCP e4m3: ordinary numbers. Only all ones is NaN, and there is no infinity.
    OnlyNan,
}

impl Format {
    /// IEEE binary64.
    pub const F64: Self = Self::ieee(11, 52);
    /// IEEE binary32.
    pub const F32: Self = Self::ieee(8, 23);
    /// IEEE binary16.
    pub const F16: Self = Self::ieee(5, 10);
    /// bfloat16.
    pub const BF16: Self = Self::ieee(8, 7);
    /// tf32 as 19 bits: the upper 19 bits of the f32 register that holds it.
    pub const TF32: Self = Self::ieee(8, 10);
    /// OCP fp8 e5m2.
    pub const E5M2: Self = Self::ieee(5, 2);
    /// OCP fp8 e4m3.
    pub const E4M3: Self = Self { exponent_bits: 4, fraction_bits: 3, specials: Specials::OnlyNan };

    const fn ieee(exponent_bits: u32, fraction_bits: u32) -> Self {
        Self { exponent_bits, fraction_bits, specials: Specials::Ieee }
    }

    /// Exponent bias; also the exponent of 2^bias, the top binade of an IEEE format.
    pub const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// Exponent of the smallest normal number.
    pub const fn min_exponent(self) -> i32 {
        1 - self.bias()
    }

    /// Position of the sign bit.
    pub const fn sign_bit(self) -> u32 {
        self.exponent_bits + self.fraction_bits
    }

    const fn exponent_ones(self) -> u64 {
        (1 << self.exponent_bits) - 1
    }

    /// Bits of +∞, or of NaN for a format without infinity.
    pub const fn infinity(self) -> u64 {
        match self.specials {
            Specials::Ieee => self.exponent_ones() << self.fraction_bits,
            Specials::OnlyNan => self.canonical_nan(),
        }
    }

    /// Bits of the largest finite number.
    pub const fn max_finite(self) -> u64 {
        match self.specials {
            Specials::Ieee => (self.exponent_ones() << self.fraction_bits) - 1,
            Specials::OnlyNan => self.canonical_nan() - 1,
        }
    }

    /// NVIDIA's canonical NaN: every bit set except the sign (0x7FFFFFFF, 0x7FFF, 0x7F).
    pub const fn canonical_nan(self) -> u64 {
        (1 << self.sign_bit()) - 1
    }

    /// Splits `bits` into class, sign and magnitude.
    pub fn decode(self, bits: u64) -> Decoded {
        let negative = bits >> self.sign_bit() & 1 == 1;
        let field = bits >> self.fraction_bits & self.exponent_ones();
        let fraction = bits & ((1 << self.fraction_bits) - 1);
        let special = field == self.exponent_ones();
        match self.specials {
            Specials::Ieee if special && fraction == 0 => return Decoded::Infinity { negative },
            Specials::Ieee if special => return Decoded::Nan,
            Specials::OnlyNan if special && fraction + 1 == 1 << self.fraction_bits => return Decoded::Nan,
            _ => {}
        }
        let hidden = u64::from(field != 0) << self.fraction_bits;
        let exponent = (field.max(1) as i32) - self.bias() - self.fraction_bits as i32;
        Decoded::Finite(Exact { negative, magnitude: u128::from(fraction | hidden), exponent })
    }
}

/// The value that the bits of a [`Format`] represent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Not a number. A GPU does not keep NaN payloads.
    Nan,
    /// ±∞.
    Infinity {
        /// Sign.
        negative: bool,
    },
    /// Zero, subnormal or normal.
    Finite(Exact),
}

/// An exact value: (−1)^negative · magnitude · 2^exponent. Zero keeps its sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exact {
    /// Sign.
    pub negative: bool,
    /// Integer significand.
    pub magnitude: u128,
    /// Weight of the significand's lowest bit.
    pub exponent: i32,
}

impl Exact {
    /// A value from a signed integer significand.
    pub fn from_signed(significand: i128, exponent: i32) -> Self {
        Self { negative: significand < 0, magnitude: significand.unsigned_abs(), exponent }
    }

    /// Rounds to `format`. Overflow follows IEEE 754 (§7.4): it gives infinity, or the largest finite number
    /// where the mode rounds toward zero.
    pub fn round_to(self, format: Format, rounding: Rounding) -> u64 {
        let sign = u64::from(self.negative) << format.sign_bit();
        if self.magnitude == 0 {
            return sign;
        }
        let top = 127 - self.magnitude.leading_zeros() as i32 + self.exponent;
        let exponent = top.max(format.min_exponent());
        let kept = round_shift(self, exponent - format.fraction_bits as i32, rounding);
        // A carry out of the fraction moves into the exponent field by plain addition, also for subnormals.
        let field = (exponent - format.min_exponent()) as u64;
        let bits = (field << format.fraction_bits) + kept;
        if field > format.exponent_ones() || bits > format.max_finite() {
            return sign | overflow(self.negative, format, rounding);
        }
        sign | bits
    }

    /// Rounds to an integer. A magnitude beyond that of `i128::MAX` becomes `i128::MAX`.
    pub fn round_to_integer(self, rounding: Rounding) -> i128 {
        let magnitude = if self.exponent >= 0 {
            let room = self.magnitude.leading_zeros() as i32 - 2;
            if self.magnitude == 0 {
                0
            } else if self.exponent > room {
                i128::MAX as u128
            } else {
                self.magnitude << self.exponent
            }
        } else {
            u128::from(round_shift(self, 0, rounding))
        };
        if self.negative { -(magnitude as i128) } else { magnitude as i128 }
    }
}

/// The magnitude in units of 2^`unit`, rounded. The result must fit 64 bits.
fn round_shift(value: Exact, unit: i32, rounding: Rounding) -> u64 {
    let shift = unit - value.exponent;
    if shift <= 0 {
        return (value.magnitude << -shift) as u64;
    }
    let (floor, rest, half) = match shift {
        1..=127 => {
            let rest = value.magnitude & ((1 << shift) - 1);
            (value.magnitude >> shift, rest, 1u128 << (shift - 1))
        }
        128 => (0, value.magnitude, 1u128 << 127),
        _ => (0, value.magnitude.min(1), 2),
    };
    let up = match rounding {
        Rounding::NearestEven => rest > half || (rest == half && floor & 1 == 1),
        Rounding::NearestAway => rest >= half,
        Rounding::Zero => false,
        Rounding::Down => value.negative && rest != 0,
        Rounding::Up => !value.negative && rest != 0,
    };
    floor as u64 + u64::from(up)
}

fn overflow(negative: bool, format: Format, rounding: Rounding) -> u64 {
    let outward = match rounding {
        Rounding::NearestEven | Rounding::NearestAway => true,
        Rounding::Zero => false,
        Rounding::Down => negative,
        Rounding::Up => !negative,
    };
    if outward { format.infinity() } else { format.max_finite() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(x: f64) -> Exact {
        match Format::F64.decode(x.to_bits()) {
            Decoded::Finite(e) => e,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nearest_even_to_f32_agrees_with_the_cpu() {
        let mut state = 1u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Exponents around f32's range and beyond both of its ends.
            let exponent = 1023 - 160 + (state >> 33) % 320;
            let x = f64::from_bits(state << 63 | exponent << 52 | (state.rotate_left(17) & ((1 << 52) - 1)));
            assert_eq!(
                exact(x).round_to(Format::F32, Rounding::NearestEven) as u32,
                (x as f32).to_bits(),
                "{x:e}"
            );
        }
    }

    #[test]
    fn directed_modes_bracket_the_value() {
        let x = 1.0 + 2f64.powi(-30);
        let round = |x, mode| f32::from_bits(exact(x).round_to(Format::F32, mode) as u32);
        assert_eq!(round(x, Rounding::Up), 1.0 + f32::EPSILON);
        assert_eq!(round(x, Rounding::Down), 1.0);
        assert_eq!(round(-x, Rounding::Up), -1.0);
        assert_eq!(round(-x, Rounding::Down), -1.0 - f32::EPSILON);
        assert_eq!(round(1e300, Rounding::Zero), f32::MAX);
        assert_eq!(round(-1e300, Rounding::Up), f32::MIN);
        assert_eq!(round(-1e300, Rounding::Down), f32::NEG_INFINITY);
        assert_eq!(round(1e-300, Rounding::Up), f32::from_bits(1));
        assert_eq!(round(1e-300, Rounding::NearestAway), 0.0);
    }

    #[test]
    fn e4m3_has_no_infinity_and_reaches_448() {
        assert_eq!(exact(448.0).round_to(Format::E4M3, Rounding::NearestEven), 0x7E);
        assert_eq!(exact(464.1).round_to(Format::E4M3, Rounding::NearestEven), 0x7F);
        assert_eq!(exact(464.0).round_to(Format::E4M3, Rounding::NearestEven), 0x7E, "tie goes to even");
        assert_eq!(exact(2f64.powi(-9)).round_to(Format::E4M3, Rounding::NearestEven), 0x01);
    }

    #[test]
    fn every_f16_survives_decode_and_round() {
        for bits in 0..=0xFFFFu64 {
            if let Decoded::Finite(e) = Format::F16.decode(bits) {
                assert_eq!(e.round_to(Format::F16, Rounding::NearestEven), bits);
            }
        }
    }
}
