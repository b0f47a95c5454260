//! 8-bit products with the summation of tensor cores.
//!
//! A tensor core aligns the products of a sum, and the number to which it adds them, to the largest of their
//! exponents, and drops bits that lie more than 13 bits below. The result keeps 13 bits below its leading
//! one. A sum of sm_89 has 16 products (`mma.sync`), one of sm_90 has 32 (`wgmma`). The models of the
//! emulator and their sources are in `emu::numerics::tensor`; this module shares no code with them.

use problem::{E4m3, Tensor};
use pulp::{Arch, Simd, WithSimd};

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

/// `start + Σ products` in each lane, as one tensor core instruction sums it. NaN and infinity propagate.
#[inline(always)]
fn fused(start: &[f64; LANES], products: &[[f64; LANES]]) -> [f64; LANES] {
    let mut largest = [0.0; LANES];
    let terms = || std::iter::once(start).chain(products);
    for term in terms() {
        for lane in 0..LANES {
            let size = term[lane].abs();
            largest[lane] = if size > largest[lane] { size } else { largest[lane] };
        }
    }
    let mut sums = [0.0; LANES];
    for term in terms() {
        for lane in 0..LANES {
            sums[lane] += (term[lane] * inverse(unit_of(largest[lane]))).trunc();
        }
    }
    for lane in 0..LANES {
        let sum = sums[lane] * unit_of(largest[lane]);
        let unit = unit_of(sum);
        sums[lane] = (sum * inverse(unit)).trunc() * unit;
    }
    sums
}

/// The value of the last bit that is kept when the largest number is `x`: a power of two.
#[inline(always)]
fn unit_of(x: f64) -> f64 {
    let exponent = (x.to_bits() >> 52) as i32 & 0x7ff;
    f64::from_bits(((exponent - FRACTION_BITS).max(1) as u64) << 52)
}

/// 1 / x for a power of two that [`unit_of`] returns.
#[inline(always)]
fn inverse(x: f64) -> f64 {
    const EXPONENT_OF_ONE: u64 = 1023;
    f64::from_bits(2 * (EXPONENT_OF_ONE << 52) - x.to_bits())
}

/// For each key, dense rows of as many numbers as `query` has, the products with the eight queries.
pub(crate) fn dot_products<A: Arithmetic>(
    query: &[[A::Real; LANES]],
    keys: &[A::Real],
) -> Vec<[A::Real; LANES]> {
    let query: Vec<[f64; LANES]> = query.iter().map(|q| q.map(Into::into)).collect();
    let mut sums = vec![[A::Real::default(); LANES]; keys.len() / query.len().max(1)];
    Arch::new().dispatch(Dots::<A> { query: &query, keys, sums: &mut sums });
    sums
}

/// The arguments are a struct, whose method is compiled for the instructions of the processor: without SSE
/// 4.1, `f64::trunc` is a library call.
struct Dots<'a, A: Arithmetic> {
    query: &'a [[f64; LANES]],
    keys: &'a [A::Real],
    sums: &'a mut [[A::Real; LANES]],
}

impl<A: Arithmetic> WithSimd for Dots<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut products = [[0.0; LANES]; CHUNK];
        for (key, sums) in self.keys.chunks_exact(self.query.len().max(1)).zip(self.sums) {
            for (query, key) in self.query.chunks(CHUNK).zip(key.chunks(CHUNK)) {
                for ((product, query), &k) in products.iter_mut().zip(query).zip(key) {
                    let k: f64 = k.into();
                    for lane in 0..LANES {
                        product[lane] = query[lane] * k;
                    }
                }
                *sums = fused(&sums.map(Into::into), &products[..query.len()]).map(A::narrow);
            }
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
    let mut totals = vec![[0.0; LANES]; dim];
    for first in (0..weights.len()).step_by(step) {
        let last = (first + step).min(weights.len());
        let factor = place.descale_of_value::<A>(first);
        let (visible, weights) = (&visible[first..last], &weights[first..last]);
        let values = &values[first * dim..last * dim];
        Arch::new().dispatch(Weighted::<A> { visible, weights, values, totals: &mut totals });
        for (out, total) in out.iter_mut().zip(&totals) {
            for lane in 0..LANES {
                let normalised = A::narrow(total[lane]) / (sum[lane] * A::real(WEIGHT_FACTOR));
                // A lane that sees none of these keys has no product, even if a factor is NaN.
                if visible.iter().any(|visible| visible[lane]) {
                    out[lane] = out[lane] + normalised * factor;
                }
            }
        }
    }
}

