//! A cap on the logits: `tanh(scale · q·k / cap)`, which the softmax then scales by `cap`.

use crate::simd::Simd;

/// Coefficients of x, x³, … x¹³ of the numerator, and of 1, x², x⁴, x⁶ of the denominator: a rational minimax
/// fit of tanh, the one of Eigen (`generic_fast_tanh_float`).
const NUMERATOR: [f32; 7] = [
    4.893_524_6e-3,
    6.372_619e-4,
    1.485_722_3e-5,
    5.122_297e-8,
    -8.604_672e-11,
    2.000_188e-13,
    -2.760_768_4e-16,
];
const DENOMINATOR: [f32; 4] = [4.893_525e-3, 2.268_434_7e-3, 1.185_347e-4, 1.198_258_4e-6];
/// From this x on, tanh is 1 in f32. The fit deviates from 1 by at most its error bound there.
const LARGEST: f32 = 7.905_311;

/// `tanh(x)` with a relative error below 3·2⁻²³. NaN gives NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (low, high) = (s.splat(-LARGEST), s.splat(LARGEST));
    let x = s.select_lt(high, x, high, x);
    let x = s.select_lt(x, low, low, x);
    let square = s.mul(x, x);
    let horner = |coefficients: &[f32]| {
        let (&last, others) = coefficients.split_last().expect("there are coefficients");
        others.iter().rev().fold(s.splat(last), |sum, &c| s.fma(sum, square, s.splat(c)))
    };
    s.div(s.mul(horner(&NUMERATOR), x), horner(&DENOMINATOR))
}

/// Replaces logits by `tanh(factor · logit)`, in place. The length must be a multiple of the lanes.
#[inline(always)]
pub(crate) fn cap_logits<S: Simd>(s: S, factor: f32, logits: &mut [f32]) {
    let factor = s.splat(factor);
    for logits in logits.chunks_exact_mut(S::LANES) {
        s.store(tanh(s, s.mul(s.load(logits), factor)), logits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    fn error<S: Simd>(s: S) -> f64 {
        let mut buffer = vec![0.0f32; S::LANES];
        let mut of = |x: f32| {
            s.store(tanh(s, s.splat(x)), &mut buffer);
            buffer[0]
        };
        assert_eq!((of(0.0), of(100.0)), (0.0, -of(f32::NEG_INFINITY)));
        assert!((of(100.0) - 1.0).abs() <= 3.0 * f32::EPSILON);
        assert!(of(f32::NAN).is_nan());
        (1..1_000_000).fold(0.0, |worst: f64, i| {
            let x = i as f32 * 1e-5;
            let exact = f64::from(x).tanh();
            worst.max(((f64::from(of(x)) - exact) / exact).abs() * 2f64.powi(23))
        })
    }

    #[test]
    fn tanh_keeps_its_bound() {
        let mut errors = vec![error(Portable::<4>)];
        #[cfg(target_arch = "x86_64")]
        {
            errors.extend(crate::simd::Avx2::detect().map(error));
            errors.extend(crate::simd::Avx512::detect().map(error));
        }
        #[cfg(target_arch = "aarch64")]
        errors.extend(crate::simd::Neon::detect().map(error));
        assert!(errors.iter().all(|&e| e < 3.5), "{errors:?} units of 2^-23");
    }
}
