//! The steps of a visit to a KV block, and what they need of the CTA's rows.

use attend::{
    Block, BlockScores, DropoutMask, Masker, OnlineSoftmax, OutputSums, ScoreChain, ScoreFactors,
    ScorePrograms, Softcap, ValueFactors,
};
use ptx::{Builder, F32, Half, R32};
use tile::{
    AccTile, MmaType, OperandA, OperandType, PairSum, Threads, mma_ab, mma_ab_apart, mma_ab_scaled, mma_abt,
};

use super::place::Forward;
use crate::forward::fp8::weights;

/// The mask, the factors and the softmax of a warp's rows.
pub(super) struct RowState {
    pub mask: Masker,
    /// The factor of the scores in the exponent.
    pub factor: F32,
    pub softcap: Option<Softcap>,
    pub programs: Option<ScorePrograms>,
    pub softmax: OnlineSoftmax,
    pub scores: Option<ScoreFactors>,
    pub values: Option<ValueFactors>,
}

/// The operands of the steps.
pub(super) struct BlockSteps<'a> {
    pub forward: &'a Forward<'a>,
    pub q: &'a OperandA,
    pub o: &'a AccTile,
    pub state: &'a RowState,
    pub chain: ScoreChain<'a>,
    /// The sum of both halves of the head dim, if two warps divide it.
    pub sum: Option<PairSum>,
    /// Dropout, with the index of the CTA's head among all.
    pub dropout: Option<(DropoutMask, R32)>,
}

impl Forward<'_> {
    /// The state before the first block.
    pub(super) fn row_state(&self, k: &mut Builder) -> RowState {
        let (plan, threads) = (self.plan, &self.key_threads());
        let mask = Masker::new(k, &self.params.band, threads, &self.rows, plan.warp_rows(), plan.warp_keys());
        let (factor, softcap, programs) = self.score_factors(k);
        let softmax =
            OnlineSoftmax::new(k, self.weights(), plan.rescale, factor, plan.warp_rows(), programs.as_ref())
                .of_wide(self.baked.wide);
        let (scores, values) = (self.block_factors(k), self.value_factors(k));
        let softmax = match &scores {
            None => softmax,
            Some(factors) => factors.in_softmax(softmax),
        };
        RowState { mask, factor, softcap, programs, softmax, scores, values }
    }

    /// The dropout of the warp's rows, with the index of the CTA's head among all.
    pub(super) fn dropout(&self, k: &mut Builder) -> Option<(DropoutMask, R32)> {
        let params = self.params.dropout?;
        let (size, threads) = ((self.plan.warp_rows(), self.plan.warp_keys()), &self.key_threads());
        let [head, batch] = self.head_and_batch(k);
        let head = k.mad(batch, self.baked.heads_q as u32, head);
        Some((DropoutMask::new(k, params, threads, &self.rows, size, false), head))
    }

    /// The type of P; for f32, the 16-bit type with the same range.
    fn weights(&self) -> OperandType {
        match self.types {
            [_, MmaType::F32 | MmaType::Tf32] => Half::Bf16.into(),
            _ => weights(self.baked),
        }
    }

    /// The thread's position among the warps that divide the keys of a block.
    pub(super) fn key_threads(&self) -> Threads {
        if self.plan.dim_warps == 1 { self.threads } else { self.threads.of_all_columns() }
    }
}

impl BlockSteps<'_> {
    /// Line 8: S of a block.
    pub(super) fn scores(&self, k: &mut Builder, block: &Block) -> AccTile {
        let key = block.key(k);
        let of_keys = self.state.scores.as_ref().map(|factors| {
            let keys = self.forward.own_keys_of(k, block);
            factors.load(k, &keys)
        });
        let s = mma_abt(k, self.q, &key); //                     S = Q Kᵀ
        if let Some(sum) = &self.sum {
            sum.add(k, &s); //                                   of both halves of the head dim
        }
        let of_keys = of_keys.unwrap_or_default();
        let block_scores = BlockScores {
            hides: block.hides,
            descale: (&of_keys, false),
            ..BlockScores::in_place(block.coverage)
        };
        self.chain.apply(k, &s, &block_scores, |_| block.origin); // S = score(S·f), −∞ where hidden
        s
    }

    /// Line 9, and the factor of O in line 10: the softmax takes the scores of a block.
    pub(super) fn update(&self, k: &mut Builder, s: &AccTile) {
        if let Some(factors) = &self.state.scores {
            factors.enter(k);
        }
        self.state.softmax.update(k, s, self.o); //              m = max(m, S·c); O, l rescaled
    }

    /// P of line 9, and line 10: adds P V of a block to O.
    pub(super) fn accumulate(&self, k: &mut Builder, s: &AccTile, block: &Block) {
        let (o, softmax, [_, ty]) = (self.o, &self.state.softmax, self.forward.types);
        let of_values = self.state.values.map(|values| {
            let keys = self.forward.own_keys_of(k, block);
            (values, values.load(k, &keys), keys)
        });
        softmax.exponentiate_all(k, s); //                       P = exp2(S·c − m); l += Σ P
        if let Some((dropout, head)) = &self.dropout {
            dropout.drop(k, s, (block.origin, *head)); //        P = 0 where dropped
        }
        let p = match ty {
            MmaType::Half(_) | MmaType::Fp8(_) => softmax.rounded(k, s),
            MmaType::F32 | MmaType::Tf32 => s.words(k),
        };
        let value = block.value(k);
        match (ty, self.forward.plan.output_sums, of_values) {
            (MmaType::Fp8(types), _, Some((values, factor, keys))) => {
                let factors: Vec<F32> = (0..o.lane_rows()).map(|_| k.reg()).collect();
                values.set(k, &factors, factor, &keys, Some(&self.state.mask));
                mma_ab_scaled(k, types, &p, &value, o, &factors); // O += f·P V
            }
            (MmaType::Fp8(types), OutputSums::ByBlock, None) => mma_ab_apart(k, types, &p, &value, o),
            _ => mma_ab(k, ty, &p, &value, o), //                O += P V
        }
    }
}
