//! The generator of the `mma` family.

use attend::{
    Block, BlockList, BlockLists, BlockScores, Bound, KeyBand, KvPipeline, Lengths, Masker, OnlineSoftmax,
    Order, OutputSums, Partials, ProgramCode, RowRange, ScoreChain, ScorePrograms, Sequence, Sinks, Softcap,
    Steps, Stream, store_lse,
};
use problem::{Operand, OperandMap, Problem, Tensor};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, R32, R64, Shared};
use tile::{
    AccTile, MatrixReader, MmaType, OperandA, OperandType, PagedRows, PairSum, RowsOut, Sign, Threads,
    TileCopy, TileLayout, divide, mma_ab, mma_ab_apart, mma_ab_scaled, mma_abt, store_rows,
    store_rows_in_f32,
};

use super::fp8::product_types;
use super::plan::{CtaOrder, MmaPlan, QueryHome};
use super::split::{self, merge_descales, row_block_and_split};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_softcap, factor_or_one, lse_of_row, out_half,
};
use crate::forward::descale::{ScoreDescale, Scores, ValueDescale};
use crate::forward::fp8::weights;
use crate::forward::lengths::{PageTable, blocks_divide, declare_lengths};
use crate::forward::lists::ListTiles;
use crate::forward::programs::declare_programs;
use crate::grid::{Axis, Grid};
use crate::{Arch, Baked, Dims};

const ENTRY: &str = "flash_forward_mma";

impl MmaPlan {
    /// What the code depends on.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let baked = Baked::of(problem, false);
        Baked {
            heads_q: if baked.lse || self.splits > 1 { problem.heads_q } else { 0 },
            sign: if problem.softmax_scale() == 0.0 { Sign::Clear } else { baked.sign },
            listed: self.visits.lists(problem).then(|| ProgramCode::of_mask(problem, false)),
            divides: blocks_divide(problem, self.block_n),
            flat: self.needs_flat_grid(problem),
            ..baked
        }
        .with_row_bytes(problem, &Tensor::FORWARD)
    }

    /// Emits the kernel. If the plan lists blocks, the kernel that lists them comes before it; if CTAs divide
    /// the keys, the kernel that merges the results comes after it. The plan has been checked.
    pub(super) fn drafts<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        if let Some(resident) = self.resident_ctas {
            k.min_ctas_per_sm(resident);
        }
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, problem, baked, self);
        let launch = (ENTRY, self.launch(problem, baked));
        let body = move |k: &mut Builder| Forward::new(k, baked, self, params).body(k);
        let lists = self.list_tiles(problem).map(|tiles| tiles.draft(problem, baked, arch.target()));
        let forward = Draft::new(k, contract, launch, arch.target(), body);
        let merge = (self.splits > 1).then(|| self.merge(problem, baked, arch));
        lists.into_iter().chain([forward]).chain(merge).collect()
    }

    /// The tiles for which blocks are listed; `None` if the plan does not list any.
    pub(super) fn list_tiles(&self, problem: &Problem) -> Option<ListTiles> {
        let tiles = ListTiles { rows: self.block_m, heads: 1, block_n: self.block_n, at_least_one: false };
        self.visits.lists(problem).then_some(tiles)
    }

    fn launch(&self, problem: &Problem, baked: &Baked) -> Launch {
        Launch {
            dynamic_shared: self.shared_bytes(problem) as u32,
            ..Launch::new(self.grid(problem).launch(baked.flat), Dim3(self.threads(), 1, 1))
        }
    }
}

/// State of the CTA in registers, with the values known at emission.
pub(super) struct Forward<'a> {
    pub plan: &'a MmaPlan,
    pub baked: &'a Baked,
    /// The types of S = Q Kᵀ and of P V.
    types: [MmaType; 2],
    pub(super) params: Params,
    pub threads: Threads,
    pub rows: RowRange,
    /// The rows of the CTA's batch entry; `None` if it has all rows of the tensors.
    sequence: Option<Sequence>,
    /// The index of the CTA's tile in its sequence.
    tile: R32,
    shared: Shared,
}

/// A tensor's start, and its strides in bytes.
#[derive(Clone, Copy)]
struct TensorStart {
    start: Global,
    batch_bytes: R64,
    head_bytes: R64,
}