/// `totals` becomes the sums, for each dimension, of the keys' weights times their values.
struct Weighted<'a, A: Arithmetic> {
    visible: &'a [[bool; LANES]],
    weights: &'a [[A::Real; LANES]],
    values: &'a [A::Real],
    totals: &'a mut [[f64; LANES]],
}

impl<A: Arithmetic> WithSimd for Weighted<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let dim = self.totals.len();
        self.totals.fill([0.0; LANES]);
        let mut products = [[0.0; LANES]; CHUNK];
        let chunks = self.weights.chunks(CHUNK).zip(self.visible.chunks(CHUNK));
        for ((weights, visible), values) in chunks.zip(self.values.chunks(CHUNK * dim.max(1))) {
            for (d, total) in self.totals.iter_mut().enumerate() {
                for (key, product) in products[..weights.len()].iter_mut().enumerate() {
                    let value: f64 = values[key * dim + d].into();
                    for lane in 0..LANES {
                        // A weight of 0 must not be multiplied by a NaN that the row does not see.
                        let seen = visible[key][lane];
                        product[lane] = if seen { weights[key][lane].into() * value } else { 0.0 };
                    }
                }
                *total = fused(total, &products[..weights.len()]);
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
        let sum = |start: f64, of: &[f64]| {
            let products: Vec<[f64; LANES]> = of.iter().map(|&x| [x; LANES]).collect();
            fused(&[start; LANES], &products)[LANES - 1]
        };
        let last = 2f64.powi(-13);
        assert_eq!(sum(1.0, &[last]), 1.0 + last);
        assert_eq!(sum(1.0, &[last / 2.0]), 1.0);
        assert_eq!(sum(1.0, &[last / 2.0; 16]), 1.0, "each term is dropped by itself");
        assert_eq!(sum(-1.0, &[last * 1.5]), -1.0 + last, "toward zero");
        assert_eq!(sum(1.5, &[1.5, last]), 3.0, "the result keeps 13 bits too");
        assert_eq!(sum(0.0, &[0.0, -0.0]), 0.0);
        assert!(sum(0.0, &[f64::NAN]).is_nan() && sum(1.0, &[f64::INFINITY]).is_infinite());
    }

    /// Each lane has the sum that its terms have alone: divided by the last bit that is kept, cut, added.
    #[test]
    fn lanes_are_summed_apart() {
        let cut = |x: f64, unit: f64| (x / unit).trunc() * unit;
        let number = |i: usize| {
            let power = 2f64.powi((i * 31 % 41) as i32 - 20);
            if i.is_multiple_of(5) { 0.0 } else { ((i * 7919 + 13) % 1009) as f64 * power - 300.0 * power }
        };
        for terms in 0..=CHUNK {
            let of = |lane: usize, term: usize| number(terms * 1000 + lane * 100 + term);
            let products: Vec<[f64; LANES]> =
                (1..=terms).map(|term| std::array::from_fn(|lane| of(lane, term))).collect();
            let found = fused(&std::array::from_fn(|lane| of(lane, 0)), &products);
            for (lane, found) in found.into_iter().enumerate() {
                let all = || (0..=terms).map(|term| of(lane, term));
                let unit = unit_of(all().fold(0.0, |most: f64, x| most.max(x.abs())));
                let sum: f64 = all().map(|x| cut(x, unit)).sum();
                assert_eq!(found, cut(sum, unit_of(sum)), "{terms} terms, lane {lane}");
            }
        }
    }
}
