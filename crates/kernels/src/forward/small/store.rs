//! The epilogue: addresses and stores of O and of the LSE.

use attend::{OnlineSoftmax, store_lse, store_lse_at};
use problem::Tensor;
use ptx::{Builder, F32, Global, R32};
use tile::{AccTile, RowsOut, store_fragments, store_fragments_at};

use super::emit::{Forward, SmallPlan, WARP_ROWS};
use crate::forward::contract::{lse_of_row, row_of_output};

impl<P: SmallPlan> Forward<'_, P> {
    /// Stores the warpgroup's columns of its rows.
    pub(super) fn store(&self, k: &mut Builder, softmax: &OnlineSoftmax, o: &AccTile) {
        if self.rows.heads > 1 {
            return self.store_packed(k, softmax, o);
        }
        let to = self.output(k);
        let first = self.first_row(k);
        let row_bytes = self.baked.row_bytes(Tensor::Out);
        let rows = RowsOut { tensor: to, first, limit: self.rows.seq_q, row_bytes };
        store_fragments(k, &self.threads, self.half, o, rows, self.common.store);
        if let Some(start) = self.params.lse {
            let lse = softmax.lse(k);
            let limit = k.sub(self.rows.seq_q, first);
            let place = [self.batch, self.head, first];
            let to = lse_of_row(k, self.baked, (start, self.rows.seq_q), place);
            store_lse(k, &self.threads, &lse, to, limit);
        }
    }

    /// Stores packed heads, where each row has its own address.
    fn store_packed(&self, k: &mut Builder, softmax: &OnlineSoftmax, o: &AccTile) {
        let first = self.first_row(k);
        let limits = (first, k.mul(self.rows.seq_q, self.rows.heads));
        let place = |k: &mut Builder, row: R32| {
            let [head, position] = self.rows.head_and_position(k, self.head, row);
            [self.batch, head, position]
        };
        let out = self.own_columns(k, self.params.out);
        let row_of_out = |k: &mut Builder, row: R32| {
            let at = place(k, row);
            row_of_output(k, self.baked, (out, self.params.out_strides), at)
        };
        store_fragments_at(k, &self.threads, Some(self.half), o, limits, row_of_out, self.common.store, None);
        if let Some(start) = self.params.lse {
            let lse: Vec<F32> = softmax.lse(k);
            let to = |k: &mut Builder, row: R32| {
                let at = place(k, row);
                lse_of_row(k, self.baked, (start, self.rows.seq_q), at)
            };
            store_lse_at(k, &self.threads, &lse, limits, to);
        }
    }

    /// The warp's first row.
    fn first_row(&self, k: &mut Builder) -> R32 {
        k.mad(self.threads.row_warp, WARP_ROWS, self.rows.first)
    }

    /// Address of the warpgroup's first column in the head's output.
    fn output(&self, k: &mut Builder) -> Global {
        let [batch, head] = [self.batch, self.head].map(|n| k.zext(n));
        let [batch_bytes, head_bytes] = self.params.out_strides;
        let of_batch = k.mad(batch, batch_bytes, self.params.out.base);
        let of_head = k.mad(head, head_bytes, of_batch);
        self.own_columns(k, Global::from(of_head))
    }

    /// Address of the warpgroup's first column in rows that begin at `rows`.
    fn own_columns(&self, k: &mut Builder, rows: Global) -> Global {
        let columns = self.baked.head_dim_v() / self.common.division().parts();
        match self.threads.part {
            None => rows,
            Some(part) => Global { base: k.mad_wide_u(part, 2 * columns, rows.base), offset: rows.offset },
        }
    }
}
