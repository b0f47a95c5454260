//! The epilogue: merges the warps that share rows, normalises O, and stores O and the LSE.

use attend::{OnlineSoftmax, Order, Partials, Sinks, store_lse};
use problem::Tensor;
use ptx::{Builder, F32, Global, Pointer, R32};
use tile::{AccTile, MmaType, RowsOut, store_rows, store_rows_in_f32};

use super::place::{Forward, head_and_batch, row_block_and_split};
use super::plan::QueryHome;
use super::split::partial_row;
use crate::forward::before::FinishedRows;
use crate::forward::contract::{lse_of_row, out_half};

impl Forward<'_> {
    /// Merges the results of the warps that share rows, normalises O and stores the results.
    pub(super) fn finish(&self, k: &mut Builder, softmax: OnlineSoftmax, o: AccTile) {
        let (softmax, o) = self.merge(k, softmax, o);
        if let Some(dropout) = &self.params.dropout {
            dropout.scale_kept(k, &o);
        }
        let o = match self.types {
            [_, MmaType::Fp8(_)] => o.in_quads(),
            _ => o,
        };
        if let Some(partials) = &self.params.partials {
            return self.store_partials(k, partials, &softmax, &o);
        }
        let sinks = self.params.sinks.map(|start| {
            let [head, _] = self.head_and_batch(k);
            Sinks::load(k, start, head, &self.threads, &self.rows, self.plan.warp_rows())
        });
        let softmax = softmax.with_output_factor(self.value_factor(k));
        let finished = softmax.finish(k, &o, sinks.as_ref());
        let lse = self.merged(k, &o, finished.lse);
        self.store(k, &o, &lse);
    }

    /// Merges the warp's O and softmax with those of the warps that share its rows, in the shared memory of
    /// keys and values.
    fn merge(&self, k: &mut Builder, softmax: OnlineSoftmax, o: AccTile) -> (OnlineSoftmax, AccTile) {
        if self.plan.kv_warps == 1 {
            return (softmax, o);
        }
        if !self.waits_for_queries() {
            k.cp_async_wait(0); // A CTA without keys has not waited for Q yet.
        }
        k.bar_sync();
        softmax.merge(k, &self.threads, &o, self.shared.at(self.ring_start()))
    }

    /// Orders the last read of Q before O is written to the same shared memory.
    fn release_queries(&self, k: &mut Builder) {
        if self.plan.kv_warps > 1 {
            return; // The merge has ordered it.
        }
        // A warp that shares rows has read only half of the columns.
        let [q, .., o] = self.layouts();
        let own_rows = q.pitch() == o.pitch() && self.plan.dim_warps == 1;
        match (self.plan.queries, self.plan.products) {
            // All of Q had arrived before it was copied to registers. If rows of Q and O have the same
            // length, a warp's O overwrites only rows of Q that only this warp has read. The lanes of the
            // warp must synchronise, but no warp waits for another.
            (QueryHome::Registers, _) if own_rows => k.warp_sync(),
            (QueryHome::Registers, _) => k.bar_sync(),
            // The barrier of the last block comes after the last scores.
            (QueryHome::Shared, Order::ScoresAhead) => {}
            // A CTA without keys has not yet waited for Q.
            (QueryHome::Shared, Order::InTurn) => {
                k.cp_async_wait(0);
                k.bar_sync();
            }
        }
    }

    /// Merges the rows with those of the result from which they continue, and returns their LSE.
    fn merged(&self, k: &mut Builder, o: &AccTile, lse: Vec<F32>) -> Vec<F32> {
        let Some(before) = &self.params.before else { return lse };
        let first = k.mad(self.threads.row_warp, self.plan.warp_rows(), self.rows.first);
        let limits = (first, self.rows.seq_q);
        let result = FinishedRows { threads: &self.threads, o, lse: &lse, limits };
        let pairs = self.plan.copy.bytes() >= 2 * self.baked.dims.dtypes.out.bytes() as u32;
        let out = self.head_from(k, Tensor::Out, before.out);
        let of_out = |k: &mut Builder, row: R32| {
            let row = k.zext(row);
            Global { base: k.mad(row, self.row_bytes(Tensor::Out), out.base), ..out }
        };
        let of_lse = |k: &mut Builder, row: R32| self.place_of_lse(k, before.lse, row);
        before.merge(k, self.baked, &result, pairs, of_lse, of_out)
    }

    /// The address of the LSE of a row of the CTA's sequence, in an array that begins at `start`.
    fn place_of_lse(&self, k: &mut Builder, start: Global, row: R32) -> Global {
        let [head, batch] = head_and_batch(k, self.plan.tile_order, self.params.grid);
        let position = self.sequence.map_or(row, |sequence| sequence.q.row(k, row));
        let rows = self.params.lengths.map_or(self.params.seq_q, |lengths| lengths.q.tensor_rows());
        lse_of_row(k, self.baked, (start, rows), [batch, head, position])
    }

    /// Stores O through the shared memory of Q, and the LSE.
    fn store(&self, k: &mut Builder, o: &AccTile, lse: &[F32]) {
        let half = out_half(self.baked);
        if half.is_some() {
            self.release_queries(k);
        } else if !self.waits_for_queries() {
            k.cp_async_wait(0); // A CTA without keys has not waited for Q yet.
        }
        let rows = RowsOut {
            tensor: self.head(k, Tensor::Out),
            first: self.rows.first,
            limit: self.rows.seq_q,
            row_bytes: self.row_bytes(Tensor::Out),
        };
        let width = self.baked.head_dim_v();
        match half {
            Some(half) => store_rows(k, &self.threads, half, o, self.shared, rows, width, self.plan.copy),
            None => store_rows_in_f32(k, &self.threads, o, rows, width, self.plan.copy),
        }
        if let Some(start) = self.params.lse {
            let [head, batch] = head_and_batch(k, self.plan.tile_order, self.params.grid);
            let first = k.mad(self.threads.row_warp, self.plan.warp_rows(), self.rows.first);
            let limit = self.rows_left(k, first);
            let position = self.sequence.map_or(first, |sequence| sequence.q.row(k, first));
            let rows = self.params.lengths.map_or(self.params.seq_q, |lengths| lengths.q.tensor_rows());
            let to = lse_of_row(k, self.baked, (start, rows), [batch, head, position]);
            store_lse(k, &self.threads, lse, to, limit);
        }
    }

    /// Stores the CTA's partial results.
    fn store_partials(&self, k: &mut Builder, partials: &Partials, softmax: &OnlineSoftmax, o: &AccTile) {
        if !self.waits_for_queries() {
            k.cp_async_wait(0); // A CTA without keys has not waited for Q yet.
        }
        let [head, batch] = head_and_batch(k, self.plan.tile_order, self.params.grid);
        let [_, _, split] = row_block_and_split(k, self.plan, self.params.grid);
        let row = k.mad(self.threads.row_warp, self.plan.warp_rows(), self.rows.first);
        let at = [batch, head, split, row];
        let first = partial_row(k, self.baked, self.plan.splits, at, self.rows.seq_q);
        let left = self.rows_left(k, row);
        partials.store(k, &self.threads, softmax, o, (first, left));
    }
}
