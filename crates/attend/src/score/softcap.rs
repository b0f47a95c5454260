//! Softcap of the logits: `t = cap · tanh(scale · s / cap)`.

use ptx::{Builder, F32};
use tile::AccTile;

/// Turns scores into `tanh(scale · s / cap)`. The softmax then uses `cap · log2 e` as its factor.
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    /// `2 · log2 e · scale / cap`, positive.
    pub factor: F32,
}

impl Softcap {
    /// Applies the cap to the scores of a tile in place.
    ///
    /// `tanh x = 1 − 2 / (exp2(2 · log2 e · x) + 1)` takes one EX2 and one reciprocal. The error is a few
    /// roundings of numbers up to 1 (about 2⁻²²). `tanh.approx` has a relative error of up to 2⁻¹¹ (PTX ISA,
    /// "tanh"), which after multiplication by the cap exceeds the rounding of an f16 weight.
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
