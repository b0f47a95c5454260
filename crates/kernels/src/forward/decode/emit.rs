//! The generator of the `decode` family.

use attend::{
    BlockScores, Bound, Coverage, KeyBand, Lengths, LineMerge, Masker, OnlineSoftmax, RowRange, ScoreChain,
    Sinks, Softcap, store_lse_at,
};
use problem::{DType, Operand, OperandMap, Problem, Tensor};
use ptx::{
    Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, Pred, R32, R64, Shared, SpecialReg, Type,
};
use tile::{
    AccTile, CopyMode, MatrixReader, MmaType, OperandA, OperandB, Pieces, Sign, SwizzledTile, Threads,
    WarpSum, mma_ab, mma_ab_widened, mma_abt, mma_abt_onto, mma_abt_widened, warp_vectors,
};

use super::DecodePlan;
use super::boxes::PageBoxes;
use super::line::{KeyLine, LineCursor};
use super::plan::ROWS;
use super::ring::Ring;
use super::slices::{Slice, values_tile};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_softcap, factor_or_one, half, lse_of_row, row_of_output,
};
use crate::forward::descale::{HeadPlace, ScoreDescale, ValueDescale};
use crate::forward::lengths::{PageTable, declare_lengths};
use crate::{Arch, Baked};

const ENTRY: &str = "flash_decode";

impl DecodePlan {
    /// What the code depends on.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let mut baked = Baked::of(problem, true);
        baked.dims.v_in_k = self.views(problem);
        let sign = if problem.softmax_scale() == 0.0 { Sign::Clear } else { baked.sign };
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        let few_rows = self.tiles() == 1 && rows <= ROWS as usize / 2;
        Baked { sign, few_rows, ..baked }.with_row_bytes(problem, &Tensor::FORWARD)
    }

    /// Emits the kernel. The plan has been checked.
    pub(super) fn drafts<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        k.min_ctas_per_sm(self.resident_ctas);
        let mut contract = Contract::new(problem);
        let ctas = self.ctas(problem, arch);
        let params = DecodeParams::declare(&mut k, &mut contract, problem, (self, ctas));
        let launch = Launch {
            dynamic_shared: self.shared_bytes(problem) as u32,
            overlapping: self.overlapping,
            ..Launch::new(Dim3(ctas, 1, 1), Dim3(self.threads(), 1, 1))
        };
        let body = move |k: &mut Builder| {
            let decode = Decode::new(k, self, baked, params);
            decode.body(k);
        };
        vec![Draft::new(k, contract, (ENTRY, launch), arch.target(), body)]
    }
}

/// A tensor's start, and its strides in bytes. K and V in pages have pages for batch entries.
#[derive(Clone, Copy)]
pub(super) struct TensorStart {
    pub start: Global,
    pub batch_bytes: R64,
    pub head_bytes: R64,
}

/// The kernel's parameters.
pub(super) struct DecodeParams {
    pub tensors: OperandMap<TensorStart>,
    lse: Option<Global>,
    sinks: Option<Global>,
    batch: R32,
    heads_kv: R32,
    seq_q: R32,
    seq_kv: R32,
    lengths: Option<Lengths>,
    pub pages: Option<PageTable>,
    /// How TMA copies K and V, if it does.
    pub boxes: Option<[PageBoxes; 2]>,
    factor: F32,
    band: KeyBand,
    softcap: Option<Softcap>,
    score_descale: Option<ScoreDescale>,
    value_descale: Option<ValueDescale>,
    parts: Global,
    counters: Global,
    /// Parts for which a CTA has room, if keys are cut at fixed pieces.
    pub slots: Option<R32>,
}

