//! `cvt` between every pair of types (PTX ISA, "cvt"), for single values and packed.

use super::float::{self, Modifiers, flush_subnormal};
use super::integer::IntType;
use super::round::{Decoded, Exact, Format, Rounding};

/// A floating-point type of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// 16-bit IEEE.
    F16,
    /// bfloat16.
    Bf16,
    /// tf32, in the upper 19 bits of 32.
    Tf32,
    /// 32-bit IEEE.
    F32,
    /// 64-bit IEEE.
    F64,
    /// fp8 with 4 exponent bits.
    E4m3,
    /// fp8 with 5 exponent bits.
    E5m2,
}

impl FloatType {
    /// The format of the type's values.
    pub const fn format(self) -> Format {
        match self {
            Self::F16 => Format::F16,
            Self::Bf16 => Format::BF16,
            Self::Tf32 => Format::TF32,
            Self::F32 => Format::F32,
            Self::F64 => Format::F64,
            Self::E4m3 => Format::E4M3,
            Self::E5m2 => Format::E5M2,
        }
    }

    /// Unused low bits of the register that carries the type.
    const fn padding(self) -> u32 {
        match self {
            Self::Tf32 => 13,
            _ => 0,
        }
    }
}

/// Source or destination type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumberType {
    /// `.u8` to `.s64`.
    Int(IntType),
    /// A floating-point type.
    Float(FloatType),
}

/// The precision to which a conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The precision of the destination type: `.rn`, `.rz`, `.rm`, `.rp`, `.rna`.
    Destination,
    /// A whole number in the destination type: `.rni`, `.rzi`, `.rmi`, `.rpi`. Conversions to integers always
    /// round to whole numbers, whichever precision is named.
    Integral,
}

/// A scalar conversion with its modifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conversion {
    /// Destination type.
    pub to: NumberType,
    /// Source type.
    pub from: NumberType,
    /// Rounding mode; unused where the conversion is exact.
    pub rounding: Rounding,
    /// The precision of the rounding.
    pub precision: Precision,
    /// `.ftz`: f32 subnormals on either side become zeros.
    pub ftz: bool,
    /// `.sat`: integers clamp to the destination's range, floats to [0, 1].
    pub sat: bool,
    /// `.relu`: negative results become +0.
    pub relu: bool,
    /// `.satfinite`: results beyond the largest finite number become that number with their sign.
    pub satfinite: bool,
}

impl Conversion {
    /// A conversion without modifiers, rounding to nearest even.
    pub const fn new(to: NumberType, from: NumberType) -> Self {
        Self {
            to,
            from,
            rounding: Rounding::NearestEven,
            precision: Precision::Destination,
            ftz: false,
            sat: false,
            relu: false,
            satfinite: false,
        }
    }

    /// Converts the low bits of `bits`; the result is zero-extended.
    pub fn apply(&self, bits: u64) -> u64 {
        match (self.from, self.to) {
            (NumberType::Int(from), NumberType::Int(to)) => {
                let value = from.read(bits);
                if self.sat { to.saturate(value) } else { to.write(value) }
            }
            (NumberType::Int(from), NumberType::Float(to)) => {
                let value = Exact::from_signed(from.read(bits), 0);
                self.finish(to, value.round_to(to.format(), self.rounding))
            }
            (NumberType::Float(from), NumberType::Int(to)) => self.float_to_int(from, to, bits),
            (NumberType::Float(from), NumberType::Float(to)) => self.float_to_float(from, to, bits),
        }
    }

    fn source(&self, from: FloatType, bits: u64) -> Decoded {
        let bits = bits >> from.padding() & (u64::MAX >> (63 - from.format().sign_bit()));
        let flushed = self.ftz && from == FloatType::F32;
        from.format().decode(if flushed { flush_subnormal(Format::F32, bits) } else { bits })
    }

