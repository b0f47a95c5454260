//! The consumers of the main kernel for head dims up to 128: two warpgroups that divide the keys. Their loops
//! over query rows are in `free.rs` and `turns.rs`.

use attend::{Masker, QueryNumbers, ScoreGradient, SoftcapSlope};
use problem::Tensor;
use ptx::{Builder, CmpOp, Pointer, R32};
use tile::{
    AccTile, Accumulate, Consumer, OperandTile, PipelineState, Products, RowStore, SharedMatrix, Sign,
    SwizzledTile, TileCursor, WARPGROUP_ROWS, WarpRows, store_fragments_at,
};

use super::adders::Outbox;
use super::convert::PART_TILES;
use super::emit::Main;
use super::parts::KeyGradients;
use super::plan::width;
use super::tiles::{KeyTile, Visit};
use crate::forward::contract::half;

/// A warpgroup that owns 64 keys.
pub(super) struct Warpgroup<'a> {
    pub main: &'a Main<'a>,
    pub consumer: &'a Consumer,
    pub operands: Operands,
    pub tiles: WarpgroupTiles,
    /// Where the warpgroup leaves its parts of dQ, if additions have an order.
    pub outbox: Option<Outbox>,
}

/// The operands of a warpgroup's products.
pub(super) struct Operands {
    /// The warpgroup's rows of K and V.
    pub own_keys: SharedMatrix,
    pub own_values: SharedMatrix,
    /// The rows of all keys, of the columns of the warpgroup's part of dQ.
    pub keys: SharedMatrix,
    /// Q and dO of the first stage, over their columns and over their rows.
    pub queries: [SharedMatrix; 2],
    pub gradients: [SharedMatrix; 2],
    /// dS of the first slot, for the rows of the warpgroup's part of dQ.
    ds: SharedMatrix,
    /// The warp's rows of dSᵀ in the first slot.
    ds_rows: WarpRows,
}

/// A warpgroup's accumulators.
pub(super) struct WarpgroupTiles {
    pub s: AccTile,
    pub dp: AccTile,
    pub dk: AccTile,
    pub dv: AccTile,
    pub dq: AccTile,
    /// Pᵀ and dSᵀ.
    pub p: OperandTile,
    pub ds: OperandTile,
}