impl DecodeParams {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        (plan, ctas): (&DecodePlan, u32),
    ) -> DecodeParams {
        let read = Tensor::FORWARD.into_iter().filter(|&t| t != Tensor::V || !plan.views(problem));
        let starts: Vec<_> = read.map(|tensor| (tensor, c.tensor(k, tensor))).collect();
        let tensors: Vec<_> = starts
            .into_iter()
            .map(|(tensor, start)| {
                let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
                (tensor.into(), TensorStart { start, batch_bytes, head_bytes })
            })
            .collect();
        let [heads_kv, seq_q, seq_kv] =
            [("heads_kv", problem.heads_kv), ("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
                .map(|(name, value)| c.u32(k, name, value as u32));
        let lengths = declare_lengths(k, c, problem, [seq_q, seq_kv]);
        let [parts, counters] = plan.merge_bytes(problem, ctas);
        DecodeParams {
            tensors: tensors.into_iter().collect(),
            lse: c.operand(k, Operand::Lse),
            sinks: c.operand(k, Operand::Sinks),
            batch: match &lengths {
                Some(lengths) => lengths.batch,
                None => c.u32(k, "batch", problem.batch as u32),
            },
            heads_kv,
            seq_q,
            seq_kv,
            lengths,
            pages: PageTable::declare(k, c, problem),
            boxes: plan.tma.then(|| PageBoxes::declare(k, c, problem, plan)),
            factor: c.f32(k, "scale_log2e", factor_or_one(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: ValueDescale::declare(k, c, problem),
            parts: c.scratch(k, parts),
            counters: c.counter(k, counters),
            slots: plan.slots(problem, ctas).map(|slots| c.u32(k, "slots", slots)),
        }
    }
}

/// State of the CTA in registers, with the values known at emission.
pub(super) struct Decode<'a> {
    pub plan: &'a DecodePlan,
    pub baked: &'a Baked,
    pub params: DecodeParams,
    /// The type of O.
    half: Half,
    /// The type of Q and P in products: f16 with an 8-bit cache.
    product: Half,
    /// The pair types of 8-bit keys and values.
    narrow: Option<[Type; 2]>,
    pub threads: Threads,
    pub line: KeyLine,
    pieces: Pieces,
    cta: R32,
    pub ring: Ring,
    /// Memory through which warps merge.
    pub room: Shared,
    /// The sum of the warps' parts of S, if warps divide the head dims.
    sum: Option<WarpSum>,
    /// The lane's place for the fragments of Q, if they are not in registers.
    queries: Option<Shared>,
    /// The index of the warp among those that divide the keys of a block, or the head dims.
    pub part: R32,
    /// The thread's position among the warps that divide the keys of a block.
    key_threads: Threads,
    pub slices: [Slice; 2],
    /// The readers of the slices of K, and of that of V.
    keys: Vec<(Slice, MatrixReader)>,
    value: MatrixReader,
}

/// The state of the tile that the CTA computes.
pub(super) struct TileState {
    /// The fragments of Q; none if they are in shared memory.
    q: Vec<[R32; 4]>,
    pub o: AccTile,
    pub softmax: OnlineSoftmax,
    /// The factors of the scores of the lane's rows, with an 8-bit cache: the inverse of the power of two by
    /// which a row of Q was multiplied, times the descale factors.
    scores: Vec<F32>,
    /// The first block that the CTA computes.
    pub from: R32,
}

impl<'a> Decode<'a> {
    fn new(k: &mut Builder, plan: &'a DecodePlan, baked: &'a Baked, params: DecodeParams) -> Decode<'a> {
        let parts = if plan.dim_warps == 1 { plan.warps } else { plan.dim_warps };
        let threads = Threads::new(k, plan.threads(), parts);
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
        let (pieces, takers) = line.cut(k, plan.least_blocks);
        let cta = k.special(SpecialReg::CtaidX);
        let beyond = k.setp_u(CmpOp::Ge, cta, takers);
        k.exit_if(beyond);
        let shared = k.dynamic_shared(if plan.tma { SwizzledTile::ALIGNMENT } else { 128 });
        let slices = plan.slices(baked);
        let queries = plan.query_bytes(baked).map(|bytes| {
            let start = shared.at((plan.ring_bytes(baked) + plan.room_bytes(baked)).into());
            let of_warp = k.shared_index(start, threads.warp, bytes);
            k.shared_index(of_warp, threads.lane, 16)
        });
        let narrow = narrow_types(baked);
        Decode {
            plan,
            baked,
            half: half(baked),
            product: if narrow.is_some() { Half::F16 } else { half(baked) },
            narrow,
            line,
            pieces,
            cta,
            ring: Ring::new(k, plan, baked, &threads, shared),
            room: shared.at(plan.ring_bytes(baked).into()),
            queries,
            part: threads.part.unwrap_or_else(|| k.mov(0)),
            keys: slices
                .into_iter()
                .filter(|slice| slice.tensor == Tensor::K)
                .map(|slice| (slice, MatrixReader::chunks_first(k, &threads, plan.layout(slice))))
                .collect(),
            value: MatrixReader::rows_first(k, &threads, plan.layout(slices[values_tile(&slices)])),
            sum: (plan.dim_warps > 1).then(|| {
                let room = shared.at(plan.ring_bytes(baked).into());
                WarpSum::new(k, room, &threads, (ROWS, plan.warp_keys), plan.sum_buffers())
            }),
            slices,
            key_threads: if plan.dim_warps == 1 { threads } else { threads.of_all_columns() },
            threads,
            params,
        }
    }

    /// The kernel: the blocks of the CTA's piece, one after the other. Loads are `stages − 1` blocks ahead.
    fn body(&self, k: &mut Builder) {
        let start = self.pieces.start(k, self.cta);
        let next = k.add(self.cta, 1);
        let end = self.pieces.start(k, next);
        let left = k.sub(end, start);
        let none = k.setp_u(CmpOp::Eq, left, 0);
        k.exit_if(none);
        let at = self.line.find(k, start);
        let (ahead, to_load) = (at.owned(k), k.mov(left));
        self.request_first(k, &ahead, to_load);
        let stage = k.mov(0);
        let block = k.mov(start);
        let tile = self.tile(k);
        self.load_queries_of(k, &at, &tile);
        self.begin_tile(k, &at, &tile);
        if self.plan.piece.is_some() {
            return self.pieces(k, [&at, &ahead], &tile, (left, to_load, block));
        }
        k.do_while(|k| {
            self.ring.wait(k);
            self.request_next(k, &ahead, to_load, stage);
            self.visit(k, &at, &tile, stage);
            k.sub_to(left, left, 1);
            let next = k.add(at.block, 1);
            let ends = k.setp_s(CmpOp::Ge, next, at.entry.end);
            let last = k.setp_u(CmpOp::Eq, left, 0);
            let stops = k.or_pred(ends, last);
            let end = |k: &mut Builder| self.end_of_tile(k, &at, &tile, (block, left));
            k.if_else(stops, end, |k| k.mov_to(at.block, next));
            k.add_to(block, block, 1);
            self.ring.advance(k, stage);
            k.setp_u(CmpOp::Ne, left, 0)
        });
    }

    /// Registers of a tile, before its first block.
    fn tile(&self, k: &mut Builder) -> TileState {
        let [_, columns] = self.plan.warp_columns(self.baked);
        let softmax = self.softmax(k);
        TileState {
            q: if self.queries.is_some() { Vec::new() } else { self.fragments(k) },
            o: AccTile::zero(k, ROWS, columns),
            softmax,
            scores: if self.scales_scores() { vec![k.mov(1.0f32), k.mov(1.0f32)] } else { Vec::new() },
            from: k.mov(0),
        }
    }

    /// Registers of a softmax before its first block.
    pub(super) fn softmax(&self, k: &mut Builder) -> OnlineSoftmax {
        OnlineSoftmax::new(k, self.product, self.plan.rescale, self.params.factor, ROWS, None)
            .of_wide(self.baked.wide)
    }

    /// Registers for the fragments of Q.
    fn fragments(&self, k: &mut Builder) -> Vec<[R32; 4]> {
        let [columns, _] = self.plan.warp_columns(self.baked);
        (0..columns / 16).map(|_| std::array::from_fn(|_| k.mov(0))).collect()
    }

    /// The rows of the tile under the cursor, packed.
    fn rows(&self, k: &mut Builder, at: &LineCursor) -> RowRange {
        RowRange {
            first: k.mul(at.tile, self.plan.rows()),
            rows: self.plan.rows(),
            seq_q: at.entry.q.len,
            seq_kv: at.entry.kv.len,
            heads: self.baked.group_size(),
        }
    }

    /// The first of the warp's 16 rows.
    fn own_rows(&self, k: &mut Builder, rows: &RowRange) -> R32 {
        if self.plan.tiles() == 1 { rows.first } else { k.mad(self.threads.row_warp, ROWS, rows.first) }
    }

    /// The batch entry, the query head and the row in the tensor of the lane's row `below` of the tile, and
    /// whether the row exists.
    fn place(&self, k: &mut Builder, at: &LineCursor, rows: &RowRange, below: u32) -> ([R32; 3], Pred) {
        let first = self.own_rows(k, rows);
        let row = k.add(first, self.threads.quad);
        let row = k.add(row, below);
        let all = k.mul(rows.seq_q, rows.heads);
        let exists = k.setp_u(CmpOp::Lt, row, all);
        let [head, position] = rows.head_and_position(k, at.head, row);
        ([self.entry_of_queries(k, at), head, at.entry.q.row(k, position)], exists)
    }

    /// The batch index in Q, O and the LSE: 0 for packed queries.
    fn entry_of_queries(&self, k: &mut Builder, at: &LineCursor) -> R32 {
        if self.baked.lengths.q.packed.is_some() { k.mov(0) } else { at.batch }
    }

    /// Loads the queries of the tile under the cursor into the tile's registers, or into shared memory.
    pub(super) fn load_queries_of(&self, k: &mut Builder, at: &LineCursor, tile: &TileState) {
        let Some(room) = self.queries else {
            return self.load_queries(k, at, &tile.q, &tile.scores);
        };
        let q = self.fragments(k);
        self.load_queries(k, at, &q, &tile.scores);
        for (step, &words) in (0..).zip(&q) {
            k.st_vec(room.at(warp_vectors(step)), words);
        }
    }

    /// Resets the state of the tile, of which the block under the cursor is the first.
    pub(super) fn begin_tile(&self, k: &mut Builder, at: &LineCursor, tile: &TileState) {
        tile.softmax.reset(k, &tile.o);
        k.mov_to(tile.from, at.block);
    }

    /// Computes a block: S, the softmax, and O.
    pub(super) fn visit(&self, k: &mut Builder, at: &LineCursor, tile: &TileState, stage: R32) {
        let tiles = self.ring.tiles(k, stage);
        let s = self.products(k, tile, &tiles); // S = Q Kᵀ
        if let Some(sum) = &self.sum {
            sum.add(k, &s); // of all slices of the head dim
        }
        for (row, &factor) in (0..).zip(&tile.scores) {
            s.scale_row(k, row, factor);
        }
        let rows = self.rows(k, at);
        let mask = Masker::new(k, &self.params.band, &self.key_threads, &rows, ROWS, self.plan.warp_keys);
        let chain =
            ScoreChain { softcap: self.params.softcap.as_ref(), mask: Some(&mask), ..ScoreChain::default() };
        let partial = BlockScores::in_place(Coverage::Partial);
        let origin = k.mul(at.block, self.plan.block_n());
        chain.transform(k, &s, &partial, |_| origin);
        let hides = self.is_partial(k, at, &rows);
        k.if_(hides, |k| chain.hide(k, &s, &partial, |_| origin)); // −∞ where a row sees no key
        tile.softmax.update(k, &s, &tile.o); // m = max(m, S·c); O, l rescaled
        let p = tile.softmax.probabilities(k, &s); // P = exp2(S·c − m); l += Σ P
        let values = tiles[values_tile(&self.slices)];
        let value = OperandB { tile: self.value.open(k, values), tail: None };
        match self.narrow {
            None => mma_ab(k, MmaType::Half(self.product), &p, &value, &tile.o), // O += P V
            Some([_, of_values]) => mma_ab_widened(k, of_values, &p, &value.tile, &tile.o),
        }
    }

    /// Q Kᵀ, of the columns that the warp has.
    fn products(&self, k: &mut Builder, tile: &TileState, tiles: &[Shared; 2]) -> AccTile {
        let mut s: Option<AccTile> = None;
        let mut step = 0;
        for ((slice, reader), &at) in self.keys.iter().zip(tiles) {
            let key = OperandB { tile: reader.open(k, at), tail: None };
            let steps = slice.columns / 16;
            let q = match self.queries {
                None => {
                    let of_slice = &tile.q[step as usize..(step + steps) as usize];
                    OperandA::in_registers(self.product, of_slice)
                }
                Some(room) => OperandA::of_lanes(self.product, steps, room.at(warp_vectors(step))),
            };
            match (&s, self.narrow) {
                (Some(s), _) => mma_abt_onto(k, &q, &key, s),
                (None, None) => s = Some(mma_abt(k, &q, &key)),
                (None, Some([of_keys, _])) => s = Some(mma_abt_widened(k, of_keys, &q, &key.tile)),
            }
            step += steps;
        }
        s.expect("a warp has columns of K")
    }

    /// Whether some row of the tile does not see some key of the block.
    fn is_partial(&self, k: &mut Builder, at: &LineCursor, rows: &RowRange) -> Pred {
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

    /// Loads the tile's rows of Q as fragments of A (PTX ISA, "Matrix Fragments for mma.m16n8k16"), or in the
    /// order of [`mma_abt_widened`]. Rows that do not exist are zeros.
    fn load_queries(&self, k: &mut Builder, at: &LineCursor, q: &[[R32; 4]], scores: &[F32]) {
        let rows = self.rows(k, at);
        for below in [0, 8] {
            let (place, exists) = self.place(k, at, &rows, below);
            let from = self.row_of(k, Tensor::Q, place);
            let (size, apart) = if self.narrow.is_some() { (4, 4) } else { (2, 16) };
            let from = k.index(from, self.threads.column, size);
            let mut left = q.iter();
            let mut words: Vec<(Global, R32)> = Vec::new();
            for &(slice, _) in &self.keys {
                let from = self.in_row(k, from, slice);
                for (step, fragment) in (0..i64::from(slice.columns / 16)).zip(&mut left) {
                    let row = (below / 8) as usize;
                    words.push((from.at(32 * step), fragment[row]));
                    words.push((from.at(32 * step + apart), fragment[row + 2]));
                }
            }
            for &(_, word) in &words {
                k.mov_to(word, 0);
            }
            if self.baked.sign != Sign::Clear {
                k.guarded(exists, |k| words.iter().for_each(|&(from, word)| self.load_pair(k, word, from)));
            }
            if self.baked.sign == Sign::Negate {
                words.iter().for_each(|&(_, word)| k.xor_to(word, word, 0x8000_8000u32));
            }
            if let Some(&factor) = scores.get((below / 8) as usize) {
                let words: Vec<R32> = words.iter().map(|&(_, word)| word).collect();
                let inverse = (self.half_of_queries() == Half::Bf16).then(|| narrow_row(k, &words));
                let descale = self.params.score_descale.map(|descale| {
                    descale.load(k, HeadPlace { batch: at.batch, key_head: at.head, head: None })
                });
                let both = inverse.zip(descale).map(|(a, b)| k.mul(a, b));
                k.mov_to(factor, both.or(inverse).or(descale).unwrap_or(factor));
            }
        }
    }

    /// The type of Q, which has 16 bits.
    fn half_of_queries(&self) -> Half {
        if self.baked.dims.dtypes.q == DType::Bf16 { Half::Bf16 } else { Half::F16 }
    }

    /// Whether scores are multiplied by factors of their rows.
    fn scales_scores(&self) -> bool {
        let narrows = self.narrow.is_some() && self.half_of_queries() == Half::Bf16;
        narrows || self.params.score_descale.is_some()
    }

    /// Loads two neighbouring elements, one by one if they may lie at odd addresses.
    fn load_pair(&self, k: &mut Builder, word: R32, from: Global) {
        if self.plan.copy != CopyMode::Elements {
            return k.ld_to(word, from);
        }
        let [low, high] = [0, 2].map(|bytes| k.ld(from.at(bytes)));
        let pair = k.join16(low, high);
        k.mov_to(word, pair);
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

    /// The address of a row of Q or O.
    fn row_of(&self, k: &mut Builder, tensor: Tensor, place: [R32; 3]) -> Global {
        let TensorStart { start, batch_bytes, head_bytes } = self.params.tensors[tensor.into()];
        if tensor == Tensor::Out {
            return row_of_output(k, self.baked, (start, [batch_bytes, head_bytes]), place);
        }
        let [batch, head, row] = place.map(|n| k.zext(n));
        let of_batch = k.mad(batch, batch_bytes, start.base);
        let of_head = k.mad(head, head_bytes, of_batch);
        Global { base: k.mad(row, self.baked.row_bytes(tensor), of_head), ..start }
    }

    /// After the last block of a tile or of the piece: advances to the next block and begins its tile.
    /// Before, merges the warps, then the CTAs that divide the tile, and stores the tile if it is complete.
    /// `block` is the block's place on the line, and `left` the number of blocks after it.
    fn end_of_tile(&self, k: &mut Builder, at: &LineCursor, tile: &TileState, (block, left): (R32, R32)) {
        let done = at.owned(k);
        self.line.advance(k, at);
        let more = k.setp_u(CmpOp::Ne, left, 0);
        // Queries in registers that are not converted arrive during the merge.
        let early = self.queries.is_none() && self.narrow.is_none();
        if early {
            k.if_(more, |k| self.load_queries_of(k, at, tile));
        }
        // The warps have read what they merged before.
        if self.plan.warps > 1 && self.plan.dim_warps == 1 {
            k.bar_sync();
        }
        let (softmax, o) = tile.softmax.clone().merge(k, &self.key_threads, &tile.o, self.room);
        let blocks = k.sub(done.entry.end, done.entry.from);
        let before = k.sub(done.block, done.entry.from);
        let next = k.add(done.block, 1);
        let ends = k.setp_s(CmpOp::Ge, next, done.entry.end);
        let whole = k.setp_s_and(CmpOp::Eq, tile.from, done.entry.from, ends);
        let complete: R32 = k.selp(1, 0, whole);
        let divided = k.not_pred(whole);
        k.if_(divided, |k| {
            let first = k.sub(block, before);
            let end = k.add(first, blocks);
            let last = k.sub(end, 1);
            let merged = self.merge().join(k, &self.threads, [first, last], &softmax, &o);
            k.selp_to(complete, 1, 0, merged);
        });
        let complete = k.setp_u(CmpOp::Ne, complete, 0);
        k.if_(complete, |k| self.store(k, &done, &softmax, &o));
        if !early {
            k.if_(more, |k| self.load_queries_of(k, at, tile));
        }
        self.begin_tile(k, at, tile);
    }

    /// The buffers and counters of tiles that CTAs divide.
    pub(super) fn merge(&self) -> LineMerge {
        let DecodeParams { parts, counters, .. } = self.params;
        let lane_rows = if self.baked.few_rows { 1 } else { 2 };
        LineMerge { parts, counters, pieces: self.pieces, cta: self.cta, lane_rows }
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
        for (i, below) in [(0, 0), (1, 8)] {
            let (place, exists) = self.place(k, at, &rows, below);
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
}

/// The pair types of 8-bit keys and values.
fn narrow_types(baked: &Baked) -> Option<[Type; 2]> {
    let pair = |dtype| if dtype == DType::E5m2 { Type::E5m2x2 } else { Type::E4m3x2 };
    let dtypes = baked.dims.dtypes;
    dtypes.has_narrow_cache().then(|| [pair(dtypes.k), pair(dtypes.v)])
}

/// Rounds a row of bf16 to f16, times a power of two that takes its largest magnitude into 2^14..2^15: no
/// element overflows, and elements down to 2^-28 of the largest are normal numbers. Returns the inverse of
/// the power of two. The lanes of a quad hold the words of a row.
fn narrow_row(k: &mut Builder, words: &[R32]) -> F32 {
    const MAGNITUDES: u32 = 0x7FFF_7FFF;
    let largest = k.mov(0);
    for &word in words {
        let magnitudes = k.and(word, MAGNITUDES);
        let high = k.and(magnitudes, 0xFFFF_0000u32);
        let low = k.shl(magnitudes, 16);
        let both = k.max_u(high, low);
        k.max_u_to(largest, largest, both);
    }
    for mask in [1, 2] {
        let other = k.shfl_xor(largest, mask);
        k.max_u_to(largest, largest, other);
    }
    // Exponents of f32, with a bias of 127: 2^(14 - e) has 268 less the biased e. Its inverse is normal, too.
    let exponent = k.shr_u(largest, 23);
    let exponent = k.max_u(exponent, 15);
    let of_inverse = k.sub(exponent, 14);
    let of_factor = k.mov(268);
    let of_factor = k.sub(of_factor, exponent);
    let [factor, inverse] = [of_factor, of_inverse].map(|exponent| {
        let bits = k.shl(exponent, 23);
        k.from_bits(bits)
    });
    for &word in words {
        let [low, high] = k.unpack(Half::Bf16, word).map(|x| k.mul(x, factor));
        let pair = k.pack(Half::F16, low, high);
        k.mov_to(word, pair);
    }
    inverse
}
