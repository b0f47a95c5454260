//! The speculative row max. A block's exponentials subtract the row max of earlier blocks, and a check of the
//! result decides whether the block must be recomputed with its own row max.

use ptx::{Builder, CmpOp, F32, Half, Pred};
use tile::{OperandTile, OperandType, WarpgroupVote};

use super::row_max::{E4M3_LARGEST, F16_LARGEST_POWER, usual_headroom};
use super::{OnlineSoftmax, Rescale, Sums};

/// The speculation of a warpgroup: a block's scores are assumed not to exceed the stored row maxima by much,
/// and the assumption is checked afterwards.
#[derive(Clone, Copy, Debug)]
pub struct SpeculativeMax {
    /// Upper bound of a lane's sum of a block's probabilities. If a product computes the sums, the bound for
    /// each probability is 2.
    limit: f32,
    /// The vote of the warpgroup, whose warps issue products together.
    vote: WarpgroupVote,
}

impl SpeculativeMax {
    /// Assumes that a lane's sum of a block's probabilities stays below `2^limit` times the weight of a
    /// maximum and, in f16 and e4m3, within the range of the type. `rescale` is the mode of the softmax.
    pub fn new(
        weights: impl Into<OperandType>,
        rescale: Rescale,
        limit: u8,
        vote: WarpgroupVote,
    ) -> SpeculativeMax {
        SpeculativeMax { limit: largest_sum(weights.into(), rescale, limit), vote }
    }

    /// Runs `recompute` unless the assumption holds for a block in all rows of the warpgroup. The check uses
    /// the lane's sums of the block, or the rounded probabilities.
    ///
    /// In e4m3 the bound of the sums is little more than a single maximum, so rows of equal scores exceed it.
    /// In that case the probabilities themselves are checked: the conversion turns values outside the range
    /// into 448.
    pub(crate) fn check(
        &self,
        k: &mut Builder,
        softmax: &OnlineSoftmax,
        sums: &[F32],
        p: &OperandTile,
        recompute: impl FnOnce(&mut Builder),
    ) {
        let good = match softmax.sums {
            Sums::Lanes => all_below(k, sums, self.limit),
            Sums::Product => p.below_two(k),
        };
        let holds = self.vote.all(k, good);
        k.if_(!holds, |k| match softmax.weights {
            OperandType::Half(_) => recompute(k),
            OperandType::E4m3 => {
                let good = p.below_448(k);
                let holds = self.vote.all(k, good);
                k.if_(!holds, recompute);
            }
        });
    }
}

/// Upper bound of the sum of a lane's probabilities. Below it, no weight exceeds `2^limit` times the weight
/// of the maximum, and none leaves the range of f16 or e4m3.
fn largest_sum(weights: OperandType, rescale: Rescale, limit: u8) -> f32 {
    let power = f32::from(limit) - usual_headroom(weights, rescale);
    match weights {
        OperandType::Half(Half::F16) => power.min(F16_LARGEST_POWER.into()).exp2(),
        OperandType::Half(Half::Bf16) => power.exp2(),
        OperandType::E4m3 => power.exp2().min(E4M3_LARGEST),
    }
}

/// Whether all values are below the limit. NaN is not below it.
fn all_below(k: &mut Builder, values: &[F32], limit: f32) -> Pred {
    let first = k.setp_f(CmpOp::Lt, values[0], limit);
    values[1..].iter().fold(first, |below, &value| {
        let this = k.setp_f(CmpOp::Lt, value, limit);
        k.and_pred(below, this)
    })
}