    /// Values out of range are clamped, with or without `.sat`. NaN gives zero. If the source is f64 or the
    /// destination has 64 bits, NaN gives the top bit alone.
    fn float_to_int(&self, from: FloatType, to: IntType, bits: u64) -> u64 {
        match self.source(from, bits) {
            Decoded::Nan if from == FloatType::F64 || to.bits() == 64 => 1 << (to.bits() - 1),
            Decoded::Nan => 0,
            Decoded::Infinity { negative } => to.saturate(if negative { i128::MIN } else { i128::MAX }),
            Decoded::Finite(value) => to.saturate(value.round_to_integer(self.rounding)),
        }
    }

    fn float_to_float(&self, from: FloatType, to: FloatType, bits: u64) -> u64 {
        let format = to.format();
        let sign = |negative: bool| u64::from(negative) << format.sign_bit();
        let result = match self.source(from, bits) {
            Decoded::Nan => float::nan(format),
            Decoded::Infinity { negative } if self.satfinite => format.max_finite() | sign(negative),
            Decoded::Infinity { negative } => format.infinity() | sign(negative),
            Decoded::Finite(value) => {
                let value = match self.precision {
                    Precision::Destination => value,
                    Precision::Integral => {
                        let whole = integral(value, self.rounding);
                        Exact { negative: value.negative, ..whole }
                    }
                };
                let rounded = value.round_to(format, self.rounding);
                let finite = matches!(format.decode(rounded), Decoded::Finite(_));
                if self.satfinite && !finite { format.max_finite() | sign(value.negative) } else { rounded }
            }
        };
        self.finish(to, result)
    }

    fn finish(&self, to: FloatType, bits: u64) -> u64 {
        let ftz = self.ftz && to == FloatType::F32;
        let result = float::finish(to.format(), Modifiers { ftz, sat: self.sat, relu: self.relu }, bits);
        if to == FloatType::Tf32 && result == Format::TF32.canonical_nan() {
            return Format::F32.canonical_nan();
        }
        result << to.padding()
    }
}

/// `value` rounded to a whole number. A whole number stays unchanged, however large.
fn integral(value: Exact, rounding: Rounding) -> Exact {
    if value.exponent >= 0 { value } else { Exact::from_signed(value.round_to_integer(rounding), 0) }
}

/// `cvt.….{f16x2,bf16x2,e4m3x2,e5m2x2}.f32 d, a, b`: a goes to the upper half of d, b to the lower half. Each
/// half has the width of the destination type, so fp8 pairs fill the low 16 bits.
pub fn pack_pair(conversion: &Conversion, a: u32, b: u32) -> u32 {
    let width = match conversion.to {
        NumberType::Float(to) => to.format().sign_bit() + 1,
        NumberType::Int(to) => to.bits(),
    };
    let [a, b] = [a, b].map(|x| conversion.apply(u64::from(x)));
    (a << width | b) as u32
}

