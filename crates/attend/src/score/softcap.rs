//! Softcap of the logits: `t = cap · tanh(scale · s / cap)`.

use ptx::{Builder, F32};
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
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    /// [`Tanh::argument_factor`]` · scale / cap`, positive.
    pub factor: F32,
    pub tanh: Tanh,
}

impl Softcap {
    /// Applies the cap to the scores of a tile in place.
    pub fn apply(&self, k: &mut Builder, s: &AccTile) {
        for i in 0..s.lane_rows() {
            for score in s.row(i) {
                k.mul_to(score, score, self.factor);
                match self.tanh {
                    Tanh::Approx => k.tanh_to(score, score),
                    Tanh::Exp2 => {
                        k.ex2_to(score, score);
                        k.add_to(score, score, 1.0f32);
                        let inverse = k.rcp(score);
                        k.mad_to(score, inverse, -2.0f32, 1.0f32);
                    }
                }
            }
        }
    }
}
