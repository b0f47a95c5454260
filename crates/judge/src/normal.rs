//! Standard normal numbers by the Box–Muller transform, on the processor's vectors.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, TAU};

use pulp::{Arch, Simd, WithSimd};
use rand::RngCore;
use rand::rngs::SmallRng;

/// Numbers computed at once.
const BLOCK: usize = 64;

/// Fills `to` with independent draws. Each takes two numbers of the generator.
pub(crate) fn draw_normals(rng: &mut SmallRng, to: &mut [f32]) {
    for to in to.chunks_mut(BLOCK) {
        let [mut x, mut y] = [[0.0; BLOCK]; 2];
        for (x, y) in x.iter_mut().zip(&mut y).take(to.len()) {
            (*x, *y) = (1.0 - draw_uniform(rng), draw_uniform(rng));
        }
        Arch::new().dispatch(BoxMuller { uniform: [&x, &y], to });
    }
}

/// A number in [0, 1), as `rng.random()` draws it, in a function that the compiler inlines.
#[inline(always)]
fn draw_uniform(rng: &mut SmallRng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// `√(−2 ln x) · cos(2π y)` of pairs with x in (0, 1] and y in [0, 1).
struct BoxMuller<'a> {
    uniform: [&'a [f64; BLOCK]; 2],
    to: &'a mut [f32],
}

impl WithSimd for BoxMuller<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (len, to) = (self.to.len(), self.to);
        let [x, y] = self.uniform.map(|numbers| &numbers[..len]);
        // Without iterators, which the compiler does not inline here.
        for i in 0..len {
            to[i] = ((-2.0 * logarithm(x[i])).sqrt() * cosine(y[i])) as f32;
        }
    }
}

/// ln x of a normal number that is at most 1, with a relative error below 10⁻¹³. It has no branches and
/// no calls, so that the compiler can use vectors.
#[inline(always)]
fn logarithm(x: f64) -> f64 {
    // x = 2^power · m with m from √½ to √2, and ln m = 2 artanh((m − 1) / (m + 1)).
    let lifted = x.to_bits().wrapping_add((1 << 62) - FRAC_1_SQRT_2.to_bits());
    let power = lifted >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub(power.wrapping_sub(1024) << 52));
    // The sum with 2⁵² has the integer in its last bits.
    let power = f64::from_bits(power | 0x4330 << 48) - ((1u64 << 52) as f64 + 1024.0);
    let s = (m - 1.0) / (m + 1.0);
    power * LN_2 + 2.0 * s * polynomial(&ARTANH, s * s)
}

/// cos(2π y) of a number from 0 to 1, with an error below 10⁻¹³.
#[inline(always)]
fn cosine(y: f64) -> f64 {
    // The cosine of the angle to the nearest whole turn is the sine of a quarter turn less.
    let angle = TAU * (0.25 - if y < 0.5 { y } else { 1.0 - y });
    angle * polynomial(&SINE, angle * angle)
}

/// The series of artanh(s) / s in s², the last term first.
const ARTANH: [f64; 9] = {
    let mut terms = [0.0; 9];
    let mut i = 0;
    while i < 9 {
        terms[8 - i] = 1.0 / (2 * i + 1) as f64;
        i += 1;
    }
    terms
};

/// The series of sin(y) / y in y², the last term first.
const SINE: [f64; 10] = {
    let mut terms = [1.0; 10];
    let mut i = 1;
    while i < 10 {
        terms[9 - i] = -terms[10 - i] / (2 * i * (2 * i + 1)) as f64;
        i += 1;
    }
    terms
};

/// Terms of a polynomial, that of the highest power first.
#[inline(always)]
fn polynomial<const TERMS: usize>(terms: &[f64; TERMS], x: f64) -> f64 {
    let (mut sum, mut i) = (0.0, 0);
    while i < TERMS {
        sum = sum * x + terms[i];
        i += 1;
    }
    sum
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn the_transform_is_that_of_the_library() {
        let edges = [1.0, 0.5, 0.25, 0.75, FRAC_1_SQRT_2, f64::EPSILON];
        for x in edges.into_iter().flat_map(|x: f64| [x, x.next_down()]) {
            let error = (logarithm(x) - x.ln()).abs();
            assert!(error <= 1e-13 * x.ln().abs(), "ln {x}: {error}");
        }
        let [mut ours, mut theirs] = [7; 2].map(SmallRng::seed_from_u64);
        let mut drawn = vec![0.0; 100_003];
        draw_normals(&mut ours, &mut drawn);
        for (i, &x) in drawn.iter().enumerate() {
            let radius = (-2.0 * (1.0 - theirs.random::<f64>()).ln()).sqrt();
            let want = radius * (TAU * theirs.random::<f64>()).cos();
            let error = (f64::from(x) - want).abs();
            assert!(error <= 1e-7 * want.abs() + 1e-12, "{i}: {x}, should be {want}");
        }
        // Both have drawn as many numbers.
        assert_eq!(ours, theirs);
    }
}
