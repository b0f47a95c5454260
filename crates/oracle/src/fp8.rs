//! 8-bit products with the summation of tensor cores.
//!
//! A tensor core aligns the products of a sum, and the number to which it adds them, to the largest of their
//! exponents, and drops bits that lie more than 13 bits below. The result keeps 13 bits below its leading
//! one. A sum of sm_89 has 16 products (`mma.sync`), one of sm_90 has 32 (`wgmma`). The models of the
//! emulator and their sources are in `emu::numerics::tensor`; this module shares no code with them.

use problem::{E4m3, Tensor};

use crate::{Arithmetic, LANES, Place};

/// Number of products in one sum. The number of sm_89 is used, whose error is larger.
const CHUNK: usize = 16;

/// Bits that a sum keeps below its largest exponent.
const FRACTION_BITS: i32 = 13;

/// Number of keys whose products with P the tensor core sums before the result is added in f32. Without such
/// a limit, the dropped bits, which all have one sign, would grow with the number of keys.
pub const SUM_KEYS: usize = 128;

/// The factor on P = exp(S − max) before it is rounded to e4m3: the largest power of two that leaves P below
/// the largest number, 448.
pub const WEIGHT_FACTOR: f32 = 256.0;

/// `start + Σ a·b`, as one tensor core instruction sums it. NaN and infinity propagate.
fn fused(start: f64, products: impl Iterator<Item = f64> + Clone) -> f64 {
    let all = || std::iter::once(start).chain(products.clone());
    let largest = all().fold(0.0, |most: f64, x| if x.is_nan() { x } else { most.max(x.abs()) });
    if largest == 0.0 || !largest.is_finite() {
        return all().sum();
    }
    let unit = unit_of(largest);
    let sum: f64 = all().map(|x| truncated(x / unit)).sum::<f64>() * unit;
    if sum == 0.0 { 0.0 } else { truncated(sum / unit_of(sum)) * unit_of(sum) }
}

/// The integer part. `f64::trunc` is a library call here, because the target includes x86-64 without SSE 4.1.
fn truncated(x: f64) -> f64 {
    // Larger numbers have no fraction; a NaN stays one.
    if x.abs() < (1u64 << 52) as f64 { (x as i64) as f64 } else { x }
}

/// The value of the last bit that is kept when the largest number is `x`.
fn unit_of(x: f64) -> f64 {
    let exponent = (x.to_bits() >> 52) as i32 & 0x7ff;
    f64::from_bits(((exponent - FRACTION_BITS).max(1) as u64) << 52)
}

/// Adds the products of eight queries and a key to `sums`.
pub(crate) fn dot<A: Arithmetic>(query: &[[A::Real; LANES]], key: &[A::Real], sums: &mut [A::Real; LANES]) {
    for (query, key) in query.chunks(CHUNK).zip(key.chunks(CHUNK)) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let products = query.iter().zip(key).map(|(q, &k)| q[lane].into() * k.into());
            *sum = A::narrow(fused((*sum).into(), products));
        }
    }
}

/// O = P V / sum. The weights, which are not normalised, are rounded to e4m3.
pub(crate) fn multiply_values<A: Arithmetic>(
    place: &Place<'_>,
    weights: &mut [[A::Real; LANES]],
    visible: &[[bool; LANES]],
    sum: &[A::Real; LANES],
    values: &[A::Real],
    out: &mut [[A::Real; LANES]],
) {
    for weight in weights.iter_mut().flatten() {
        let wide: f64 = (*weight).into();
        *weight = A::real(E4m3::from_f32(wide as f32 * WEIGHT_FACTOR).to_f32());
    }
    // Keys whose sum is multiplied by one factor of V.
    let block = place.problem.scales.of(Tensor::V).and_then(|layout| layout.rows);
    let step = block.map_or(SUM_KEYS, |rows| SUM_KEYS.min(rows as usize));
    let dim = out.len();
    for first in (0..weights.len()).step_by(step) {
        let last = (first + step).min(weights.len());
        let factor = place.descale_of_value::<A>(first);
        for (d, out) in out.iter_mut().enumerate() {
            for lane in 0..LANES {
                let mut total = 0.0;
                for chunk in (first..last).step_by(CHUNK) {
                    let keys = (chunk..last.min(chunk + CHUNK)).filter(|&key| visible[key][lane]);
                    let products = keys.map(|key| weights[key][lane].into() * values[key * dim + d].into());
                    total = fused(total, products);
                }
                let normalised = A::narrow(total) / (sum[lane] * A::real(WEIGHT_FACTOR));
                // A lane that sees none of these keys has no product, even if a factor is NaN.
                if (first..last).any(|key| visible[key][lane]) {
                    out[lane] = out[lane] + normalised * factor;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums like those of an H200's tensor cores: bits that lie 14 bits below the largest term are lost.
    #[test]
    fn small_terms_are_dropped() {
        let sum = |start: f64, of: &[f64]| fused(start, of.iter().copied());
        let last = 2f64.powi(-13);
        assert_eq!(sum(1.0, &[last]), 1.0 + last);
        assert_eq!(sum(1.0, &[last / 2.0]), 1.0);
        assert_eq!(sum(1.0, &[last / 2.0; 16]), 1.0, "each term is dropped by itself");
        assert_eq!(sum(-1.0, &[last * 1.5]), -1.0 + last, "toward zero");
        assert_eq!(sum(1.5, &[1.5, last]), 3.0, "the result keeps 13 bits too");
        assert_eq!(sum(0.0, &[0.0, -0.0]), 0.0);
        assert!(sum(0.0, &[f64::NAN]).is_nan() && sum(1.0, &[f64::INFINITY]).is_infinite());
    }
}
