//! How far roundings of f32 logits move an output: the part of an f32 kernel's error that depends on the
//! order of its sums.
//!
//! A logit s_j has an error δ_j. To first order, it changes O by Σ_j p_j δ_j (v_j − O): a row in which one
//! key has all the weight does not feel it, and a row in which two keys are nearly tied feels all of it. The
//! errors are modelled as independent, with a mean of 0 (Higham and Mary, "A new approach to probabilistic
//! rounding error analysis", 2019), so that the variance of an element of O is
//!
//!   Σ_j p_j² Var(δ_j) (v_j − O)².
//!
//! A rounding of x to f32 has an error of at most u·|x| (u = 2⁻²⁴); one that is uniform in this interval has
//! the variance u²x²/3. The roundings of a logit are:
//!
//! - head_dim partial sums of products. In a random order, the mean square of a partial sum is
//!   s²/3 + Q/6, where Q is the sum of the squared products. If one product exceeds all others and comes
//!   first, each partial sum is as large as s. (s² + Q) / 2 covers both.
//! - the products themselves (no rounding with a fused multiply-add) and the scaled query: 2 Q.
//! - two roundings of the sum (by the scale and by log2 e): 2 s².
//! - cap and score program change an error by their slope, and round the final logit t twice: 2 t².
//! - the exponential, the sum of weights and its inverse: 4 roundings of the weight, which an error of the
//!   logit of 4 u² / 3 equals.

use crate::LANES;
use crate::products::{Real, dot_products};

/// Variance of a rounding to f32, relative to the square of the number.
pub(crate) const ROUNDING: f64 = {
    let unit = 1.0 / (1u32 << 24) as f64;
    unit * unit / 3.0
};

/// The standard deviation of a scaled product of a query and a key, from the product and from the sum of its
/// squared terms.
pub(crate) fn of_product(dim: usize, product: f64, squares: f64) -> f64 {
    (ROUNDING * (dim as f64 / 2.0 + 2.0) * (product * product + squares)).sqrt()
}

/// The variance of a logit, from the change that a standard deviation of the product makes.
pub(crate) fn of_logit(logit: f64, change: f64) -> f64 {
    let variance = change * change + ROUNDING * (2.0 * logit * logit + 4.0);
    if variance.is_finite() { variance } else { 0.0 }
}

/// The squares of numbers.
pub(crate) fn squares<R: Real>(numbers: &[R]) -> Vec<R> {
    numbers.iter().map(|&x| x * x).collect()
}

/// For each key, the sums of the squared terms of its products with the rows of a block.
pub(crate) fn squared_products<R: Real>(query: &[[R; LANES]], keys: &[R]) -> Vec<[R; LANES]> {
    let query: Vec<[R; LANES]> = query.iter().map(|query| query.map(|x| x * x)).collect();
    dot_products(&query, &squares(keys))
}

/// For each key, the square of the weight times the variance of the logit: the variance of an element of O
/// per square of v_j − O.
pub(crate) fn shares(weights: &[[f64; LANES]], variances: &[[f64; LANES]]) -> Vec<[f64; LANES]> {
    let share = |(weights, variances): (&[f64; LANES], &[f64; LANES])| {
        std::array::from_fn(|lane| weights[lane] * weights[lane] * variances[lane])
    };
    weights.iter().zip(variances).map(share).collect()
}

/// The standard deviation of an element of O, from the sums over keys of the shares, of the shares times the
/// values and of the shares times the squared values.
pub(crate) fn of_output(out: f64, [shares, values, squares]: [f64; 3]) -> f64 {
    (squares - 2.0 * out * values + out * out * shares).max(0.0).sqrt()
}