impl Main<'_> {
    /// A consumer warpgroup. The numbers in the margin are the lines of FlashAttention-2, Algorithm 2.
    pub(super) fn consume(&self, k: &mut Builder, consumer: &Consumer) {
        let (operands, tiles) = (self.operands(k, consumer), self.tiles(k));
        let outbox = self.params.order.map(|_| self.outbox(k, consumer));
        let group = Warpgroup { main: self, consumer, operands, tiles, outbox };
        let cursor = self.schedule.consumer(k, consumer);
        let takes_turns = self.sizes.takes_turns();
        if takes_turns {
            group.compute_in_turns(k, &cursor);
        } else {
            group.compute_freely(k, &cursor);
        }
        if takes_turns && group.outbox.is_none() {
            // The last part of dQ is read from shared memory before the CTA ends.
            k.guarded(consumer.elected, |k| k.bulk_wait_read(0));
        }
    }

    fn tiles(&self, k: &mut Builder) -> WarpgroupTiles {
        let rows = self.sizes.rows;
        let [s, dp] = [0; 2].map(|_| AccTile::unset(k, 16, rows));
        let [dk, dv] = [Tensor::K, Tensor::V]
            .map(|tensor| AccTile::unset(k, 16, self.sizes.multiplied(self.baked, tensor)));
        let [p, ds] = [0; 2].map(|_| OperandTile::unset(k, half(self.baked), 16, rows));
        // In turns, dP of the next tile is issued after dQ has been copied to shared memory.
        let dq = if self.sizes.takes_turns() { dp.clone() } else { AccTile::unset(k, 16, 8 * PART_TILES) };
        WarpgroupTiles { s, dp, dk, dv, dq, p, ds }
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

    /// For products of operands of the problem's type.
    pub(super) fn products(&self) -> Products {
        let ty = half(self.baked).ty();
        Products::new([ty, ty])
    }

    /// Issues S of a tile of Q.
    pub(super) fn issue_scores(
        &self,
        k: &mut Builder,
        products: &Products,
        [keys, q]: [SharedMatrix; 2],
        s: &AccTile,
    ) {
        let negates = self.baked.sign == Sign::Negate;
        let products = if negates { products.clone().negating() } else { products.clone() };
        products.wgmma_ss(k, keys, q, s, Accumulate::Set); //                     10: Sᵀ = K Qᵀ
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
}

impl KeyTile<'_> {
    /// P of a visit and the warp's keys, in the registers of S.
    pub(super) fn probabilities(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        gradient: &ScoreGradient<'_>,
        s: &AccTile,
        minus_log_sums: &QueryNumbers,
        visit: Visit,
    ) -> AccTile {
        let partial = self.bound.is_partial(k, visit.tile);
        let origin = k.mul(visit.tile, self.main.sizes.rows);
        let p = gradient.probabilities(k, s, minus_log_sums, (origin, partial, None)); // 11: P = exp(S − L)
        self.hide_missing_keys(k, consumer, &p);
        p
    }

    /// Sets the probabilities of keys beyond the last to 0: they would reach dQ.
    fn hide_missing_keys(&self, k: &mut Builder, consumer: &Consumer, p: &AccTile) {
        let left = k.sub(self.keys.seq_q, self.keys.first);
        let ragged = k.setp_s(CmpOp::Lt, left, self.main.sizes.keys());
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

    /// Stores dK, which it scales, or dV of the warp's keys, or leaves the part of it that was computed.
    pub(super) fn store(&self, k: &mut Builder, consumer: &Consumer, tile: &AccTile, gradient: Tensor) {
        let [of_dk, of_dv] = match (self.main.params.gradients, self.part) {
            (KeyGradients::Whole(tensors), _) => tensors,
            (KeyGradients::Parts(parts), part) => {
                let at = (self.at, part.expect("a tile with parts has the number of its own"));
                return parts.leave(k, at, &consumer.threads, (tile, gradient));
            }
        };
        if gradient == Tensor::Dk {
            for row in 0..tile.lane_rows() {
                tile.scale_row(k, row, self.main.params.scale);
            }
        }
        let [batch, head, _] = self.at;
        let first = k.mad(consumer.threads.row_warp, WarpRows::ROWS, self.keys.first);
        let to = if gradient == Tensor::Dk { of_dk } else { of_dv };
        let width = width(self.main.baked.dims, gradient);
        let place = |k: &mut Builder, row: R32| {
            let row = self.sequence.map_or(row, |sequence| sequence.kv.row(k, row));
            to.row(k, self.main.baked, [batch, head, row])
        };
        let limits = (first, self.keys.seq_q);
        let width = (width < 8 * tile.n_tiles()).then(|| k.mov(width));
        let (half, store) = (Some(half(self.main.baked)), RowStore::Chunks);
        store_fragments_at(k, &consumer.threads, half, tile, limits, place, store, width);
    }
}

impl Warpgroup<'_> {
    /// Runs `visits` for each tile of keys of the CTA, and stores its dK and dV.
    pub fn for_each_tile(
        &self,
        k: &mut Builder,
        cursor: &TileCursor<'_>,
        visits: impl FnOnce(&mut Builder, &KeyTile<'_>),
    ) {
        let WarpgroupTiles { dk, dv, .. } = &self.tiles;
        cursor.for_each(k, |k, tile| {
            let tile = KeyTile::new(k, self.main, tile);
            dk.clear(k);
            dv.clear(k);
            visits(k, &tile);
            tile.store(k, self.consumer, dk, Tensor::Dk); //                       18
            tile.store(k, self.consumer, dv, Tensor::Dv);
            cursor.advance(k)
        });
    }

    /// The mask of a tile of keys.
    pub fn mask(&self, k: &mut Builder, tile: &KeyTile<'_>) -> Masker {
        let (threads, rows) = (&self.consumer.threads, self.main.sizes.rows);
        Masker::new(k, &tile.band, threads, &tile.keys, 16, rows).of_probabilities()
    }

    /// The positions in the rings of K and V.
    pub fn stationary(&self, k: &mut Builder) -> [PipelineState; 2] {
        let [_, keys, values, _] = &self.main.rings;
        [keys, values].map(|ring| ring.pipeline.consumer_state(k))
    }

    /// Waits for K and V of a tile of keys.
    pub fn await_stationary(&self, k: &mut Builder, at: &[PipelineState; 2]) {
        let [_, keys, values, _] = &self.main.rings;
        for (ring, at) in [keys, values].into_iter().zip(at) {
            ring.pipeline.consumer_wait(k, at);
        }
    }

    /// Releases K or V after the last product that reads it.
    pub fn release(&self, k: &mut Builder, [keys_at, values_at]: &[PipelineState; 2], tensor: Tensor) {
        let [_, keys, values, _] = &self.main.rings;
        let (ring, at) = if tensor == Tensor::K { (keys, keys_at) } else { (values, values_at) };
        ring.pipeline.consumer_release(k, at, self.consumer.elected);
        at.advance(k);
    }

    /// Issues S of a tile of Q, with the warpgroup's keys.
    pub fn issue_scores(&self, k: &mut Builder, products: &Products, q: SharedMatrix) {
        self.main.issue_scores(k, products, [self.operands.own_keys, q], &self.tiles.s);
    }

    /// Passes dS on in the slot.
    pub fn publish(&self, k: &mut Builder, slot: &PipelineState) {
        let main = self.main;
        self.operands.ds_rows.at_stage(k, slot, main.ds.0.bytes()).write(k, &self.tiles.ds);
        main.handover().publish(k, slot, self.consumer.elected);
    }

    /// dS of the slot, once both warpgroups have passed on theirs.
    pub fn all_ds(&self, k: &mut Builder, slot: &PipelineState) -> SharedMatrix {
        self.main.handover().wait(k, slot);
        self.operands.ds.stage(k, slot.stage)
    }
}
