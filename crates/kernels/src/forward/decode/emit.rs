//! The generator of the `decode` family.

use attend::{BlockScores, Coverage, Masker, OnlineSoftmax, ScoreChain};
use problem::{DType, Problem, Tensor};
use ptx::{Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, R32, Shared};
use tile::{
    AccTile, CopyMode, MatrixReader, MmaType, OperandA, OperandB, Sign, SwizzledTile, Threads, WarpSum,
    mma_ab, mma_ab_widened, mma_abt, mma_abt_onto, mma_abt_widened, warp_vectors,
};

use super::DecodePlan;
use super::line::LineCursor;
use super::params::DecodeParams;
use super::plan::{ProductUnit, ROWS};
use super::ring::Ring;
use super::slices::{Slice, values_tile};
use super::tiles::LineTiles;
use super::warpgroups::Warpgroups;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::descale::HeadPlace;
use crate::{Arch, Baked};

const ENTRY: &str = "flash_decode";

impl DecodePlan {
    /// What the code depends on.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let mut baked = Baked::of(problem, true);
        baked.dims.v_in_k = self.views(problem);
        let sign = if problem.softmax_scale() == 0.0 { Sign::Clear } else { baked.sign };
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        let apart = self.tiles() == 1 && self.products == ProductUnit::Warp;
        let tile_rows = if apart { rows.clamp(1, ROWS as usize).next_power_of_two() as u32 } else { ROWS };
        Baked { sign, tile_rows, ..baked }.with_row_bytes(problem, &Tensor::FORWARD)
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
        if self.products == ProductUnit::Warpgroup {
            let body = move |k: &mut Builder| Warpgroups::new(k, self, baked, params).body(k);
            return vec![Draft::new(k, contract, (ENTRY, launch), arch.full_target(), body)];
        }
        let body = move |k: &mut Builder| {
            let decode = Decode::new(k, self, baked, params);
            decode.body(k);
        };
        vec![Draft::new(k, contract, (ENTRY, launch), arch.target(), body)]
    }
}

