//! The 8-bit floating-point types of the OCP standard, as tensor cores read them.

use bytemuck::{Pod, Zeroable};

/// e4m3: 4 significant bits, magnitudes from 2⁻⁹ to 448, no infinity. The codes 0x7f and 0xff are NaN.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(u8);

/// e5m2: 3 significant bits, magnitudes from 2⁻¹⁶ to 57344. A number is the upper byte of the same number in
/// f16. The type has infinities.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5m2(u8);

macro_rules! float8 {
    ($name:ident, $mantissa:expr, $bias:expr, $largest:expr) => {
        impl $name {
            /// The NaN code that the hardware's conversion produces.
            pub const NAN: $name = $name(0x7f);
            /// The largest finite number.
            pub const MAX: $name = $name($largest);

            /// The number with this code.
            pub const fn from_bits(bits: u8) -> $name {
                $name(bits)
            }

            /// The code of the number.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The value in f32. The conversion is exact.
            pub const fn to_f32(self) -> f32 {
                const VALUES: [f32; 256] = {
                    let mut values = [0.0; 256];
                    let mut code = 0;
                    while code < 256 {
                        values[code] = decoded(code as u8, $mantissa, $bias, $largest);
                        code += 1;
                    }
                    values
                };
                VALUES[self.0 as usize]
            }

            /// The nearest finite number, ties to even. Larger magnitudes and infinities become the largest
            /// finite number, as in `cvt.rn.satfinite`; NaN stays NaN.
            #[inline]
            pub const fn from_f32(value: f32) -> $name {
                $name(encoded(value, $mantissa, $bias, $largest))
            }

            /// The interval of the real numbers that round to this number. The largest numbers have no outer
            /// bound.
            pub fn rounded_from(self) -> (f64, f64) {
                let at = |code: u8| f64::from($name(code).to_f32());
                let (code, sign) = (self.0 & 0x7f, self.0 & 0x80);
                let value = at(code);
                let below = if code == 0 { -at(1) } else { at(code - 1) };
                let above = if code < $largest { at(code + 1) } else { f64::INFINITY };
                let (low, high) = ((value + below) / 2.0, (value + above) / 2.0);
                if sign == 0 { (low, high) } else { (-high, -low) }
            }

            /// Whether this is NaN.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.to_f32().fmt(f)
            }
        }
    };
}
float8!(E4m3, 3, 7, 0x7e);
float8!(E5m2, 2, 15, 0x7b);

/// The value of a code. `largest` is the code of the largest finite number. If the code after it has a
/// mantissa of 0, that code is infinity.
const fn decoded(code: u8, mantissa: u32, bias: i32, largest: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let magnitude = code & 0x7f;
    if magnitude > largest {
        let is_infinite = magnitude == largest + 1 && magnitude.trailing_zeros() >= mantissa;
        return f32::from_bits(sign | if is_infinite { 0x7f80_0000 } else { 0x7fc0_0000 });
    }
    let field = magnitude as u32 & ((1 << mantissa) - 1);
    let exponent = magnitude as i32 >> mantissa;
    // The value in units of the smallest number. Every factor is a power of two, so that no step rounds.
    let (steps, power) = match exponent {
        0 => (field, 1 - bias),
        _ => (field + (1 << mantissa), exponent - bias),
    };
    let unit = f32::from_bits(((power - mantissa as i32 + 127) as u32) << 23);
    f32::from_bits(sign | (steps as f32 * unit).to_bits())
}

/// The code of the nearest finite number. Without branches, so that the compiler can use vectors.
#[inline]
const fn encoded(value: f32, mantissa: u32, bias: i32, largest: u8) -> u8 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
    // A normal number: the lost bits are rounded to the nearest even number; a carry moves into the exponent.
    let shift = 23 - mantissa;
    let odd = magnitude >> shift & 1;
    let rounded = (magnitude + (1 << (shift - 1)) - 1 + odd) >> shift;
    let normal = rounded.wrapping_sub(((127 - bias) as u32) << mantissa);
    // A subnormal number: the sum with a number whose last bit is worth the smallest number rounds it.
    let coarse = ((127 + 23 + 1 - bias - mantissa as i32) as u32) << 23;
    let sum = f32::from_bits(magnitude) + f32::from_bits(coarse);
    let code =
        if magnitude < ((127 + 1 - bias) as u32) << 23 { sum.to_bits().wrapping_sub(coarse) } else { normal };
    let code = if code > largest as u32 { largest } else { code as u8 };
    if magnitude > 0x7f80_0000 { 0x7f } else { sign | code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_within_the_bounds_round_to_theirs() {
        for code in (0..=0x7e).chain(0x81..=0xfe) {
            let x = E4m3::from_bits(code);
            let (low, high) = x.rounded_from();
            let value = f64::from(x.to_f32());
            assert!(low <= value && value <= high, "{code:#x}");
            for bound in [low, high].into_iter().filter(|bound| bound.is_finite()) {
                let toward = |part: f64| E4m3::from_f32((bound + part * (value - bound)) as f32);
                assert_eq!(f64::from(toward(0.01).to_f32()), value, "{code:#x}");
                assert_ne!(f64::from(toward(-0.01).to_f32()), value, "{code:#x}");
            }
        }
    }

    #[test]
    fn codes_are_those_of_the_standard() {
        for (code, value) in [(0x7e, 448.0), (0x08, 2f32.powi(-6)), (0x01, 2f32.powi(-9)), (0xb8, -1.0)] {
            assert_eq!(E4m3::from_bits(code).to_f32(), value, "{code:#x}");
        }
        assert!(E4m3::from_bits(0x7f).is_nan() && E4m3::from_bits(0xff).is_nan());
        // The code of an e5m2 number is the upper byte of the f16 number.
        for code in 0..=255u8 {
            let wide = half::f16::from_bits(u16::from(code) << 8).to_f32();
            let ours = E5m2::from_bits(code).to_f32();
            assert!(ours == wide && ours.is_sign_negative() == wide.is_sign_negative() || wide.is_nan());
            assert_eq!(ours.is_nan(), wide.is_nan(), "{code:#x}");
        }
    }

    /// Every number rounds to itself, and the midpoint of two neighbours rounds to the even one.
    #[test]
    fn rounding_is_to_the_nearest_even_number() {
        fn rounds(largest: u8, value: impl Fn(u8) -> f32, code: impl Fn(f32) -> u8) {
            for low in 0..largest {
                let (a, b) = (value(low), value(low + 1));
                assert_eq!(code(a), low);
                assert_eq!(code(-a), low | 0x80);
                let middle = (a + b) / 2.0;
                assert_eq!(code(middle), low + low % 2, "{middle}");
                assert_eq!(code(middle.next_down()), low, "{middle}");
                assert_eq!(code(middle.next_up()), low + 1, "{middle}");
            }
            for beyond in [value(largest), value(largest) * 1.5, f32::MAX, f32::INFINITY] {
                assert_eq!(code(beyond), largest);
                assert_eq!(code(-beyond), largest | 0x80);
            }
            assert_eq!((code(1e-30), code(-0.0), code(f32::NAN)), (0, 0x80, 0x7f));
        }
        rounds(0x7e, |c| E4m3::from_bits(c).to_f32(), |x| E4m3::from_f32(x).to_bits());
        rounds(0x7b, |c| E5m2::from_bits(c).to_f32(), |x| E5m2::from_f32(x).to_bits());
    }
}
