//! The tiles of packed query rows on the CTA's piece of the line: their rows, and how results are merged with
//! those of other CTAs and stored.

use attend::{Bound, LineMerge, OnlineSoftmax, RowRange, Sinks, store_lse_at};
use problem::{DType, Tensor};
use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, Pred, R32, SpecialReg, Type};
use tile::{AccTile, CopyMode, Pieces, Threads};

use super::DecodePlan;
use super::line::{KeyLine, LaneEntries, LineCursor};
use super::params::{DecodeParams, TensorStart};
use super::plan::{ProductUnit, ROWS};
use crate::Baked;
use crate::forward::contract::{half, lse_of_row, row_of_output};

/// State of the CTA in registers that does not depend on how its warps multiply, with the values known at
/// emission.
#[derive(Clone)]
pub(super) struct LineTiles<'a> {
    pub plan: &'a DecodePlan,
    pub baked: &'a Baked,
    pub params: DecodeParams,
    /// The type of O.
    pub half: Half,
    /// The type of Q and P in products: f16 with an 8-bit cache.
    pub product: Half,
    /// The pair types of 8-bit keys and values.
    pub narrow: Option<[Type; 2]>,
    pub threads: Threads,
    /// The index of the warp among those that divide the keys of a block, or the head dims.
    pub part: R32,
    pub line: KeyLine,
    /// The first batch entries.
    pub lanes: LaneEntries,
    pub pieces: Pieces,
    pub cta: R32,
}

