//! 2^x without the special-function unit.

use ptx::{Builder, F32, R32};

/// `2^f − 1` over f, for |f| ≤ ½: the cubic without a constant whose largest relative error in `2^f` is
/// least, 1.0e-4.
const CUBIC: [f32; 3] = [0.693_282_9, 0.242_210_76, 0.055_008_747];
/// 1.5 · 2^23: a number below 2^22 in size that is added to it is rounded to an integer, which stands in its
/// lowest bits.
const TO_INTEGER: f32 = 12_582_912.0;

/// `x = 2^x` by the pipes of FMAs and integers (Cody & Waite 1980; on Blackwell, FlashAttention-4):
/// `x = j + f` with an integer j, `2^f` by a polynomial, and j added to its exponent. Ten instructions where
/// EX2 is one, of another pipe that has a quarter of their rate at most.
///
/// Of relative error 1.0e-4, less than a rounding to f16. For x up to −127, −∞ too, it is 0; from 127 on
/// 2^127, and for what is no number f32's largest: whoever looks for large results finds both.
pub(crate) fn exp2_by_fma(k: &mut Builder, x: F32) {
    k.max_nan_to(x, x, -127.0f32);
    k.min_nan_to(x, x, 127.0f32);
    let shifted = k.add(x, TO_INTEGER);
    let integer = k.sub(shifted, TO_INTEGER);
    let fraction = k.sub(x, integer);
    let [first, second, third] = CUBIC;
    let power = k.mad(fraction, third, second);
    k.mad_to(power, power, fraction, first);
    k.mad_to(power, power, fraction, 1.0f32);
    let [exponent, power]: [R32; 2] = [shifted, power].map(|part| k.to_bits(part));
    let sum = k.mad(exponent, 1 << 23, power);
    let sum = k.from_bits(sum);
    k.mov_to(x, sum);
}
