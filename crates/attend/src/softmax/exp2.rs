//! 2^x on the FMA pipe instead of the special-function unit.

use ptx::{Builder, F32, R32};

/// Coefficients of `2^f − 1` over f for |f| ≤ ½: the cubic without constant term that minimises the maximum
/// relative error of `2^f`, 1.0e-4.
const CUBIC: [f32; 3] = [0.693_282_9, 0.242_210_76, 0.055_008_747];
/// 1.5 · 2^23. Adding it rounds a number of magnitude below 2^22 to an integer, which is then in the lowest
/// bits of the sum.
const TO_INTEGER: f32 = 12_582_912.0;

/// `x = 2^x` on the FMA and integer pipes (Cody & Waite 1980; FlashAttention-4 does this on Blackwell): `x =
/// j + f` with an integer j, `2^f` from a polynomial, then j is added to its exponent. Nine instructions
/// replace one EX2, but the EX2 pipe has at most a quarter of the rate of these pipes.
///
/// The relative error is 1.0e-4, less than one rounding to f16. The result is 0 for x ≤ −127 and for −∞,
/// 2^127 for x ≥ 127, and the largest f32 for NaN. A check for large results therefore detects overflow and
/// NaN.
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
