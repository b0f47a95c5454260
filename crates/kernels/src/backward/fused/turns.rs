//! The loop over query rows for head dims from 65 to 128: the warpgroups take the tensor cores in turn.
//!
//! In its turn a warpgroup issues dQ of the tile before, dV and dK, then S and dP of the next tile. Meanwhile
//! the other warpgroup computes P and dS. dQ needs the dS of both warpgroups: that of the tile before is
//! there when the turn begins, that of the tile itself would have to be awaited. Bulk reductions add dQ to
//! the sums. A part is copied to shared memory while dV and dK are computed, and sent with dS of the next
//! tile: one fence serves both.

use attend::Masker;
use problem::Tensor;
use ptx::{Builder, R64};
use tile::{Accumulate, Group, PingPong, PipelineState, Products, TileCursor};

use super::consume::{Warpgroup, WarpgroupTiles};
use super::plan::ROLES;
use super::tiles::{KeyTile, Visit};
use crate::forward::contract::half;

/// A warpgroup's positions in the rings, and the sums that its parts of dQ belong to.
struct Positions {
    /// Q of S and dO of dP, one visit ahead of `queries` and `gradients`.
    ahead: [PipelineState; 2],
    queries: PipelineState,
    gradients: PipelineState,
    slot: PipelineState,
    /// The slot of the visit before.
    slot_before: PipelineState,
    /// The sums of dQ of the visit before, and those of the part that waits in shared memory: 0 for none.
    sums: [R64; 2],
}

