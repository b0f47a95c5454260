//! The loop over query rows for head dims from 65 to 128: the warpgroups take the tensor cores in turn.
//!
//! A warpgroup issues dV, dK, S of the next tile, dQ and dP of the next tile one behind the other. Meanwhile
//! the other warpgroup computes P and dS. Bulk reductions add dQ to the sums, so that no warp waits until it
//! has issued its additions.

use attend::Masker;
use ptx::Builder;
use tile::{Accumulate, PingPong, PipelineState, Products};

use super::consume::{Warpgroup, WarpgroupTiles};
use super::emit::Visit;
use super::plan::ROLES;
use crate::forward::contract::half;

/// A warpgroup's positions in the rings.
struct Positions {
    /// Q of S and dO of dP, one visit ahead of `queries` and `gradients`.
    ahead: [PipelineState; 2],
    queries: PipelineState,
    gradients: PipelineState,
    slot: PipelineState,
}

impl Warpgroup<'_> {
    /// Runs the visits. The last part of dQ may still be on its way.
    pub fn visit_in_turns(&self, k: &mut Builder) {
        let main = self.main;
        let [queries, _, _, gradients] = main.rings.each_ref().map(|ring| ring.pipeline);
        let at = Positions {
            ahead: [queries, gradients].map(|ring| ring.consumer_state(k)),
            queries: queries.consumer_state(k),
            gradients: gradients.consumer_state(k),
            slot: main.handover().state(k),
        };
        let turns = PingPong::new(k, self.consumer, ROLES.consumers);
        let (mask, mut products) = self.begin(k);
        main.if_visited(k, |k, visit| {
            products.fence(k);
            self.issue_ahead(k, &mut products, &at);
            self.issue_dp(k, &mut products, &at);
            k.do_while(|k| {
                self.visit_in_turn(k, (&mask, &turns), &mut products, (&at, visit));
                main.is_visit(k, visit)
            });
            k.wgmma_wait(0);
        });
    }

    /// One tile of query rows.
    fn visit_in_turn(
        &self,
        k: &mut Builder,
        (mask, turns): (&Masker, &PingPong),
        products: &mut Products,
        (at, visit): (&Positions, Visit),
    ) {
        let (main, consumer, operands) = (self.main, self.consumer, &self.operands);
        let WarpgroupTiles { s, dp, dk, dv, dq, p, ds } = &self.tiles;
        let half = half(main.baked);
        k.wgmma_wait(1); // the scores
        let numbers = main.numbers(k, consumer, &at.gradients);
        let gradient = main.score_gradient(mask);
        let weights = main.probabilities(k, consumer, &gradient, s, &numbers[0], visit);
        k.wgmma_wait(0); // dP
        gradient.scores(k, s, &weights, dp, &numbers); //                      14: dS = P ∘ (dP − D)
        dp.round_to(k, half, ds);
        self.publish(k, &at.slot);
        weights.round_to(k, half, p);

        turns.wait(k);
        products.fence(k);
        let d_out = operands.gradients[1].stage(k, at.gradients.stage);
        products.wgmma_rs(k, p, d_out, dv, Accumulate::Add); //                   12: dV += Pᵀ dO
        let q = operands.queries[1].stage(k, at.queries.stage);
        products.wgmma_rs(k, ds, q, dk, Accumulate::Add); //                      16: dK += dSᵀ Q
        let of_dk = products.commit(k);
        // After the last visit, its S and dP are computed once more, so that the loop has no branch around
        // products.
        let ended = main.is_last(k, visit);
        k.guarded(ended, |k| {
            for (ahead, current) in at.ahead.iter().zip([at.queries, at.gradients]) {
                ahead.move_to(k, current);
            }
        });
        self.issue_ahead(k, products, at);
        products.wait(k, of_dk);
        // All lanes have read their numbers: `publish` has synchronised the warp.
        let [queries, _, _, gradients] = &main.rings;
        for (ring, at) in [(queries, at.queries), (gradients, at.gradients)] {
            ring.pipeline.consumer_release(k, &at, consumer.elected);
        }
        let all_ds = self.all_ds(k, &at.slot);
        products.wgmma_ss(k, all_ds, operands.keys, dq, Accumulate::Set); //      15: dQ = dS K
        products.commit(k);
        turns.arrive(k);
        for at in [at.slot, at.queries, at.gradients] {
            at.advance(k);
        }
        k.wgmma_wait(0);
        let sums = self.sums(k, visit);
        self.stage_part(k);
        products.fence(k);
        self.issue_dp(k, products, at);
        self.send_part(k, sums);
        main.advance(k, visit);
    }

    /// Issues S of the visit ahead, once its Q has arrived.
    fn issue_ahead(&self, k: &mut Builder, products: &mut Products, at: &Positions) {
        let [queries, ..] = &self.main.rings;
        let [at, _] = &at.ahead;
        queries.pipeline.consumer_wait(k, at);
        let q = self.operands.queries[0].stage(k, at.stage);
        at.advance(k);
        self.issue_scores(k, products, q);
        products.commit(k);
    }

    /// Issues dP of the visit ahead, once its dO has arrived.
    fn issue_dp(&self, k: &mut Builder, products: &mut Products, at: &Positions) {
        let [.., gradients] = &self.main.rings;
        let [_, at] = &at.ahead;
        gradients.pipeline.consumer_wait(k, at);
        let d_out = self.operands.gradients[0].stage(k, at.stage);
        at.advance(k);
        let values = self.operands.own_values;
        products.wgmma_ss(k, values, d_out, &self.tiles.dp, Accumulate::Set); //  13: dPᵀ = V dOᵀ
        products.commit(k);
    }
}