/// State of a CTA whose warps multiply by `mma.sync`.
pub(super) struct Decode<'a> {
    /// The CTA's tiles of rows.
    pub tiles: LineTiles<'a>,
    pub ring: Ring,
    /// Memory through which warps merge.
    pub room: Shared,
    /// The sum of the warps' parts of S, if warps divide the head dims.
    sum: Option<WarpSum>,
    /// The lane's place for the fragments of Q, if they are not in registers.
    queries: Option<Shared>,
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
        let mut tiles = LineTiles::new(k, (plan, baked), params, threads);
        let shared = k.dynamic_shared(if plan.tma { SwizzledTile::ALIGNMENT } else { 128 });
        let slices = plan.slices(baked);
        let queries = plan.query_bytes(baked).map(|bytes| {
            let start = shared.at((plan.ring_bytes(baked) + plan.room_bytes(baked)).into());
            let of_warp = k.shared_index(start, threads.warp, bytes);
            k.shared_index(of_warp, threads.lane, 16)
        });
        let ring = Ring::new(k, plan, baked, &threads, shared);
        if threads.part.is_none() {
            tiles.part = k.mov(0);
        }
        Decode {
            ring,
            room: shared.at(plan.ring_bytes(baked).into()),
            queries,
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
            tiles,
        }
    }

    /// The kernel: the blocks of the CTA's piece, one after the other. Loads are `stages − 1` blocks ahead.
    fn body(&self, k: &mut Builder) {
        let start = self.tiles.pieces.start(k, self.tiles.cta);
        let next = k.add(self.tiles.cta, 1);
        let end = self.tiles.pieces.start(k, next);
        let left = k.sub(end, start);
        let none = k.setp_u(CmpOp::Eq, left, 0);
        k.exit_if(none);
        let at = self.tiles.line.find(k, start, &self.tiles.lanes);
        let (ahead, to_load) = (at.owned(k), k.mov(left));
        self.find_next(k, &ahead);
        let stage = k.mov(0);
        let block = k.mov(start);
        let tile = self.tile(k);
        // Queries in registers arrive together with the entries of the page table.
        self.request_queries(k, &at, &tile);
        self.request_first(k, &ahead, to_load);
        self.receive_queries(k, &at, &tile);
        self.begin_tile(k, &at, &tile);
        if self.tiles.plan.piece.is_some() {
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
        let [_, columns] = self.tiles.plan.warp_columns(self.tiles.baked);
        let softmax = self.tiles.softmax(k);
        TileState {
            q: if self.queries.is_some() { Vec::new() } else { self.fragments(k) },
            o: AccTile::zero(k, ROWS, columns),
            softmax,
            scores: if self.scales_scores() { vec![k.mov(1.0f32), k.mov(1.0f32)] } else { Vec::new() },
            from: k.mov(0),
        }
    }

    /// Registers for the fragments of Q.
    fn fragments(&self, k: &mut Builder) -> Vec<[R32; 4]> {
        let [columns, _] = self.tiles.plan.warp_columns(self.tiles.baked);
        (0..columns / 16).map(|_| std::array::from_fn(|_| k.mov(0))).collect()
    }

    /// Requests the queries of the tile under the cursor, if they stay in registers.
    pub(super) fn request_queries(&self, k: &mut Builder, at: &LineCursor, tile: &TileState) {
        if self.queries.is_none() {
            self.load_queries(k, at, &tile.q);
        }
    }

    /// Waits for the queries that were requested, and converts them. Loads those of the tile under the cursor
    /// if they do not stay in registers.
    pub(super) fn receive_queries(&self, k: &mut Builder, at: &LineCursor, tile: &TileState) {
        let Some(room) = self.queries else {
            return self.convert_queries(k, at, &tile.q, &tile.scores);
        };
        let q = self.fragments(k);
        self.load_queries(k, at, &q);
        self.convert_queries(k, at, &q, &tile.scores);
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
        let rows = self.tiles.rows(k, at);
        let mask = Masker::new(
            k,
            &self.tiles.params.band,
            &self.key_threads,
            &rows,
            ROWS,
            self.tiles.plan.warp_keys,
        );
        let chain = ScoreChain {
            softcap: self.tiles.params.softcap.as_ref(),
            mask: Some(&mask),
            ..ScoreChain::default()
        };
        let partial = BlockScores::in_place(Coverage::Partial);
        let origin = k.mul(at.block, self.tiles.plan.block_n());
        chain.transform(k, &s, &partial, |_| origin);
        let hides = self.tiles.is_partial(k, at, &rows);
        k.if_(hides, |k| chain.hide(k, &s, &partial, |_| origin)); // −∞ where a row sees no key
        tile.softmax.update(k, &s, &tile.o); // m = max(m, S·c); O, l rescaled
        let p = tile.softmax.probabilities(k, &s); // P = exp2(S·c − m); l += Σ P
        let values = tiles[values_tile(&self.slices)];
        let value = OperandB { tile: self.value.open(k, values), tail: None };
        match self.tiles.narrow {
            None => mma_ab(k, MmaType::Half(self.tiles.product), &p, &value, &tile.o), // O += P V
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
                    OperandA::in_registers(self.tiles.product, of_slice)
                }
                Some(room) => OperandA::of_lanes(self.tiles.product, steps, room.at(warp_vectors(step))),
            };
            match (&s, self.tiles.narrow) {
                (Some(s), _) => mma_abt_onto(k, &q, &key, s),
                (None, None) => s = Some(mma_abt(k, &q, &key)),
                (None, Some([of_keys, _])) => s = Some(mma_abt_widened(k, of_keys, &q, &key.tile)),
            }
            step += steps;
        }
        s.expect("a warp has columns of K")
    }

    /// Loads the tile's rows of Q as fragments of A (PTX ISA, "Matrix Fragments for mma.m16n8k16"), or in the
    /// order of [`mma_abt_widened`]. Rows that do not exist are zeros.
    fn load_queries(&self, k: &mut Builder, at: &LineCursor, q: &[[R32; 4]]) {
        q.iter().flatten().for_each(|&word| k.mov_to(word, 0));
        if self.tiles.baked.sign == Sign::Clear {
            return;
        }
        let rows = self.tiles.rows(k, at);
        for row in 0..self.tiles.lane_rows() {
            let (place, exists) = self.tiles.place(k, at, &rows, 8 * row as u32);
            let from = self.tiles.row_of(k, Tensor::Q, place);
            let (size, apart) = if self.tiles.narrow.is_some() { (4, 4) } else { (2, 16) };
            let from = k.index(from, self.tiles.threads.column, size);
            let mut left = q.iter();
            let mut words: Vec<(Global, R32)> = Vec::new();
            for &(slice, _) in &self.keys {
                let from = self.in_row(k, from, slice);
                for (step, fragment) in (0..i64::from(slice.columns / 16)).zip(&mut left) {
                    words.push((from.at(32 * step), fragment[row]));
                    words.push((from.at(32 * step + apart), fragment[row + 2]));
                }
            }
            k.guarded(exists, |k| words.iter().for_each(|&(from, word)| self.load_pair(k, word, from)));
        }
    }

    /// Negates the queries under the cursor if the problem does, and with an 8-bit cache converts them and
    /// sets the factors of the scores.
    fn convert_queries(&self, k: &mut Builder, at: &LineCursor, q: &[[R32; 4]], scores: &[F32]) {
        for row in 0..self.tiles.lane_rows() {
            let words: Vec<R32> = q.iter().flat_map(|fragment| [fragment[row], fragment[row + 2]]).collect();
            if self.tiles.baked.sign == Sign::Negate {
                words.iter().for_each(|&word| k.xor_to(word, word, 0x8000_8000u32));
            }
            if let Some(&factor) = scores.get(row) {
                let inverse = (self.half_of_queries() == Half::Bf16).then(|| narrow_row(k, &words));
                let descale = self.tiles.params.score_descale.map(|descale| {
                    descale.load(k, HeadPlace { batch: at.batch, key_head: at.head, head: None })
                });
                let both = inverse.zip(descale).map(|(a, b)| k.mul(a, b));
                k.mov_to(factor, both.or(inverse).or(descale).unwrap_or(factor));
            }
        }
    }

    /// The type of Q, which has 16 bits.
    fn half_of_queries(&self) -> Half {
        if self.tiles.baked.dims.dtypes.q == DType::Bf16 { Half::Bf16 } else { Half::F16 }
    }

    /// Whether scores are multiplied by factors of their rows.
    fn scales_scores(&self) -> bool {
        let narrows = self.tiles.narrow.is_some() && self.half_of_queries() == Half::Bf16;
        narrows || self.tiles.params.score_descale.is_some()
    }

    /// Loads two neighbouring elements, one by one if they may lie at odd addresses.
    fn load_pair(&self, k: &mut Builder, word: R32, from: Global) {
        if self.tiles.plan.copy != CopyMode::Elements {
            return k.ld_to(word, from);
        }
        let [low, high] = [0, 2].map(|bytes| k.ld(from.at(bytes)));
        let pair = k.join16(low, high);
        k.mov_to(word, pair);
    }

    /// After the last block of a tile or of the piece: advances to the next block and begins its tile.
    /// Before, merges the warps, then the CTAs that divide the tile, and stores the tile if it is complete.
    /// `block` is the block's place on the line, and `left` the number of blocks after it.
    fn end_of_tile(&self, k: &mut Builder, at: &LineCursor, tile: &TileState, (block, left): (R32, R32)) {
        let done = at.owned(k);
        self.tiles.line.advance(k, at);
        let more = k.setp_u(CmpOp::Ne, left, 0);
        k.if_(more, |k| self.request_queries(k, at, tile)); // they arrive during the merge
        // The warps have read what they merged before.
        if self.tiles.plan.warps > 1 && self.tiles.plan.dim_warps == 1 {
            k.bar_sync();
        }
        let (softmax, o) = self.merge_warps(k, tile);
        self.tiles.finish(k, &done, (tile.from, block), (&softmax, &o));
        k.if_(more, |k| self.receive_queries(k, at, tile));
        self.begin_tile(k, at, tile);
    }

    /// The merge of the warps that divide the keys: each has its share of the columns of O.
    pub(super) fn merge_warps(&self, k: &mut Builder, tile: &TileState) -> (OnlineSoftmax, AccTile) {
        let rows = self.tiles.lane_rows();
        tile.softmax.clone().merge_rows(k, &self.key_threads, &tile.o, rows, self.room)
    }
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