/// The kernel's parameters.
pub(super) struct Params {
    /// Q, K, V and O. With split keys, partial results replace O and the LSE.
    tensors: OperandMap<TensorStart>,
    pub(super) grid: Grid,
    lse: Option<Global>,
    partials: Option<Partials>,
    pub(super) seq_q: R32,
    pub(super) seq_kv: R32,
    lengths: Option<Lengths>,
    pages: Option<PageTable>,
    /// `|scale| · log2 e`.
    pub(super) factor: F32,
    band: KeyBand,
    pub(super) softcap: Option<Softcap>,
    pub(super) programs: Option<ScorePrograms>,
    sinks: Option<Global>,
    lists: Option<BlockLists>,
    pub(super) score_descale: Option<ScoreDescale>,
    /// With split keys, the merge kernel applies the factor of a head.
    pub(super) value_descale: Option<ValueDescale>,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        baked: &Baked,
        plan: &MmaPlan,
    ) -> Params {
        let splits = plan.splits;
        let tensors = if splits > 1 { &Tensor::FORWARD[..3] } else { &Tensor::FORWARD[..] };
        let pointers: Vec<Global> = tensors.iter().map(|&tensor| c.tensor(k, tensor)).collect();
        let lse = if splits == 1 { c.operand(k, Operand::Lse) } else { None };
        let partials = (splits > 1).then(|| split::declare(k, c, problem, plan, Access::Write));
        let tensors = tensors.iter().zip(pointers).map(|(&tensor, start)| {
            let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
            (tensor.into(), TensorStart { start, batch_bytes, head_bytes })
        });
        let tensors = tensors.collect();
        let [seq_q, seq_kv] = [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
            .map(|(name, length)| c.u32(k, name, length as u32));
        let lists = plan.list_tiles(problem).map(|tiles| tiles.declare(k, c, problem, Access::Read));
        Params {
            tensors,
            grid: plan.grid(problem).declare(k, c, baked.flat),
            lse,
            partials,
            seq_q,
            seq_kv,
            lengths: declare_lengths(k, c, problem, [seq_q, seq_kv]),
            pages: PageTable::declare(k, c, problem),
            factor: c.f32(k, "scale_log2e", factor_or_one(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            programs: declare_programs(k, c, problem, baked.programs.as_ref())
                .map(|programs| if lists.is_some() { programs.masking_partial_blocks() } else { programs })
                .map(|programs| programs.on_whole_blocks(baked.divides)),
            // With split keys, the merge kernel adds the sinks.
            sinks: if splits == 1 { c.operand(k, Operand::Sinks) } else { None },
            lists,
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: match splits > 1 && merge_descales(problem) {
                true => None,
                false => ValueDescale::declare(k, c, problem),
            },
        }
    }
}

impl<'a> Forward<'a> {
    fn new(k: &mut Builder, baked: &'a Baked, plan: &'a MmaPlan, params: Params) -> Forward<'a> {
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

    /// The kernel: FlashAttention-2, Algorithm 1.
    fn body(&self, k: &mut Builder) {
        let (plan, rows, divides) = (self.plan, &self.rows, self.baked.divides);
        let list = self.list(k);
        let bound = self.bound(k, list.as_ref());
        let blocks = self.keys_and_values(k, bound, list, divides);
        self.load_queries(k);
        blocks.start(k);
        let q = self.queries(k, &blocks);

        let o = AccTile::zero(k, plan.warp_rows(), plan.columns(self.baked)[1] / plan.dim_warps);
        let threads = &self.key_threads();
        let mask = Masker::new(k, &self.params.band, threads, rows, plan.warp_rows(), plan.warp_keys());
        let (factor, softcap, programs) = self.score_factors(k);
        let softmax =
            OnlineSoftmax::new(k, self.weights(), plan.rescale, factor, plan.warp_rows(), programs.as_ref())
                .of_wide(self.baked.wide);
        let (score_factors, value_factors) = (self.block_factors(k), self.value_factors(k));
        let softmax = match &score_factors {
            None => softmax,
            Some(factors) => factors.in_softmax(softmax),
        };
        let programs = programs.as_ref().map(|programs| {
            let at = self.head_and_batch(k);
            programs.for_rows(k, threads, rows, (plan.warp_rows(), plan.warp_keys()), at)
        });
        // A listed block may be partial because of the mask program alone.
        let unmasked = list.is_some() && divides && self.params.band.is_full();
        let sum = self.pair_sum(k);
        let chain = ScoreChain {
            descale: score_factors.as_ref(),
            softcap: softcap.as_ref(),
            programs: programs.as_ref(),
            mask: (!unmasked).then_some(&mask),
        };
        let scores = |k: &mut Builder, block: &Block| {
            let key = block.key(k);
            let of_keys = score_factors.as_ref().map(|factors| {
                let keys = self.own_keys_of(k, block);
                factors.load(k, &keys)
            });
            let s = mma_abt(k, &q, &key); //                     S = Q Kᵀ
            if let Some(sum) = &sum {
                sum.add(k, &s); //                               of both halves of the head dim
            }
            let of_keys = of_keys.unwrap_or_default();
            let block_scores = BlockScores {
                hides: block.hides,
                descale: (&of_keys, false),
                ..BlockScores::in_place(block.coverage)
            };
            chain.apply(k, &s, &block_scores, |_| block.origin); // S = score(S·f), −∞ where hidden
            s
        };
        let update = |k: &mut Builder, s: &AccTile| {
            if let Some(factors) = &score_factors {
                factors.enter(k);
            }
            softmax.update(k, s, &o); //                         m = max(m, S·c); O, l rescaled
        };
        let accumulate = |k: &mut Builder, s: &AccTile, block: &Block| {
            let [_, ty] = self.types;
            let of_values = value_factors.map(|values| {
                let keys = self.own_keys_of(k, block);
                (values, values.load(k, &keys), keys)
            });
            let p = match ty {
                //                           P = exp2(S·c − m); l += Σ P
                MmaType::Half(_) | MmaType::Fp8(_) => softmax.probabilities(k, s),
                MmaType::F32 | MmaType::Tf32 => softmax.probabilities_in_f32(k, s),
            };
            let value = block.value(k);
            match (ty, plan.output_sums, of_values) {
                (MmaType::Fp8(types), _, Some((values, factor, keys))) => {
                    let factors: Vec<F32> = (0..o.lane_rows()).map(|_| k.reg()).collect();
                    values.set(k, &factors, factor, &keys, Some(&mask));
                    mma_ab_scaled(k, types, &p, &value, &o, &factors); // O += f·P V
                }
                (MmaType::Fp8(types), OutputSums::ByBlock, None) => mma_ab_apart(k, types, &p, &value, &o),
                _ => mma_ab(k, ty, &p, &value, &o), //           O += P V
            }
        };
        blocks.for_each_block(k, Steps { scores, update, accumulate });
        self.spoil_seen(k, &softmax, factor);
        self.finish(k, softmax, o);
    }

    /// The list of the blocks that the CTA visits, if the plan lists blocks.
    fn list(&self, k: &mut Builder) -> Option<BlockList> {
        self.params.lists.map(|lists| {
            let [head, batch] = self.head_and_batch(k);
            lists.read(k, [batch, head, self.tile], None)
        })
    }

    /// The blocks that the CTA visits.
    fn bound(&self, k: &mut Builder, list: Option<&BlockList>) -> Bound {
        let plan = self.plan;
        let bound = match list {
            None => Bound::new(k, &self.params.band, &self.rows, plan.block_n, self.baked.divides),
            Some(list) => list.bound(),
        };
        if plan.splits == 1 {
            return bound;
        }
        let [_, _, split] = row_block_and_split(k, plan, self.params.grid);
        bound.split(k, split, plan.splits)
    }

    /// Merges the results of the warps that share rows, normalises O and stores the results.
    fn finish(&self, k: &mut Builder, softmax: OnlineSoftmax, o: AccTile) {
        let (softmax, o) = self.merge(k, softmax, o);
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
        self.store(k, &o, &finished.lse);
    }

    /// The type of P; for f32, the 16-bit type with the same range.
    fn weights(&self) -> OperandType {
        match self.types {
            [_, MmaType::F32 | MmaType::Tf32] => Half::Bf16.into(),
            _ => weights(self.baked),
        }
    }

    /// The thread's position among the warps that divide the keys of a block.
    fn key_threads(&self) -> Threads {
        if self.plan.dim_warps == 1 { self.threads } else { self.threads.of_all_columns() }
    }

    /// The half of the head dims that the warp computes; `None` if the warp computes all of them.
    fn half_of_dims(&self) -> Option<R32> {
        self.threads.part.filter(|_| self.plan.dim_warps == 2)
    }

    /// The sum of the two parts of S, if two warps divide the head dims. A CTA barrier separates the scores
    /// of successive blocks.
    fn pair_sum(&self, k: &mut Builder) -> Option<PairSum> {
        let (plan, half) = (self.plan, self.half_of_dims()?);
        let [_, key, value, _] = self.layouts();
        let ring = i64::from(plan.stages * (key.bytes() + value.bytes()));
        let room = self.shared.at(self.ring_start() + ring);
        let at = [self.threads.lane, self.threads.row_warp, half];
        Some(PairSum::new(k, room, at, (plan.warp_rows(), plan.block_n)))
    }

    fn layouts(&self) -> [TileLayout; 4] {
        self.plan.layouts(self.baked)
    }

    /// Keys and values are stored after Q. O later reuses the memory of Q.
    fn ring_start(&self) -> i64 {
        let [q, .., o] = self.layouts();
        i64::from(q.bytes().max(o.bytes()))
    }

    /// The ring of keys and values. It points at the last block that the CTA visits or, with a list, at block
    /// 0.
    fn keys_and_values(
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
    fn load_queries(&self, k: &mut Builder) {
        let [layout, ..] = self.layouts();
        let copy = TileCopy::new(k, &self.threads, layout, self.row_bytes(Tensor::Q), self.plan.copy);
        let copy = copy.of_width(k, self.width_bytes(Tensor::Q));
        let head = self.head(k, Tensor::Q);
        let from = copy.start(k, head, self.rows.first);
        let limit = self.rows_left(k, self.rows.first);
        copy.load(k, self.shared, from, Some(limit));
    }

    /// The warp's queries, in registers or in shared memory according to the plan.
    fn queries(&self, k: &mut Builder, blocks: &KvPipeline) -> OperandA {
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

    /// Whether all of Q must have arrived before the first block is visited. Otherwise, the first block waits
    /// for both Q and its keys.
    pub(super) fn waits_for_queries(&self) -> bool {
        self.plan.queries == QueryHome::Registers || self.plan.products == Order::ScoresAhead
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

    /// The CTA's query head and batch entry.
    pub(super) fn head_and_batch(&self, k: &mut Builder) -> [R32; 2] {
        let [head, batch] = head_and_batch(k, self.plan.tile_order, self.params.grid);
        [head, self.sequence.map_or(batch, |sequence| sequence.batch)]
    }

    /// The pages of the CTA's keys or values, if they lie in pages.
    fn pages(&self, k: &mut Builder, tensor: Tensor) -> Option<PagedRows> {
        let table = self.params.pages?;
        let [_, batch] = self.head_and_batch(k);
        let pages = table.of_sequence(k, batch, self.sequence.and_then(|sequence| sequence.kv.start));
        let page_bytes = self.params.tensors[tensor.into()].batch_bytes;
        Some(PagedRows { pages, page_bytes, row_bytes: self.row_bytes(tensor) })
    }

    /// Start of the CTA's head in a tensor, or in page 0. It is recomputed at each use, so that it occupies
    /// no registers in between.
    fn head(&self, k: &mut Builder, tensor: Tensor) -> Global {
        let TensorStart { start, batch_bytes, head_bytes } = self.params.tensors[tensor.into()];
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

    fn row_bytes(&self, tensor: Tensor) -> i64 {
        self.baked.row_bytes(tensor)
    }

    /// Bytes of a tensor's row.
    fn width_bytes(&self, tensor: Tensor) -> u32 {
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
fn cta_rows(
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
fn row_block(k: &mut Builder, plan: &MmaPlan, &Params { grid, ref band, .. }: &Params) -> R32 {
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
