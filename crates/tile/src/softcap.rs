//! A cap on the logits: `t = cap · tanh(scale · s / cap)`.

use ptx::{Builder, F32};

use crate::AccTile;

/// Turns scores into `tanh(scale · s / cap)`; the softmax takes `cap · log2 e` for its factor.
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    /// `2 · log2 e · scale / cap`, positive.
    pub factor: F32,
}

impl Softcap {
    /// Caps the scores of a tile in place.
    ///
    /// `tanh x = 1 − 2 / (exp2(2 · log2 e · x) + 1)`, an EX2 and a reciprocal. The error is that of a few
    /// roundings of numbers up to 1 (about 2⁻²²), where `tanh.approx` may be wrong by 2⁻¹¹ of the result (PTX
    /// ISA, "tanh"), which is more than an f16 weight's rounding once the cap multiplies it.
    pub fn apply(&self, k: &mut Builder, s: &AccTile) {
        for i in 0..s.lane_rows() {
            for score in s.row(i) {
                k.mul_to(score, score, self.factor);
                k.ex2_to(score, score);
                k.add_to(score, score, 1.0f32);
                let inverse = k.rcp(score);
                k.mad_to(score, inverse, -2.0f32, 1.0f32);
            }
        }
    }
}
