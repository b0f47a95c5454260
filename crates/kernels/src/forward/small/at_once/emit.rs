//! Emits the kernel that holds all keys of a warpgroup at once.

use attend::{Masker, OnlineSoftmax, Rescale, ScoreChain};
use ptx::Builder;
use tile::AccTile;

use super::block::Block;
use super::loads::Loads;
use super::{AtOncePlan, Merge, Scores};
use crate::forward::small::emit::{Forward, WARP_ROWS};

impl Forward<'_, AtOncePlan> {
    /// Attention over the only KV block of the warpgroup. There is no loop, and all loads are in flight at
    /// once.
    pub(super) fn at_once(&self, k: &mut Builder) -> (OnlineSoftmax, AccTile) {
        let plan = self.plan;
        let source = self.source(k);
        let loads = Loads::new(k, plan, self.baked, self.map, self.place, self.threads.lane, self.shared);
        loads.request(k, &source, self.exchange.as_ref());
        let block = Block::new(k, plan, self.baked, &self.map, self.products(), &self.place, &loads);
        let mask = Masker::new(k, &self.params.band, &self.threads, &self.rows, WARP_ROWS, plan.block_n);
        let softmax = self.softmax(k, Rescale::Always);
        let programs = self.row_programs(k);
        let softcap = self.params.softcap.as_ref();
        let chain = ScoreChain { descale: None, softcap, programs: programs.as_ref(), mask: Some(&mask) };
        self.paths(k, |k, seen| {
            let mut block = block.seen(seen);
            self.attend(k, &mut block, &chain, &softmax);
            softmax.gather_sums(k);
            if plan.merge == Merge::PeerFirst {
                self.send_to_peer(k, &softmax, &block);
            }
            block.finish(k);
        });
        match plan.merge {
            Merge::Shares => self.join(k, softmax, block.own_share()),
            Merge::PeerFirst => {
                let own = block.own_share();
                let sinks = self.sinks(k);
                (self.exchange().receive(k, softmax, &own, sinks.as_ref()), own)
            }
        }
    }

    /// Softmax and P V of the scores that the rows of a path see.
    fn attend(&self, k: &mut Builder, block: &mut Block, chain: &ScoreChain<'_>, softmax: &OnlineSoftmax) {
        let steps = block.steps();
        let ahead = if self.plan.scores == Scores::AllAtOnce { steps } else { steps.min(1) };
        (0..ahead).for_each(|step| block.issue_scores(k, step)); //       S = Q Kᵀ
        for step in 0..steps {
            let maxima = block.maxima(k, chain, step);
            let alpha = if step == 0 {
                softmax.set_row_max(k, &maxima); //                             m = max(S·c)
                None
            } else {
                Some(softmax.raise_to(k, &maxima)) //                m = max(m, S·c); l rescaled
            };
            if step + 1 >= ahead && step + 1 < steps {
                block.issue_scores(k, step + 1);
            }
            for piece in block.pv_pieces_of(step) {
                let s = block.scores_of(piece);
                let p = softmax.probabilities(k, &s); //                  P = exp2(S·c − m); l += Σ P
                if let (Some(alpha), true) = (&alpha, piece == block.pv_pieces_of(step).start) {
                    block.rescale(k, alpha); //                           O rescaled
                }
                block.issue_output(k, &p, piece); //                      O += P V
            }
        }
    }

    /// With two CTAs, sends the peer's columns before this CTA's own columns are complete.
    fn send_to_peer(&self, k: &mut Builder, softmax: &OnlineSoftmax, block: &Block) {
        let theirs = block.peers_share(k);
        self.wait_for_cluster(k);
        self.exchange().send_to_peer(k, softmax, theirs);
    }
}
