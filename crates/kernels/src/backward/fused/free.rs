//! The loop over query rows for head dims up to 64: each warpgroup issues its products as soon as it can.

use attend::{Masker, Order};
use problem::Tensor;
use ptx::{Builder, CmpOp, R32};
use tile::{Accumulate, PipelineState, Products, SharedMatrix, TileCursor};

use super::consume::{Warpgroup, WarpgroupTiles};
use super::convert::{add_part, place_of_part};
use super::tiles::{KeyTile, Visit};
use crate::forward::contract::half;

/// A warpgroup's positions in the rings.
struct Positions {
    /// Q of the scores, one visit ahead of `queries` if the scores are.
    scores: PipelineState,
    queries: PipelineState,
    gradients: PipelineState,
    slot: PipelineState,
    /// K and V.
    stationary: [PipelineState; 2],
    /// Whether a stage of Q before the current one is still to be released.
    kept: R32,
}

impl Warpgroup<'_> {
    /// Computes the CTA's tiles of keys.
    pub fn compute_freely(&self, k: &mut Builder, cursor: &TileCursor<'_>) {
        let main = self.main;
        let [queries, _, _, gradients] = &main.rings;
        let at = Positions {
            scores: queries.pipeline.consumer_state(k),
            queries: queries.pipeline.consumer_state(k),
            gradients: gradients.pipeline.consumer_state(k),
            slot: main.handover().state(k),
            stationary: self.stationary(k),
            kept: k.mov(0),
        };
        let mut products = main.products();
        self.for_each_tile(k, cursor, |k, tile| {
            let mask = self.mask(k, tile);
            tile.if_visited(k, |k, visit| {
                self.await_stationary(k, &at.stationary);
                if self.scores_are_ahead() {
                    products.fence(k);
                    self.issue_awaited_scores(k, &mut products, &at);
                }
                k.do_while(|k| {
                    self.visit(k, (tile, &mask), &mut products, (&at, visit));
                    tile.is_visit(k, visit)
                });
                k.wgmma_wait(0);
                for tensor in [Tensor::V, Tensor::K] {
                    self.release(k, &at.stationary, tensor);
                }
                self.release_kept(k, &at);
                k.mov_to(at.kept, 0);
            });
        });
    }

    fn scores_are_ahead(&self) -> bool {
        self.main.plan.products == Order::ScoresAhead
    }

    /// One tile of query rows.
    fn visit(
        &self,
        k: &mut Builder,
        (tile, mask): (&KeyTile<'_>, &Masker),
        products: &mut Products,
        (at, visit): (&Positions, Visit),
    ) {
        let (main, consumer, operands) = (self.main, self.consumer, &self.operands);
        let WarpgroupTiles { s, dp, dk, dv, dq, p, ds } = &self.tiles;
        let [_, _, _, gradients] = &main.rings;
        let half = half(main.baked);
        // No registers are left for dSᵀ of the visit before beside S and dP.
        k.wgmma_wait(0);
        self.release_kept(k, at);
        if !self.scores_are_ahead() {
            products.fence(k);
            self.issue_awaited_scores(k, products, at);
        }
        gradients.pipeline.consumer_wait(k, &at.gradients);
        let d_out = operands.gradients[0].stage(k, at.gradients.stage);
        let [keys_at, values_at] = &at.stationary;
        let values = staged(k, operands.own_values, values_at);
        products.wgmma_ss(k, values, d_out, dp, Accumulate::Set); //              13: dPᵀ = V dOᵀ
        let of_dp = products.commit(k);
        if !self.scores_are_ahead() {
            k.wgmma_wait(1); // the scores
        }
        let numbers = main.numbers(k, consumer, &at.gradients);
        let gradient = main.score_gradient(mask);
        let weights = tile.probabilities(k, consumer, &gradient, s, &numbers[0], visit);
        products.wait(k, of_dp);
        let d_out = operands.gradients[1].stage(k, at.gradients.stage);
        gradient.scores(k, s, &weights, dp, &numbers); //                      14: dS = P ∘ (dP − D)
        weights.round_to(k, half, p);
        dp.round_to(k, half, ds);
        self.publish(k, &at.slot);
        products.fence(k); // One fence serves all products until S and dP are modified again.
        products.wgmma_rs(k, p, d_out, dv, Accumulate::Add); //                   12: dV += Pᵀ dO
        let of_dv = products.commit(k);
        if self.scores_are_ahead() {
            self.issue_next_scores(k, products, tile, (at, visit));
        }
        products.wait(k, of_dv);
        // All lanes have read their numbers: `publish` has synchronised the warp.
        gradients.pipeline.consumer_release(k, &at.gradients, consumer.elected);
        at.gradients.advance(k);
        let all_ds = self.all_ds(k, &at.slot);
        let keys = staged(k, operands.keys, keys_at);
        products.wgmma_ss(k, all_ds, keys, dq, Accumulate::Set); //               15: dQ = dS K
        let of_dq = products.commit(k);
        let q = operands.queries[1].stage(k, at.queries.stage);
        products.wgmma_rs(k, ds, q, dk, Accumulate::Add); //                      16: dK += dSᵀ Q
        products.commit(k);
        at.slot.advance(k);
        at.queries.advance(k);
        k.mov_to(at.kept, 1);
        products.wait(k, of_dq);
        match &self.outbox {
            None => {
                let place = tile.place(k, visit);
                let sums = main.params.row_tiles.sums(k, place);
                let own = place_of_part(k, sums, consumer.threads.row_warp, consumer.threads.lane);
                add_part(k, own, dq);
            }
            Some(outbox) => {
                self.stage_part(k);
                outbox.relay.publish_operand(k, &outbox.at, consumer.elected);
            }
        }
        tile.advance(k, visit);
    }

    /// Issues the scores of a visit, once its Q has arrived.
    fn issue_awaited_scores(&self, k: &mut Builder, products: &mut Products, at: &Positions) {
        let [queries, ..] = &self.main.rings;
        queries.pipeline.consumer_wait(k, &at.scores);
        let q = self.operands.queries[0].stage(k, at.scores.stage);
        at.scores.advance(k);
        let [keys_at, _] = &at.stationary;
        let keys = staged(k, self.operands.own_keys, keys_at);
        self.main.issue_scores(k, products, [keys, q], &self.tiles.s);
        products.commit(k);
    }

    /// Issues the scores of the next visit. At the last visit, computes its scores once more, so that the
    /// loop has no branch around products.
    fn issue_next_scores(
        &self,
        k: &mut Builder,
        products: &mut Products,
        tile: &KeyTile<'_>,
        (at, visit): (&Positions, Visit),
    ) {
        let followed = tile.is_followed(k, visit);
        let ended = k.not_pred(followed);
        k.guarded(ended, |k| at.scores.move_to(k, at.queries));
        self.issue_awaited_scores(k, products, at);
    }

    /// Releases the stage of Q of the visit before, if there was one.
    fn release_kept(&self, k: &mut Builder, at: &Positions) {
        let [queries, ..] = &self.main.rings;
        let before = at.queries.previous(k);
        let releases = k.setp_u_and(CmpOp::Ne, at.kept, 0, self.consumer.elected);
        queries.pipeline.consumer_release(k, &before, releases);
    }
}

/// The matrix at a position of its ring.
fn staged(k: &mut Builder, first: SharedMatrix, at: &PipelineState) -> SharedMatrix {
    if at.stages() == 1 { first } else { first.stage(k, at.stage) }
}
