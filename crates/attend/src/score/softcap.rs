//! The softcap of the logits, `t = cap · tanh(scale · s / cap)`, and the scale of wide logits. Both are
//! applied to the products of queries and keys before programs and masks.

use ptx::{Builder, CmpOp, F32};
use serde::{Deserialize, Serialize};
use tile::AccTile;

/// How the hyperbolic tangent is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tanh {
    /// `tanh x = 1 − 2 / (exp2(2 · log2 e · x) + 1)`: one EX2 and one reciprocal. The error is a few
    /// roundings of numbers up to 1 (about 2⁻²²).
    #[default]
    Exp2,
    /// `tanh.approx.f32`: one MUFU operation with a relative error of up to 2⁻¹¹ (PTX ISA, "tanh"). This is a
    /// quarter of the error with which standard attention rounds a logit to bf16, and equal to the error for
    /// f16.
    Approx,
}

impl Tanh {
    /// The factor on `scale / cap` in the argument of [`Softcap`].
    pub fn argument_factor(self) -> f64 {
        match self {
            Tanh::Exp2 => 2.0 * std::f64::consts::LOG2_E,
            Tanh::Approx => 1.0,
        }
    }
}

/// Turns scores into `tanh(scale · s / cap)`. The softmax then uses `cap · log2 e` as its factor.
///
/// If logits may be *wide*, the scores are multiplied by all factors here, and the softmax uses 1. Its
/// exponent `s · c − m` has the exact product, but m is rounded: for a product beyond 2^31, the rounding
/// alone overflows the exponential. With c = 1 the difference is exact.
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    /// [`Tanh::argument_factor`]` · scale / cap`, or `scale · log2 e` without a cap; positive.
    pub factor: F32,
    /// How the tangent is computed; `None` for wide logits without a cap.
    pub tanh: Option<Tanh>,
    /// `cap · log2 e` if capped logits may be wide.
    pub cap: Option<F32>,
}

impl Softcap {
    /// Applies the cap to the scores of a tile in place.
    pub fn apply(&self, k: &mut Builder, s: &AccTile) {
        for i in 0..s.lane_rows() {
            for score in s.row(i) {
                k.mul_to(score, score, self.factor);
                match (self.tanh, self.cap) {
                    (None, _) => {}
                    (Some(Tanh::Approx), _) => k.tanh_to(score, score),
                    (Some(Tanh::Exp2), None) => tanh(k, score),
                    (Some(Tanh::Exp2), Some(_)) => accurate_tanh(k, score),
                }
                if let Some(cap) = self.cap {
                    k.mul_to(score, score, cap);
                }
            }
        }
    }
}

/// `y = tanh(y / (2 · log2 e))` by [`Tanh::Exp2`].
fn tanh(k: &mut Builder, y: F32) {
    k.ex2_to(y, y);
    k.add_to(y, y, 1.0f32);
    let inverse = k.rcp(y);
    k.mad_to(y, inverse, -2.0f32, 1.0f32);
}

/// Below this argument, [`accurate_tanh`] uses a polynomial.
const SMALL: f32 = 0.55;
/// `(tanh x / x − 1) / x²` in powers of x², for |x| ≤ [`SMALL`]; the relative error of the tangent is 2⁻²³
/// (fitted to minimise the maximum).
const POLYNOMIAL: [f32; 4] = [-0.333_329_6, 0.133_209_42, -0.052_684_143, 0.016_458_761];

/// Like [`tanh`], but the *relative* error is a few roundings: a large cap multiplies the tangents of small
/// arguments.
fn accurate_tanh(k: &mut Builder, y: F32) {
    let x = k.mul(y, std::f32::consts::LN_2 / 2.0);
    tanh(k, y);
    let square = k.mul(x, x);
    let [first, second, third, fourth] = POLYNOMIAL;
    let sum = k.mov(fourth);
    for coefficient in [third, second, first] {
        k.mad_to(sum, sum, square, coefficient);
    }
    let cube = k.mul(square, x);
    let small = k.mad(sum, cube, x);
    let size = k.abs(x);
    let is_small = k.setp_f(CmpOp::Lt, size, SMALL);
    k.selp_to(y, small, y, is_small);
}