/// `cvt.rn.satfinite.{e4m3x2,e5m2x2}.f16x2` and `cvt.rn.f16x2.{e4m3x2,e5m2x2}`: each half is converted
/// separately.
pub fn convert_halves(conversion: &Conversion, pair: u32) -> u32 {
    let width = match conversion.from {
        NumberType::Float(from) => from.format().sign_bit() + 1,
        NumberType::Int(from) => from.bits(),
    };
    let low = pair & ((1u64 << width) - 1) as u32;
    pack_pair(conversion, pair.checked_shr(width).unwrap_or(0), low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use FloatType::{Bf16, E4m3, E5m2, F16, F32, F64, Tf32};
    use NumberType::{Float, Int};

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *state ^ *state >> 31
    }

    fn float(to: FloatType, from: FloatType) -> Conversion {
        Conversion::new(Float(to), Float(from))
    }

    fn of_f32(c: Conversion, x: f32) -> u32 {
        c.apply(u64::from(x.to_bits())) as u32
    }

    #[test]
    fn integers_extend_wrap_and_clamp() {
        let c = |to, from| Conversion::new(Int(to), Int(from));
        assert_eq!(c(IntType::S32, IntType::S8).apply(0x80), 0xFFFF_FF80);
        assert_eq!(c(IntType::U64, IntType::S32).apply(0xFFFF_FFFF), u64::MAX);
        assert_eq!(c(IntType::U64, IntType::U32).apply(0xFFFF_FFFF), 0xFFFF_FFFF);
        assert_eq!(c(IntType::U8, IntType::S32).apply(0x1FF), 0xFF);
        let sat = |to, from| Conversion { sat: true, ..c(to, from) };
        assert_eq!(sat(IntType::U8, IntType::S32).apply(0xFFFF_FFFF), 0);
        assert_eq!(sat(IntType::S16, IntType::U64).apply(u64::MAX), 0x7FFF);
    }

    #[test]
    fn floats_to_integers_agree_with_the_cpu() {
        let mut state = 5;
        for _ in 0..100_000 {
            let bits = random(&mut state);
            // Mostly exponents around the 64-bit range, sometimes any exponent.
            let field = 1023 - 4 + bits % 75;
            let x = f64::from_bits(if bits >> 60 == 0 { bits } else { bits & !(0x7FF << 52) | field << 52 });
            if x.is_nan() {
                continue;
            }
            let c = |to, rounding| {
                Conversion { rounding, ..Conversion::new(Int(to), Float(F64)) }.apply(x.to_bits())
            };
            assert_eq!(c(IntType::S64, Rounding::Zero), x as i64 as u64);
            assert_eq!(c(IntType::U64, Rounding::NearestEven), x.round_ties_even() as u64);
            assert_eq!(c(IntType::S32, Rounding::Down), u64::from(x.floor() as i32 as u32));
            assert_eq!(c(IntType::U16, Rounding::Up), u64::from(x.ceil() as u16));
            assert_eq!(c(IntType::S8, Rounding::Zero), u64::from(x as i8 as u8));
        }
    }

    #[test]
    fn nan_becomes_zero_or_the_top_bit() {
        let f32_nan = u64::from(f32::NAN.to_bits());
        assert_eq!(Conversion::new(Int(IntType::S32), Float(F32)).apply(f32_nan), 0);
        assert_eq!(Conversion::new(Int(IntType::U64), Float(F32)).apply(f32_nan), 1 << 63);
        assert_eq!(Conversion::new(Int(IntType::S32), Float(F64)).apply(f64::NAN.to_bits()), 1 << 31);
    }

    #[test]
    fn integers_to_floats_agree_with_the_cpu() {
        let mut state = 9;
        for _ in 0..50_000 {
            let x = random(&mut state) >> (state & 63);
            let c = |to, from| Conversion::new(Float(to), Int(from)).apply(x);
            assert_eq!(c(F32, IntType::U64), u64::from((x as f32).to_bits()));
            assert_eq!(c(F64, IntType::S64), (x as i64 as f64).to_bits());
            assert_eq!(c(F32, IntType::S32), u64::from((x as i32 as f32).to_bits()));
            assert_eq!(c(F16, IntType::U16), u64::from(half::f16::from_f32(f32::from(x as u16)).to_bits()));
        }
        let up = Conversion { rounding: Rounding::Up, ..Conversion::new(Float(F32), Int(IntType::U32)) };
        assert_eq!(f32::from_bits(up.apply(0x0100_0001) as u32), 16_777_218.0);
        assert_eq!(Conversion::new(Float(F16), Int(IntType::U32)).apply(70_000), 0x7C00);
    }

    #[test]
    fn floats_narrow_as_the_half_crate_does() {
        let mut state = 2;
        for _ in 0..200_000 {
            let x = f32::from_bits(random(&mut state) as u32);
            if x.is_nan() {
                continue;
            }
            assert_eq!(of_f32(float(F16, F32), x) as u16, half::f16::from_f32(x).to_bits(), "{x:e}");
            assert_eq!(of_f32(float(Bf16, F32), x) as u16, half::bf16::from_f32(x).to_bits(), "{x:e}");
            let wide = f64::from_bits(random(&mut state) & !(1 << 62) | 0x380 << 52);
            if wide.is_finite() {
                assert_eq!(float(F32, F64).apply(wide.to_bits()), u64::from((wide as f32).to_bits()));
            }
        }
    }

    #[test]
    fn every_small_float_widens_and_returns() {
        for (small, wide, count) in
            [(F16, F32, 1 << 16), (Bf16, F32, 1 << 16), (E4m3, F16, 256), (E5m2, F16, 256)]
        {
            for bits in 0..count {
                let up = float(wide, small).apply(bits);
                if small.format().decode(bits) == Decoded::Nan {
                    assert_eq!(up, wide.format().canonical_nan());
                } else {
                    let back = Conversion { satfinite: false, ..float(small, wide) }.apply(up);
                    assert_eq!(back, bits, "{small:?} {bits:x}");
                }
            }
        }
    }

    #[test]
    fn tf32_keeps_ten_bits() {
        let rna = Conversion { rounding: Rounding::NearestAway, ..float(Tf32, F32) };
        assert_eq!(of_f32(rna, f32::from_bits(0x3F80_1000)), 0x3F80_2000, "a tie goes away from zero");
        assert_eq!(of_f32(float(Tf32, F32), f32::from_bits(0x3F80_1000)), 0x3F80_0000);
        let rz = Conversion { rounding: Rounding::Zero, ..float(Tf32, F32) };
        assert_eq!(of_f32(rz, f32::from_bits(0xBF80_1FFF)), 0xBF80_0000);
        assert_eq!(of_f32(rna, f32::NAN), 0x7FFF_FFFF);
    }

    #[test]
    fn modifiers_clamp() {
        let finite = |to| Conversion { satfinite: true, ..float(to, F32) };
        assert_eq!(of_f32(finite(E4m3), 1e9), 0x7E);
        assert_eq!(of_f32(finite(E4m3), f32::NEG_INFINITY), 0xFE);
        assert_eq!(of_f32(finite(E4m3), f32::NAN), 0x7F);
        assert_eq!(of_f32(finite(E5m2), 1e9), 0x7B);
        assert_eq!(of_f32(finite(F16), -1e9), 0xFBFF);
        let relu = Conversion { relu: true, ..float(F16, F32) };
        assert_eq!([of_f32(relu, -2.0), of_f32(relu, f32::NAN)], [0, 0x7FFF]);
        let sat = Conversion { sat: true, ..float(F32, F32) };
        assert_eq!([of_f32(sat, 7.0), of_f32(sat, f32::NAN), of_f32(sat, -0.0)], [1f32.to_bits(), 0, 0]);
        let ftz = Conversion { ftz: true, ..float(F16, F32) };
        assert_eq!(of_f32(ftz, -1e-40), 0x8000);
        let inward = Conversion { rounding: Rounding::Zero, ..float(F16, F32) };
        assert_eq!(of_f32(inward, 1e9), 0x7BFF);
    }

    #[test]
    fn integral_rounding_stays_in_floats() {
        let c = |rounding| Conversion { rounding, precision: Precision::Integral, ..float(F32, F32) };
        let run = |rounding, x| f32::from_bits(of_f32(c(rounding), x));
        assert_eq!(run(Rounding::NearestEven, 2.5), 2.0);
        assert_eq!(run(Rounding::Down, -0.25), -1.0);
        assert_eq!(run(Rounding::Up, -0.25).to_bits(), 0x8000_0000);
        assert_eq!(run(Rounding::Zero, 1e30), 1e30);
    }

    #[test]
    fn pairs_put_the_first_operand_on_top() {
        let c = float(Bf16, F32);
        assert_eq!(pack_pair(&c, 1f32.to_bits(), (-2f32).to_bits()), 0x3F80_C000);
        let fp8 = Conversion { satfinite: true, ..float(E4m3, F32) };
        assert_eq!(pack_pair(&fp8, 1f32.to_bits(), 448f32.to_bits()), 0x387E);
        assert_eq!(convert_halves(&float(F16, E4m3), 0x38FE), 0x3C00_DF00);
        let back = Conversion { satfinite: true, ..float(E4m3, F16) };
        assert_eq!(convert_halves(&back, 0x3C00_DF00), 0x38FE);
    }
}
