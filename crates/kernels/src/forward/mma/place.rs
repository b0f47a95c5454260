//! The CTA being emitted, and its place: its tile of query rows, its head and batch entry, and their starts
//! in memory.

use attend::{RowRange, Sequence};
use problem::Tensor;
use ptx::{Builder, CmpOp, Global, R32, Shared};
use tile::{MmaType, PagedRows, Threads, divide};

use super::fp8::product_types;
use super::launch::{Params, TensorStart};
use super::plan::{CtaOrder, MmaPlan};
use crate::grid::{Axis, Grid};
use crate::{Baked, Dims};

/// State of the CTA in registers, with the values known at emission.
pub(super) struct Forward<'a> {
    pub plan: &'a MmaPlan,
    pub baked: &'a Baked,
    /// The types of S = Q Kᵀ and of P V.
    pub(super) types: [MmaType; 2],
    pub(super) params: Params,
    pub threads: Threads,
    pub rows: RowRange,
    /// The rows of the CTA's batch entry; `None` if it has all rows of the tensors.
    pub(super) sequence: Option<Sequence>,
    /// The index of the CTA's tile in its sequence.
    pub(super) tile: R32,
    pub(super) shared: Shared,
}

impl<'a> Forward<'a> {
    pub(super) fn new(k: &mut Builder, baked: &'a Baked, plan: &'a MmaPlan, params: Params) -> Forward<'a> {
        let row_block = row_block(k, plan, &params);
        let (rows, sequence, tile) = cta_rows(k, plan, &params, row_block);
        Forward {
            plan,
            baked,
            types: product_types(baked),
            threads: Threads::new(k, plan.threads(), plan.sharing_warps()),
            rows,
            sequence,
            tile,
            params,
            shared: k.dynamic_shared(128),
        }
    }
}

impl Forward<'_> {
    /// The CTA's query head and batch entry.
    pub(super) fn head_and_batch(&self, k: &mut Builder) -> [R32; 2] {
        let [head, batch] = head_and_batch(k, self.plan.tile_order, self.params.grid);
        [head, self.sequence.map_or(batch, |sequence| sequence.batch)]
    }

    /// The pages of the CTA's keys or values, if they lie in pages.
    pub(super) fn pages(&self, k: &mut Builder, tensor: Tensor) -> Option<PagedRows> {
        let table = self.params.pages?;
        let [_, batch] = self.head_and_batch(k);
        let pages = table.of_sequence(k, batch, self.sequence.and_then(|sequence| sequence.kv.start));
        let page_bytes = self.params.tensors[tensor.into()].batch_bytes;
        Some(PagedRows { pages, page_bytes, row_bytes: self.row_bytes(tensor) })
    }

    /// Start of the CTA's head in a tensor, or in page 0. It is recomputed at each use, so that it occupies
    /// no registers in between.
    pub(super) fn head(&self, k: &mut Builder, tensor: Tensor) -> Global {
        self.head_from(k, tensor, self.params.tensors[tensor.into()].start)
    }

    /// [`head`](Forward::head) in memory of the tensor's layout that begins at `start`.
    pub(super) fn head_from(&self, k: &mut Builder, tensor: Tensor, start: Global) -> Global {
        let TensorStart { batch_bytes, head_bytes, .. } = self.params.tensors[tensor.into()];
        let [head, batch] = self.head_and_batch(k);
        let head = if tensor.is_of_keys() { divide(k, head, self.baked.group_size()) } else { head };
        if self.baked.pages.is_some() && tensor.is_of_keys() {
            let head = k.zext(head);
            return Global { base: k.mad(head, head_bytes, start.base), ..start };
        }
        // Packed tensors have a batch stride of 0.
        let [batch, head] = [batch, head].map(|n| k.zext(n));
        let of_batch = k.mad(batch, batch_bytes, start.base);
        let of_head = k.mad(head, head_bytes, of_batch);
        let first_row = self.sequence.and_then(|sequence| sequence.side(tensor).start);
        Global::from(first_row.map_or(of_head, |row| {
            let row = k.zext(row);
            k.mad(row, self.row_bytes(tensor), of_head)
        }))
    }

    pub(super) fn row_bytes(&self, tensor: Tensor) -> i64 {
        self.baked.row_bytes(tensor)
    }

    /// Bytes of a tensor's row.
    pub(super) fn width_bytes(&self, tensor: Tensor) -> u32 {
        let Dims { dtypes, head_dim, head_dim_v, .. } = self.baked.dims;
        let columns = match tensor.primal() {
            Tensor::Q | Tensor::K => head_dim,
            _ => head_dim_v,
        };
        (dtypes.of(tensor).bytes() * columns) as u32
    }

    pub(super) fn rows_left(&self, k: &mut Builder, first: R32) -> R32 {
        k.sub(self.rows.seq_q, first)
    }
}

