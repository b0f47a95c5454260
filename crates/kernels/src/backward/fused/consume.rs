//! The consumers of the main kernel.

use attend::{Masker, Order, QueryNumbers, ScoreGradient, SoftcapSlope};
use problem::Tensor;
use ptx::{Builder, CmpOp, Global, Pointer, R32};
use tile::{
    AccTile, Accumulate, Consumer, OperandTile, PipelineState, Products, RowStore, SharedMatrix, Sign,
    SwizzledTile, WARPGROUP_ROWS, WarpRows, store_fragments_at, warp_vectors,
};

use super::convert::{PART_TILES, place_of_part};
use super::emit::{Main, Visit};
use crate::forward::contract::half;

/// The operands of a warpgroup's products.
struct Operands {
    /// The warpgroup's rows of K and V.
    own_keys: SharedMatrix,
    own_values: SharedMatrix,
    /// The rows of all keys, of the columns of the warpgroup's part of dQ.
    keys: SharedMatrix,
    /// Q and dO of the first stage, over their columns and over their rows.
    queries: [SharedMatrix; 2],
    gradients: [SharedMatrix; 2],
    /// dS of the first slot, for the rows of the warpgroup's part of dQ.
    ds: SharedMatrix,
    /// The warp's rows of dSᵀ in the first slot.
    ds_rows: WarpRows,
}

/// A warpgroup's accumulators.
struct Tiles {
    s: AccTile,
    dp: AccTile,
    dk: AccTile,
    dv: AccTile,
    dq: AccTile,
    /// Pᵀ and dSᵀ.
    p: OperandTile,
    ds: OperandTile,
}

/// A warpgroup's positions in the rings.
struct Positions {
    /// Q of the scores, one visit ahead of `queries` if the scores are.
    scores: PipelineState,
    queries: PipelineState,
    gradients: PipelineState,
    slot: PipelineState,
    /// Whether a stage of Q before the current one is still to be released.
    kept: R32,
}

