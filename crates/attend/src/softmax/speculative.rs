//! The speculative row max: a block's exponentials subtract the row max of earlier blocks, and a check of the
//! result says whether the block must be recomputed with its own row max.

use ptx::{Builder, CmpOp, F32, Half, Pred};
use tile::{OperandTile, WarpgroupVote};

use super::row_max::{F16_LARGEST_POWER, usual_headroom};
use super::{OnlineSoftmax, Sums};

/// The speculation of a warpgroup: a block's scores are assumed not to exceed the stored row maxima by much,
/// and the assumption is checked afterwards.
#[derive(Clone, Copy, Debug)]
pub struct SpeculativeMax {
    /// Upper bound of a lane's sum of a block's probabilities. Where a product makes the sums, the bound is 2
    /// for each probability.
    limit: f32,
    /// The vote of the warpgroup, which issues products together.
    vote: WarpgroupVote,
}

impl SpeculativeMax {
    /// That a lane's sum of a block's probabilities stays below `2^limit` times that of a maximum, and in f16
    /// within its range.
    pub fn new(half: Half, limit: u8, vote: WarpgroupVote) -> SpeculativeMax {
        SpeculativeMax { limit: largest_sum(half, limit), vote }
    }

    /// Whether the assumption holds for a block in all rows of the warpgroup, from the lane's sums of the
    /// block or from the rounded probabilities.
    pub(crate) fn holds(
        &self,
        k: &mut Builder,
        softmax: &OnlineSoftmax,
        sums: &[F32],
        p: &OperandTile,
    ) -> Pred {
        let good = match softmax.sums {
            Sums::Lanes => all_below(k, sums, self.limit),
            Sums::Product => p.below_two(k),
        };
        self.vote.all(k, good)
    }
}

/// Upper bound of the sum of a lane's probabilities. Below it, no weight exceeds `2^limit` times the weight
/// of the maximum, and none leaves the range of f16.
fn largest_sum(half: Half, limit: u8) -> f32 {
    let power = f32::from(limit) - usual_headroom(half);
    f32::exp2(match half {
        Half::F16 => power.min(F16_LARGEST_POWER.into()),
        Half::Bf16 => power,
    })
}

/// Whether all values are below the limit. NaN is not.
fn all_below(k: &mut Builder, values: &[F32], limit: f32) -> Pred {
    let first = k.setp_f(CmpOp::Lt, values[0], limit);
    values[1..].iter().fold(first, |below, &value| {
        let this = k.setp_f(CmpOp::Lt, value, limit);
        k.and_pred(below, this)
    })
}