/// The CTA's rows, and the index of its tile in its sequence. With uneven lengths, a CTA without a row exits.
pub(super) fn cta_rows(
    k: &mut Builder,
    plan: &MmaPlan,
    params: &Params,
    row_block: R32,
) -> (RowRange, Option<Sequence>, R32) {
    let all = RowRange {
        first: row_block,
        rows: plan.block_m,
        seq_q: params.seq_q,
        seq_kv: params.seq_kv,
        heads: 1,
    };
    let Some(lengths) = &params.lengths else {
        return (RowRange { first: k.mul(row_block, plan.block_m), ..all }, None, row_block);
    };
    let [_, batch] = head_and_batch(k, plan.tile_order, params.grid);
    let (sequence, index) = lengths.tile(k, batch, row_block, plan.block_m, 1);
    let empty = k.setp_u(CmpOp::Eq, sequence.q.len, 0);
    k.exit_if(empty);
    let first = k.mul(index, plan.block_m);
    (RowRange { first, seq_q: sequence.q.len, seq_kv: sequence.kv.len, ..all }, Some(sequence), index)
}

/// The CTA's row block. In a causal head, the last row blocks come first, because they see the most keys.
pub(super) fn row_block(k: &mut Builder, plan: &MmaPlan, &Params { grid, ref band, .. }: &Params) -> R32 {
    if plan.splits > 1 {
        let [block, blocks, _] = row_block_and_split(k, plan, grid);
        let last = k.sub(blocks, 1);
        return if band.is_full() { block } else { k.sub(last, block) };
    }
    let axis = axis_of_rows(plan.tile_order);
    let index = grid.index(k, axis);
    if band.is_full() {
        return index;
    }
    let count = grid.extent(k, axis);
    let last = k.sub(count, 1);
    k.sub(last, index)
}

/// The CTA's query head and batch entry.
pub(crate) fn head_and_batch(k: &mut Builder, order: CtaOrder, grid: Grid) -> [R32; 2] {
    match order {
        CtaOrder::RowsFirst => [Axis::Y, Axis::Z],
        CtaOrder::HeadsFirst => [Axis::X, Axis::Y],
    }
    .map(|axis| grid.index(k, axis))
}

/// The grid dimension of row blocks.
pub(crate) const fn axis_of_rows(order: CtaOrder) -> Axis {
    match order {
        CtaOrder::RowsFirst => Axis::X,
        CtaOrder::HeadsFirst => Axis::Z,
    }
}

/// Reads the CTA's position along the grid dimension of row blocks, in which the splits of a row block are
/// neighbours. Returns the row block's index, the number of row blocks, and the split.
pub(super) fn row_block_and_split(k: &mut Builder, plan: &MmaPlan, grid: Grid) -> [R32; 3] {
    let axis = axis_of_rows(plan.tile_order);
    let (index, count) = (grid.index(k, axis), grid.extent(k, axis));
    let [block, blocks] = [index, count].map(|n| divide(k, n, plan.splits));
    let before = k.mul(block, plan.splits);
    [block, blocks, k.sub(index, before)]
}