impl Main<'_> {
    /// A consumer warpgroup, which owns 64 keys. The numbers in the margin are the lines of FlashAttention-2,
    /// Algorithm 2.
    pub(super) fn consume(&self, k: &mut Builder, consumer: &Consumer) {
        let operands = self.operands(k, consumer);
        let (rows, columns) = (self.sizes.rows, self.sizes.columns);
        let [s, dp] = [0; 2].map(|_| AccTile::unset(k, 16, rows));
        let [dk, dv] = [0; 2].map(|_| AccTile::zero(k, 16, columns));
        let p = OperandTile::unset(k, half(self.baked), 16, rows);
        // Where dK and dV take 128 registers, dS is rounded after the last use of P, and dQ takes the
        // registers of dP.
        let (ds, dq) = if self.is_wide() {
            (OperandTile::unset(k, half(self.baked), 16, rows), AccTile::unset(k, 16, 8 * PART_TILES))
        } else {
            (p.clone(), dp.clone())
        };
        let tiles = Tiles { s, dp, dk, dv, dq, p, ds };
        let [queries, keys, values, gradients] = &self.rings;
        let positions = Positions {
            scores: queries.pipeline.consumer_state(k),
            queries: queries.pipeline.consumer_state(k),
            gradients: gradients.pipeline.consumer_state(k),
            slot: self.handover().state(k),
            kept: k.mov(0),
        };
        let mask = Masker::new(k, &self.band, &consumer.threads, &self.keys, 16, rows).of_probabilities();
        let ty = half(self.baked).ty();
        let mut products = Products::new([ty, ty]);

        for ring in [keys, values] {
            let at = ring.pipeline.consumer_state(k);
            ring.pipeline.consumer_wait(k, &at);
        }
        let visit = self.first_visit(k);
        let some = k.setp_u(CmpOp::Lt, visit.head, self.baked.group_size());
        k.if_(some, |k| {
            if self.plan.products == Order::ScoresAhead {
                self.issue_scores(k, &mut products, &operands, &tiles, &positions);
                if !self.is_wide() {
                    k.wgmma_wait(0);
                }
            }
            k.do_while(|k| {
                self.visit(k, (consumer, &mask), &mut products, (&operands, &tiles), (&positions, visit));
                k.setp_u(CmpOp::Lt, visit.head, self.baked.group_size())
            });
            k.wgmma_wait(0);
        });
        for row in 0..tiles.dk.lane_rows() {
            tiles.dk.scale_row(k, row, self.params.scale);
        }
        self.store(k, consumer, &tiles.dk, Tensor::Dk); //                         18
        self.store(k, consumer, &tiles.dv, Tensor::Dv);
    }

    /// One tile of query rows.
    fn visit(
        &self,
        k: &mut Builder,
        (consumer, mask): (&Consumer, &Masker),
        products: &mut Products,
        (operands, tiles): (&Operands, &Tiles),
        (at, visit): (&Positions, Visit),
    ) {
        let Tiles { s, dp, dk, dv, dq, p, ds } = tiles;
        let [_, _, _, gradients] = &self.rings;
        let ahead = self.plan.products == Order::ScoresAhead;
        // Tiles of 128 rows leave no registers for dSᵀ of the visit before beside S and dP.
        let wide = self.is_wide();
        if wide {
            k.wgmma_wait(0);
            self.release_kept(k, consumer, at);
        }
        if !ahead {
            self.issue_scores(k, products, operands, tiles, at);
        }
        gradients.pipeline.consumer_wait(k, &at.gradients);
        products.fence(k);
        let d_out = operands.gradients[0].stage(k, at.gradients.stage);
        products.wgmma_ss(k, operands.own_values, d_out, dp, Accumulate::Set); // 13: dPᵀ = V dOᵀ
        let of_dp = products.commit(k);
        if !ahead {
            k.wgmma_wait(1); // the scores, and dK of the visit before
        }
        let numbers = self.numbers(k, consumer, &at.gradients);
        let partial = self.bound.is_partial(k, visit.tile);
        let origin = k.mul(visit.tile, self.sizes.rows);
        let gradient = self.score_gradient(mask);
        let block = (origin, partial, None);
        let weights = gradient.probabilities(k, s, &numbers[0], block); // 11: P = exp(S − L)
        self.hide_missing_keys(k, consumer, &weights);
        products.wait(k, of_dp); // and dK of the visit before
        let d_out = operands.gradients[1].stage(k, at.gradients.stage);
        let issue_dv = |k: &mut Builder, products: &mut Products| {
            products.fence(k);
            products.wgmma_rs(k, p, d_out, dv, Accumulate::Add); //               12: dV += Pᵀ dO
            products.commit(k)
        };
        if wide {
            gradient.scores(k, s, &weights, dp, &numbers); //                  14: dS = P ∘ (dP − D)
            weights.round_to(k, half(self.baked), p);
            dp.round_to(k, half(self.baked), ds);
        } else {
            self.release_kept(k, consumer, at);
            weights.round_to(k, half(self.baked), p);
            let of_dv = issue_dv(k, products);
            gradient.scores(k, s, &weights, dp, &numbers); //                  14
            products.wait(k, of_dv);
            dp.round_to(k, half(self.baked), ds); // in the registers of Pᵀ
        }
        operands.ds_rows.at_stage(k, &at.slot, self.ds.0.bytes()).write(k, ds);
        self.handover().publish(k, &at.slot, consumer.elected);
        let of_dv = wide.then(|| issue_dv(k, products));
        if ahead {
            self.issue_next_scores(k, products, operands, tiles, (at, visit));
        }
        if let Some(of_dv) = of_dv {
            products.wait(k, of_dv);
        }
        // All lanes have read their numbers: `publish` has synchronised the warp.
        gradients.pipeline.consumer_release(k, &at.gradients, consumer.elected);
        at.gradients.advance(k);
        self.handover().wait(k, &at.slot);
        products.fence(k);
        let all_ds = operands.ds.stage(k, at.slot.stage);
        products.wgmma_ss(k, all_ds, operands.keys, dq, Accumulate::Set); //      15: dQ = dS K
        let of_dq = products.commit(k);
        let q = operands.queries[1].stage(k, at.queries.stage);
        products.wgmma_rs(k, ds, q, dk, Accumulate::Add); //                      16: dK += dSᵀ Q
        products.commit(k);
        at.slot.advance(k);
        at.queries.advance(k);
        k.mov_to(at.kept, 1);
        products.wait(k, of_dq);
        let place = self.place(k, visit);
        self.add_to_sums(k, consumer, dq, place);
        self.advance(k, visit);
    }

    pub(super) fn score_gradient<'b>(&'b self, mask: &'b Masker) -> ScoreGradient<'b> {
        ScoreGradient {
            softcap: self.params.softcap.as_ref(),
            inverse_cap: self.params.inverse_cap,
            slope: SoftcapSlope::OfProbability,
            programs: None,
            mask,
            factor: self.params.factor,
        }
    }

    /// Whether a warpgroup has 128 query rows of a tile: its accumulators of S and dP have 64 registers each.
    fn is_wide(&self) -> bool {
        self.sizes.rows > WARPGROUP_ROWS
    }

    fn operands(&self, k: &mut Builder, consumer: &Consumer) -> Operands {
        let [queries, keys, values, gradients] = &self.rings;
        let group = consumer.group;
        let own = |k: &mut Builder, tile: SwizzledTile, first| {
            SharedMatrix::over_columns(k, tile, first).row_part(k, group, WARPGROUP_ROWS)
        };
        let [own_keys, own_values] = [keys, values].map(|ring| own(k, ring.tile, ring.first));
        let [queries, gradients] = [queries, gradients].map(|ring| {
            [SharedMatrix::over_columns, SharedMatrix::over_rows].map(|of| of(k, ring.tile, ring.first))
        });
        let (tile, first) = self.ds;
        let all_keys = SharedMatrix::over_rows(k, keys.tile, keys.first);
        let all_ds = SharedMatrix::over_rows(k, tile, first);
        // The warpgroups divide the rows of dQ, or its columns if the tile has 64 rows.
        let (keys, ds) = if self.sizes.rows > WARPGROUP_ROWS {
            (all_keys, all_ds.column_part(k, group, WARPGROUP_ROWS))
        } else {
            (all_keys.column_part(k, group, 8 * PART_TILES), all_ds)
        };
        let rows = k.shared_index(first, consumer.threads.row_warp, WarpRows::ROWS * SwizzledTile::ROW_BYTES);
        let ds_rows = WarpRows::new(k, tile, rows, &consumer.threads);
        Operands { own_keys, own_values, keys, queries, gradients, ds, ds_rows }
    }

    /// Issues the scores of a visit, once its Q has arrived.
    fn issue_scores(
        &self,
        k: &mut Builder,
        products: &mut Products,
        operands: &Operands,
        tiles: &Tiles,
        at: &Positions,
    ) {
        let [queries, ..] = &self.rings;
        queries.pipeline.consumer_wait(k, &at.scores);
        let q = operands.queries[0].stage(k, at.scores.stage);
        at.scores.advance(k);
        products.fence(k);
        let scores =
            if self.baked.sign == Sign::Negate { products.clone().negating() } else { products.clone() };
        scores.wgmma_ss(k, operands.own_keys, q, &tiles.s, Accumulate::Set); //   10: Sᵀ = K Qᵀ
        products.commit(k);
    }

    /// Issues the scores of the next visit. At the last visit, computes its scores once more, so that the
    /// loop has no branch around products.
    fn issue_next_scores(
        &self,
        k: &mut Builder,
        products: &mut Products,
        operands: &Operands,
        tiles: &Tiles,
        (at, visit): (&Positions, Visit),
    ) {
        let next = k.add(visit.tile, 1);
        let ended = k.setp_s(CmpOp::Ge, next, self.bound.end);
        let last = self.baked.group_size() - 1;
        let ended = k.setp_u_and(CmpOp::Eq, visit.head, last, ended);
        k.guarded(ended, |k| {
            k.mov_to(at.scores.stage, at.queries.stage);
            k.mov_to(at.scores.parity, at.queries.parity);
        });
        self.issue_scores(k, products, operands, tiles, at);
    }

    /// −L·log2 e and −D of the lane's columns.
    pub(super) fn numbers(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        at: &PipelineState,
    ) -> [QueryNumbers; 2] {
        let stage = at.place(k, self.numbers, self.sizes.number_bytes());
        let own = k.shared_index(stage, consumer.threads.column, 4);
        [0, 4 * self.sizes.rows].map(|offset| QueryNumbers::Columns(own.at(offset.into())))
    }

    /// Sets the probabilities of keys beyond the last to 0: they would reach dQ.
    pub(super) fn hide_missing_keys(&self, k: &mut Builder, consumer: &Consumer, p: &AccTile) {
        let left = k.sub(self.keys.seq_q, self.keys.first);
        let ragged = k.setp_s(CmpOp::Lt, left, self.sizes.keys());
        k.if_(ragged, |k| {
            let before = k.mad(consumer.threads.row_warp, WarpRows::ROWS, consumer.threads.quad);
            let left = k.sub(left, before);
            for row in 0..p.lane_rows() {
                let exists = k.setp_s(CmpOp::Gt, left, 8 * row);
                for element in p.row(row) {
                    k.selp_to(element, element, 0.0, exists);
                }
            }
        });
    }

    /// Releases the stage of Q of the visit before, if there was one.
    fn release_kept(&self, k: &mut Builder, consumer: &Consumer, at: &Positions) {
        let [queries, ..] = &self.rings;
        let before = at.queries.previous(k);
        let releases = k.setp_u_and(CmpOp::Ne, at.kept, 0, consumer.elected);
        queries.pipeline.consumer_release(k, &before, releases);
    }

    /// Adds the warp's part of dQ to the sums of a tile.
    fn add_to_sums(&self, k: &mut Builder, consumer: &Consumer, dq: &AccTile, place: [R32; 3]) {
        let sums = self.params.row_tiles.sums(k, place);
        let own = place_of_part(k, sums, consumer.threads.row_warp, consumer.threads.lane);
        add_part(k, own, dq);
    }

    /// Stores dK or dV of the warp's keys.
    pub(super) fn store(&self, k: &mut Builder, consumer: &Consumer, tile: &AccTile, gradient: Tensor) {
        let [batch, head, _] = self.at;
        let first = k.mad(consumer.threads.row_warp, WarpRows::ROWS, self.keys.first);
        let ([of_dk, of_dv], dims) = (self.params.gradients, self.baked.dims);
        let (to, width) = match gradient {
            Tensor::Dk => (of_dk, dims.head_dim),
            _ => (of_dv, dims.head_dim_v),
        };
        let place = |k: &mut Builder, row: R32| {
            let row = self.sequence.map_or(row, |sequence| sequence.kv.row(k, row));
            to.row(k, self.baked, [batch, head, row])
        };
        let (width, limits) = (width as u32, (first, self.keys.seq_q));
        let width = (width < self.sizes.columns).then(|| k.mov(width));
        let (half, store) = (Some(half(self.baked)), RowStore::Chunks);
        store_fragments_at(k, &consumer.threads, half, tile, limits, place, store, width);
    }
}

/// Adds the lane's registers of a part of dQ to the sums at `to`.
pub(super) fn add_part(k: &mut Builder, to: Global, dq: &AccTile) {
    for (n, &tile) in (0..).zip(dq.tiles()) {
        k.red_add_vec4(to.at(warp_vectors(n)), tile);
    }
}