impl Warpgroup<'_> {
    /// Computes the CTA's tiles of keys. The last part of dQ may still be on its way.
    pub fn compute_in_turns(&self, k: &mut Builder, cursor: &TileCursor<'_>) {
        let main = self.main;
        let [queries, _, _, gradients] = main.rings.each_ref().map(|ring| ring.pipeline);
        let at = Positions {
            ahead: [queries, gradients].map(|ring| ring.consumer_state(k)),
            queries: queries.consumer_state(k),
            gradients: gradients.consumer_state(k),
            slot: main.handover().state(k),
            slot_before: main.handover().state(k),
            sums: [k.mov(0), k.mov(0)],
        };
        let stationary = self.stationary(k);
        let turns = PingPong::new(k, self.consumer, ROLES.consumers);
        let mut products = main.products();
        self.for_each_tile(k, cursor, |k, tile| {
            let mask = self.mask(k, tile);
            tile.if_visited(k, |k, visit| {
                self.await_stationary(k, &stationary);
                for sums in at.sums {
                    k.mov_to(sums, 0);
                }
                products.fence(k);
                self.issue_scores_ahead(k, &mut products, &at);
                self.issue_dp_ahead(k, &mut products, &at);
                // The first turn computes dQ of a dS of zeros, so that the loop has no branch around
                // products.
                self.tiles.ds.clear_from(k, 0);
                self.publish(k, &at.slot);
                at.slot.advance(k);
                k.do_while(|k| {
                    self.differentiate(k, (tile, &mask), (&at, visit));
                    self.take_turn(k, &turns, &mut products, (tile, &at, visit));
                    self.end_visit(k, tile, (&at, visit));
                    tile.is_visit(k, visit)
                });
                k.wgmma_wait(0);
                for (number, at) in [(0, at.queries), (3, at.gradients)] {
                    let last = at.previous(k);
                    main.rings[number].pipeline.consumer_release(k, &last, self.consumer.elected);
                }
                self.release(k, &stationary, Tensor::V);
                self.issue_dq(k, &mut products, &at);
                self.order_part(k);
                self.send_part(k, at.sums[1]);
                k.wgmma_wait(0);
                self.release(k, &stationary, Tensor::K);
                self.stage_part(k);
                self.order_part(k);
                self.send_part(k, at.sums[0]);
            });
        });
    }

    /// P and dS of a visit, whose S and dP have been issued. Passes dS on.
    fn differentiate(
        &self,
        k: &mut Builder,
        (tile, mask): (&KeyTile<'_>, &Masker),
        (at, visit): (&Positions, Visit),
    ) {
        let (main, consumer) = (self.main, self.consumer);
        let WarpgroupTiles { s, dp, p, ds, .. } = &self.tiles;
        let half = half(main.baked);
        k.wgmma_wait(0); // the scores and dP
        let numbers = main.numbers(k, consumer, &at.gradients);
        let gradient = main.score_gradient(mask);
        let weights = tile.probabilities(k, consumer, &gradient, s, &numbers[0], visit);
        gradient.scores(k, s, &weights, dp, &numbers); //                      14: dS = P ∘ (dP − D)
        dp.round_to(k, half, ds);
        self.publish(k, &at.slot);
        self.send_part(k, at.sums[1]); // `publish` has ordered the part.
        weights.round_to(k, half, p);
    }

    /// A turn: dQ of the visit before, dV and dK, and S and dP of the next visit. At the last visit, computes
    /// its S and dP once more, so that the loop has no branch around products; its Q and dO are kept for
    /// that.
    fn take_turn(
        &self,
        k: &mut Builder,
        turns: &PingPong,
        products: &mut Products,
        (tile, at, visit): (&KeyTile<'_>, &Positions, Visit),
    ) {
        let (main, operands) = (self.main, &self.operands);
        let WarpgroupTiles { dk, dv, p, ds, .. } = &self.tiles;
        turns.wait(k);
        products.fence(k);
        let of_dq = self.issue_dq(k, products, at);
        let d_out = operands.gradients[1].stage(k, at.gradients.stage);
        products.wgmma_rs(k, p, d_out, dv, Accumulate::Add); //                   12: dV += Pᵀ dO
        let q = operands.queries[1].stage(k, at.queries.stage);
        products.wgmma_rs(k, ds, q, dk, Accumulate::Add); //                      16: dK += dSᵀ Q
        products.commit(k);
        products.wait(k, of_dq);
        self.stage_part(k);
        k.wgmma_wait(0);
        let followed = tile.is_followed(k, visit);
        let releases = k.and_pred(followed, self.consumer.elected);
        let ended = k.not_pred(followed);
        // All lanes have read their numbers: `publish` has synchronised the warp.
        let [queries, _, _, gradients] = &main.rings;
        for ((ring, at), ahead) in
            [(queries, at.queries), (gradients, at.gradients)].into_iter().zip(&at.ahead)
        {
            ring.pipeline.consumer_release(k, &at, releases);
            k.guarded(ended, |k| ahead.move_to(k, at));
        }
        products.fence(k);
        self.issue_scores_ahead(k, products, at);
        self.issue_dp_ahead(k, products, at);
        turns.arrive(k);
    }

    /// Moves to the next visit.
    fn end_visit(&self, k: &mut Builder, tile: &KeyTile<'_>, (at, visit): (&Positions, Visit)) {
        for at in [at.slot, at.queries, at.gradients] {
            at.advance(k);
        }
        k.mov_to(at.sums[1], at.sums[0]);
        if self.outbox.is_none() {
            let place = tile.place(k, visit);
            let sums = self.main.params.row_tiles.sums(k, place);
            k.mov_to(at.sums[0], sums.base);
        }
        tile.advance(k, visit);
    }

    /// Issues S of the visit ahead, once its Q has arrived. It joins the group of dP.
    fn issue_scores_ahead(&self, k: &mut Builder, products: &mut Products, at: &Positions) {
        let [queries, ..] = &self.main.rings;
        let [at, _] = &at.ahead;
        queries.pipeline.consumer_wait(k, at);
        let q = self.operands.queries[0].stage(k, at.stage);
        at.advance(k);
        self.issue_scores(k, products, q);
    }

    /// Issues dP of the visit ahead, once its dO has arrived.
    fn issue_dp_ahead(&self, k: &mut Builder, products: &mut Products, at: &Positions) {
        let [.., gradients] = &self.main.rings;
        let [_, at] = &at.ahead;
        gradients.pipeline.consumer_wait(k, at);
        let d_out = self.operands.gradients[0].stage(k, at.stage);
        at.advance(k);
        let values = self.operands.own_values;
        products.wgmma_ss(k, values, d_out, &self.tiles.dp, Accumulate::Set); //  13: dPᵀ = V dOᵀ
        products.commit(k);
    }

    /// Issues dQ of the visit before.
    fn issue_dq(&self, k: &mut Builder, products: &mut Products, at: &Positions) -> Group {
        let all_ds = self.all_ds(k, &at.slot_before);
        at.slot_before.advance(k);
        products.wgmma_ss(k, all_ds, self.operands.keys, &self.tiles.dq, Accumulate::Set); // 15: dQ = dS K
        products.commit(k)
    }
}