impl<'a> LineTiles<'a> {
    /// Cuts the line. CTAs without a piece end here.
    pub(super) fn new(
        k: &mut Builder,
        (plan, baked): (&'a DecodePlan, &'a Baked),
        params: DecodeParams,
        threads: Threads,
    ) -> LineTiles<'a> {
        if let Some(boxes) = params.boxes {
            let elected = k.elect(u32::MAX);
            k.if_(elected, |k| boxes.iter().for_each(|boxes| k.prefetch_tensor_map(boxes.map)));
        }
        if plan.overlapping {
            k.griddep_launch_dependents();
            k.griddep_wait();
        }
        let line = KeyLine {
            lengths: params.lengths,
            batch: params.batch,
            heads_kv: params.heads_kv,
            seq_q: params.seq_q,
            seq_kv: params.seq_kv,
            band: params.band,
            group: baked.group_size(),
            rows: plan.rows(),
            block_n: plan.block_n(),
            piece: plan.piece.map(|keys| keys / plan.block_n()),
            lane: threads.lane,
        };
        let (pieces, takers, lanes) = line.cut(k, plan.least_blocks);
        let cta = k.special(SpecialReg::CtaidX);
        let beyond = k.setp_u(CmpOp::Ge, cta, takers);
        k.exit_if(beyond);
        let narrow = narrow_types(baked);
        LineTiles {
            plan,
            baked,
            params,
            half: half(baked),
            product: if narrow.is_some() { Half::F16 } else { half(baked) },
            narrow,
            threads,
            part: threads.part.unwrap_or(threads.warp),
            line,
            lanes,
            pieces,
            cta,
        }
    }

    /// Registers of a softmax before its first block.
    pub(super) fn softmax(&self, k: &mut Builder) -> OnlineSoftmax {
        OnlineSoftmax::new(k, self.product, self.plan.rescale, self.params.factor, ROWS, None)
            .of_wide(self.baked.wide)
    }

    /// The rows of the tile under the cursor, packed.
    pub(super) fn rows(&self, k: &mut Builder, at: &LineCursor) -> RowRange {
        RowRange {
            first: k.mul(at.tile, self.plan.rows()),
            rows: self.plan.rows(),
            seq_q: at.entry.q.len,
            seq_kv: at.entry.kv.len,
            heads: self.baked.group_size(),
        }
    }

    /// The first of the warp's 16 rows.
    pub(super) fn own_rows(&self, k: &mut Builder, rows: &RowRange) -> R32 {
        if self.plan.tiles() == 1 { rows.first } else { k.mad(self.threads.row_warp, ROWS, rows.first) }
    }

    /// The batch entry, the query head and the row in the tensor of the lane's row `below` of the tile, and
    /// whether the row exists.
    pub(super) fn place(
        &self,
        k: &mut Builder,
        at: &LineCursor,
        rows: &RowRange,
        below: u32,
    ) -> ([R32; 3], Pred) {
        let first = self.own_rows(k, rows);
        let row = k.add(first, self.threads.quad);
        let row = k.add(row, below);
        let all = k.mul(rows.seq_q, rows.heads);
        let exists = k.setp_u(CmpOp::Lt, row, all);
        let [head, position] = rows.head_and_position(k, at.head, row);
        ([self.entry_of_queries(k, at), head, at.entry.q.row(k, position)], exists)
    }

    /// The batch index in Q, O and the LSE: 0 for packed queries.
    pub(super) fn entry_of_queries(&self, k: &mut Builder, at: &LineCursor) -> R32 {
        if self.baked.lengths.q.packed.is_some() { k.mov(0) } else { at.batch }
    }

    /// Whether some row of the tile does not see some key of the block.
    pub(super) fn is_partial(&self, k: &mut Builder, at: &LineCursor, rows: &RowRange) -> Pred {
        let bound = Bound::new(k, &self.params.band, rows, self.plan.block_n(), false);
        let full_to = bound.full_to.unwrap_or(bound.end);
        let above = k.setp_s(CmpOp::Ge, at.block, full_to);
        match bound.lower.and_then(|lower| lower.full_from) {
            None => above,
            Some(full_from) => {
                let below = k.setp_s(CmpOp::Lt, at.block, full_from);
                k.or_pred(above, below)
            }
        }
    }

    /// The address of a row of Q or O.
    pub(super) fn row_of(&self, k: &mut Builder, tensor: Tensor, place: [R32; 3]) -> Global {
        let TensorStart { start, batch_bytes, head_bytes } = self.params.tensors[tensor.into()];
        if tensor == Tensor::Out {
            return row_of_output(k, self.baked, (start, [batch_bytes, head_bytes]), place);
        }
        let [batch, head, row] = place.map(|n| k.zext(n));
        let of_batch = k.mad(batch, batch_bytes, start.base);
        let of_head = k.mad(head, head_bytes, of_batch);
        Global { base: k.mad(row, self.baked.row_bytes(tensor), of_head), ..start }
    }

    /// Stores two neighbouring elements, one by one if they may lie at odd addresses.
    fn store_pair(&self, k: &mut Builder, to: Global, pair: R32) {
        if self.plan.copy != CopyMode::Elements {
            return k.st(to, pair);
        }
        for (bytes, element) in [0, 2].into_iter().zip(k.split16(pair)) {
            k.st(to.at(bytes), element);
        }
    }

    /// The rows of a tile that a lane holds and that may exist.
    pub(super) fn lane_rows(&self) -> usize {
        self.merge().lane_rows()
    }

    /// The buffers and counters of tiles that CTAs divide.
    pub(super) fn merge(&self) -> LineMerge {
        let DecodeParams { parts, counters, .. } = self.params;
        let by_vector = self.plan.products == ProductUnit::Warpgroup;
        let tile_rows = self.baked.tile_rows;
        LineMerge { parts, counters, pieces: self.pieces, cta: self.cta, tile_rows, by_vector }
    }

    /// Normalises the warp's columns of O and stores them, and the LSE.
    pub(super) fn store(&self, k: &mut Builder, at: &LineCursor, softmax: &OnlineSoftmax, o: &AccTile) {
        let rows = self.rows(k, at);
        let sinks = self.params.sinks.map(|start| Sinks::load(k, start, at.head, &self.threads, &rows, ROWS));
        let descale = self.params.value_descale.map(|descale| descale.load(k, [at.batch, at.head]));
        let softmax = softmax.clone().with_output_factor(descale);
        let finished = softmax.finish(k, o, sinks.as_ref());
        let o = &if self.narrow.is_some() { o.in_quads() } else { o.clone() };
        let own = o.lane_column(k, &self.threads);
        let column = k.mad(self.part, 8 * o.n_tiles(), own);
        for i in 0..self.lane_rows() as u32 {
            let (place, exists) = self.place(k, at, &rows, 8 * i);
            let to = self.row_of(k, Tensor::Out, place);
            let to = k.index(to, column, 2);
            let row: Vec<F32> = o.row(i).collect();
            let pairs: Vec<R32> =
                row.chunks_exact(2).map(|pair| k.pack(self.half, pair[0], pair[1])).collect();
            k.guarded(exists, |k| {
                for (n, &pair) in (0..).zip(&pairs) {
                    self.store_pair(k, to.at(2 * i64::from(o.pair_column(n))), pair);
                }
            });
        }
        let Some(lse) = self.params.lse else { return };
        let all = k.mul(rows.seq_q, rows.heads);
        let of_head = self.params.lengths.map_or(self.params.seq_q, |lengths| lengths.q.tensor_rows());
        let first = self.own_rows(k, &rows);
        store_lse_at(k, &self.threads, &finished.lse, (first, all), |k, row| {
            let [head, position] = rows.head_and_position(k, at.head, row);
            let position = at.entry.q.row(k, position);
            let batch = self.entry_of_queries(k, at);
            lse_of_row(k, self.baked, (lse, of_head), [batch, head, position])
        });
    }

    /// Merges the rows of the tile of block `done`, which the CTA computed from block `from` of the tile to
    /// this one, with those of the CTAs that divide the tile, and stores the tile if it is complete. `block`
    /// is the block's place on the line.
    pub(super) fn finish(
        &self,
        k: &mut Builder,
        done: &LineCursor,
        (from, block): (R32, R32),
        (softmax, o): (&OnlineSoftmax, &AccTile),
    ) {
        let blocks = k.sub(done.entry.end, done.entry.from);
        let before = k.sub(done.block, done.entry.from);
        let next = k.add(done.block, 1);
        let ends = k.setp_s(CmpOp::Ge, next, done.entry.end);
        let whole = k.setp_s_and(CmpOp::Eq, from, done.entry.from, ends);
        let complete: R32 = k.selp(1, 0, whole);
        let divided = k.not_pred(whole);
        k.if_(divided, |k| {
            let first = k.sub(block, before);
            let end = k.add(first, blocks);
            let last = k.sub(end, 1);
            let merged = self.merge().join(k, &self.threads, [first, last], softmax, o);
            k.selp_to(complete, 1, 0, merged);
        });
        let complete = k.setp_u(CmpOp::Ne, complete, 0);
        k.if_(complete, |k| self.store(k, done, softmax, o));
    }
}

/// The pair types of 8-bit keys and values.
fn narrow_types(baked: &Baked) -> Option<[Type; 2]> {
    let pair = |dtype| if dtype == DType::E5m2 { Type::E5m2x2 } else { Type::E4m3x2 };
    let dtypes = baked.dims.dtypes;
    dtypes.has_narrow_cache().then(|| [pair(dtypes.k), pair(dtypes.v)])
}
