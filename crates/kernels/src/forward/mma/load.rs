//! The loads of Q, K and V, and the places of their tiles in shared memory.

use attend::{BlockList, Bound, KvPipeline, Order, Stream};
use problem::Tensor;
use ptx::{Builder, Pointer, R32};
use tile::{MatrixReader, MmaType, OperandA, PairSum, Threads, TileCopy, TileLayout};

use super::place::Forward;
use super::plan::QueryHome;

impl Forward<'_> {
    /// The half of the head dims that the warp computes; `None` if the warp computes all of them.
    fn half_of_dims(&self) -> Option<R32> {
        self.threads.part.filter(|_| self.plan.dim_warps == 2)
    }

    /// The sum of the two parts of S, if two warps divide the head dims. A CTA barrier separates the scores
    /// of successive blocks.
    pub(super) fn pair_sum(&self, k: &mut Builder) -> Option<PairSum> {
        let (plan, half) = (self.plan, self.half_of_dims()?);
        let [_, key, value, _] = self.layouts();
        let ring = i64::from(plan.stages * (key.bytes() + value.bytes()));
        let room = self.shared.at(self.ring_start() + ring);
        let at = [self.threads.lane, self.threads.row_warp, half];
        Some(PairSum::new(k, room, at, (plan.warp_rows(), plan.block_n)))
    }

    pub(super) fn layouts(&self) -> [TileLayout; 4] {
        self.plan.layouts(self.baked)
    }

    /// Keys and values are stored after Q. O later reuses the memory of Q.
    pub(super) fn ring_start(&self) -> i64 {
        let [q, .., o] = self.layouts();
        i64::from(q.bytes().max(o.bytes()))
    }

    /// The ring of keys and values. It points at the last block that the CTA visits or, with a list, at block
    /// 0.
    pub(super) fn keys_and_values(
        &self,
        k: &mut Builder,
        bound: Bound,
        list: Option<BlockList>,
        divides: bool,
    ) -> KvPipeline {
        let [_, key, value, _] = self.layouts();
        let ring = self.shared.at(self.ring_start());
        let first = match list {
            None => {
                let before_end = k.sub(bound.end, 1);
                k.mul(before_end, self.plan.block_n)
            }
            Some(_) => k.mov(0),
        };
        let stream = |k: &mut Builder, tensor, layout: TileLayout, reader, tail, tile| {
            let row_bytes = self.row_bytes(tensor);
            let copy = TileCopy::new(k, &self.threads, layout, row_bytes, self.plan.copy);
            let copy = copy.of_width(k, self.width_bytes(tensor));
            let head = self.head(k, tensor);
            let pages = self.pages(k, tensor);
            let from = if pages.is_some() { head } else { copy.start(k, head, first) };
            let block_bytes = i64::from(self.plan.block_n).wrapping_mul(row_bytes);
            Stream { copy, reader, tail, from, pages, block_bytes, tile, layout }
        };
        let reader = self.own_keys(k, key, MatrixReader::chunks_first);
        let tail = (key.chunks % 2 == 1).then(|| self.own_keys(k, key, MatrixReader::one_chunk));
        let keys = stream(k, Tensor::K, key, reader, tail, ring);
        let [_, ty] = self.types;
        let (reader, tail) = match ty {
            MmaType::Half(_) | MmaType::Fp8(_) => (self.own_keys(k, value, MatrixReader::rows_first), None),
            MmaType::F32 | MmaType::Tf32 => {
                let mut rows = |odd| {
                    self.own_keys(k, value, |k, threads, tile| MatrixReader::elements(k, threads, tile, odd))
                };
                let [even, odd] = [rows(0), rows(1)];
                (even, Some(odd))
            }
        };
        let values = stream(k, Tensor::V, value, reader, tail, ring.at(i64::from(key.bytes())));
        let ragged = (!divides).then_some(self.rows.seq_kv);
        KvPipeline::new(
            k,
            self.plan.products,
            self.plan.stages,
            self.plan.block_n,
            bound,
            list,
            keys,
            values,
            ragged,
        )
    }

    /// A reader of the rows of a KV block that belong to the warp's part.
    fn own_keys(
        &self,
        k: &mut Builder,
        block: TileLayout,
        reader: impl Fn(&mut Builder, &Threads, TileLayout) -> MatrixReader,
    ) -> MatrixReader {
        let keys = self.plan.warp_keys();
        let reader = reader(k, &self.threads, TileLayout { rows: keys, ..block });
        match (self.half_of_dims(), self.threads.part) {
            (Some(half), _) => reader.in_halves(k, half),
            (None, None) => reader,
            (None, Some(part)) => {
                let first = k.mul(part, keys);
                reader.skip_rows(k, first)
            }
        }
    }

    /// Requests the copy of the CTA's queries.
    pub(super) fn load_queries(&self, k: &mut Builder) {
        let [layout, ..] = self.layouts();
        let copy = TileCopy::new(k, &self.threads, layout, self.row_bytes(Tensor::Q), self.plan.copy);
        let copy = copy.of_width(k, self.width_bytes(Tensor::Q));
        let head = self.head(k, Tensor::Q);
        let from = copy.start(k, head, self.rows.first);
        let limit = self.rows_left(k, self.rows.first);
        copy.load(k, self.shared, from, Some(limit));
    }

    /// The warp's queries, in registers or in shared memory according to the plan.
    pub(super) fn queries(&self, k: &mut Builder, blocks: &KvPipeline) -> OperandA {
        let [layout, ..] = self.layouts();
        let rows = self.plan.warp_rows();
        let [ty, _] = self.types;
        let q = OperandA::shared(k, &self.threads, ty, self.baked.sign, layout, self.shared, rows);
        let q = match self.half_of_dims() {
            None => q,
            Some(half) => q.in_halves(k, half),
        };
        if self.waits_for_queries() {
            blocks.wait_for_first(k);
        }
        match self.plan.queries {
            QueryHome::Shared => q,
            QueryHome::Registers => q.into_registers(k),
        }
    }

    /// Whether all of Q must have arrived before the first block is visited. Otherwise, the first block waits
    /// for both Q and its keys.
    pub(super) fn waits_for_queries(&self) -> bool {
        self.plan.queries == QueryHome::Registers || self.plan.products == Order::ScoresAhead
    }
}
