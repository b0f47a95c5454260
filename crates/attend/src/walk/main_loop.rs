//! Main loop of a consumer warpgroup over the KV blocks of a tile, from the last block to the first, with
//! keys and values from rings: FlashAttention-3 (Shah et al. 2024), Algorithm 2.
//!
//! [`MainLoop::blocks`] is the loop in issue order. The numbers in the margin are the line numbers of
//! Algorithm 2. The equations are in the log2 domain, with `c = scale · log2 e` and `α = exp2(m_old − m)`;
//! [`Rescale`](crate::Rescale) says when m is raised. With [`Order::InTurn`] the warpgroup waits for both
//! products in line 12.
//!
//! The scores of a block are issued together with the P V of the block before it. The warpgroup then waits
//! only for the scores. A `wgmma` with A in registers blocks its warps until these registers are read, some
//! 200 cycles before the product ends. Within one warpgroup the product therefore overlaps only the beginning
//! of the exponentials; the rest of the overlap must come from another warpgroup ([`PingPong`]).
//!
//! Variants of the loop have files of their own: `halved.rs` replaces the first block, `speculative.rs` the
//! softmax of a full block, and `overlapped.rs` the end of a tile. `skips.rs` skips blocks before the first
//! visited block and after the last one.

use ptx::{Builder, CmpOp, F32, Pred, R32};
use tile::{AccTile, Accumulate, OperandTile, OperandType, PairSum, PingPong, Products, TileStream};

use super::{BlockOutput, Order, SharedProbs, Skips, Tiles, Walk};
use crate::{
    BlockList, Chains, Coverage, Elements, Hides, Masker, OnlineSoftmax, RowPrograms, ScoreFactors, Softcap,
    SpeculativeMax, StagedTables, ValueFactors, WarpKeys, Words,
};

/// Registers and rings of a consumer warpgroup.
#[derive(Clone, Debug)]
pub struct MainLoop {
    /// The type to which P is rounded.
    pub weights: OperandType,
    /// Keys of a block.
    pub block_n: u32,
    /// Whether the P V of a block is in flight during the softmax of the next block.
    pub order: Order,
    /// The ring of Q, read as the warpgroup's own 64 rows.
    pub queries: TileStream,
    /// Present if a tile keeps its stage of Q until the next tile has computed its first block, because O is
    /// stored from that stage. Non-zero after the first tile.
    pub kept_queries: Option<R32>,
    /// The ring of K.
    pub keys: TileStream,
    /// The ring of V.
    pub values: TileStream,
    /// The rings of tables whose elements come from shared memory.
    pub tables: StagedTables,
    /// The products S = Q Kᵀ.
    pub products: Products,
    /// The products P V, which add to O.
    pub output_products: Products,
    /// The sum of the two parts of S, if two warpgroups divide the head dim.
    pub sum: Option<PairSum>,
    /// The softcap, if there is one.
    pub softcap: Option<Softcap>,
    /// Chains of the reductions of maximum and sum.
    pub chains: Chains,
    /// S.
    pub s: AccTile,
    /// P.
    pub p: OperandTile,
    /// The copy of P in shared memory, if P V takes P from there.
    pub shared_probs: Option<SharedProbs>,
    /// The accumulator of O. Its last columns are the row sums, if a product computes them.
    pub o: AccTile,
    /// The accumulator of one block's P V, if the products do not add to O directly.
    pub block_output: Option<BlockOutput>,
    /// The ping-pong barriers, if the warpgroups use the tensor cores in turn.
    pub ping_pong: Option<PingPong>,
    /// How successive tiles of query rows follow each other.
    pub tiles: Tiles,
    /// Non-zero if the warpgroup's rows see at most the first half of the first visited block; `None` if the
    /// kernel does not use this variant.
    pub halved: Option<R32>,
    /// Blocks to skip, if the warpgroup visits only blocks that its own rows see.
    pub skips: Option<Skips>,
    /// Present if full blocks take no row max (speculative softmax).
    pub speculative: Option<SpeculativeMax>,
}

/// The mask and the softmax of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub struct TileRows<'a> {
    /// The masker; `None` if neither the band nor the number of keys hides a key.
    pub mask: Option<&'a Masker>,
    pub softmax: &'a OnlineSoftmax,
    /// The score and mask programs, if there are any.
    pub programs: Option<&'a RowPrograms<'a>>,
    /// The list of blocks, if the walk counts positions in a list; `None` if it counts blocks.
    pub list: Option<&'a BlockList>,
    /// The descale factors of the scores, if Q or K has one per block of rows.
    pub scores: Option<&'a ScoreFactors>,
    /// The descale factors of V, if V has one per block of rows.
    pub values: Option<&'a ValueFactors>,
}

/// The descale factors of a block, loaded before the block's scores are awaited.
pub(super) struct Loaded {
    of_keys: Vec<F32>,
    pub(super) of_values: Option<(F32, WarpKeys)>,
}

/// A visited block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visit {
    pub block: R32,
    pub coverage: Coverage,
    /// Which masks hide keys, if a list says so.
    hides: Option<Hides>,
}

impl Visit {
    /// The block of a list's entry; without a list, the block at `position`.
    fn of(entry: Option<(R32, Hides)>, position: R32, coverage: Coverage) -> Visit {
        let (block, hides) = entry.unzip();
        Visit { block: block.unwrap_or(position), coverage, hides }
    }
}

impl TileRows<'_> {
    /// The first block of the walk, which is at `position`.
    fn first_visit(&self, k: &mut Builder, position: R32, coverage: Coverage) -> Visit {
        Visit::of(self.list.map(|list| list.first(k)), position, coverage)
    }

    /// The block at a position of the walk.
    fn visit(&self, k: &mut Builder, position: R32, coverage: Coverage) -> Visit {
        Visit::of(self.list.map(|list| list.entry(k, position)), position, coverage)
    }
}

impl MainLoop {
    /// Adds the P V of a tile's blocks to O, after the skipped blocks. `advance` moves to the next tile and
    /// returns whether there is one, which is also the result.
    pub fn attend(
        &self,
        k: &mut Builder,
        walk: &Walk,
        rows: &TileRows,
        advance: impl FnOnce(&mut Builder) -> Pred,
    ) -> Pred {
        self.blocks(k, walk, rows);
        match self.kept_queries {
            None => self.queries.release(k),
            Some(kept) => {
                self.queries.keep(k);
                k.mov_to(kept, 1);
            }
        }
        if let Some(skips) = self.skips.as_ref().filter(|skips| skips.has_last_blocks()) {
            // The producer takes the next tile after most requests of this one, which may wait for the stages
            // of the skipped blocks. So these come first.
            self.last_output(k);
            self.values.release(k);
            skips.after_last_values(k);
            return advance(k);
        }
        let more = advance(k);
        match self.tiles {
            Tiles::InTurn => {
                self.last_output(k);
                self.values.release(k);
            }
            Tiles::Overlapped => self.last_output_overlapped(k, more),
        }
        more
    }

    /// Like [`MainLoop::attend`], for a warpgroup with a single tile: the stages of Q and of the last V need
    /// not be released.
    pub fn attend_once(&self, k: &mut Builder, walk: &Walk, rows: &TileRows) {
        self.blocks(k, walk, rows);
        self.last_output(k);
    }

    /// All steps of a tile except the P V of its last block.
    fn blocks(&self, k: &mut Builder, walk: &Walk, rows: &TileRows) {
        let MainLoop { weights, chains, keys, values, s, p, .. } = self;
        let softmax = rows.softmax;
        self.clear_output(k); //                                          2  O = 0 (`softmax`: l = 0, m = −∞)
        let position = walk.first(k);
        self.read_ahead(k, walk, position, rows);
        let first = rows.first_visit(k, position, walk.first_coverage());
        let factors = self.load_factors(k, &first, rows);
        self.first_block(k, &first, (rows, &factors)); //                3–6
        self.set_value_factors(k, &factors, rows);
        if let Some(kept) = self.kept_queries {
            self.queries.release_kept(k, kept);
        }
        walk.rest(k, position, |k, coverage| {
            //                                                            7  for each further block
            let visit = rows.visit(k, position, coverage);
            let factors = self.load_factors(k, &visit, rows);
            let mut staged = Vec::new(); //                                  elements of tables in tiles
            let read = |k: &mut Builder| staged = self.tables.read(k, self.block_n);
            self.issue_both(k, read); //                               8–11  S = Q Kᵀ, beside O += P V
            self.wait_for_scores(k); //                                  12
            self.add_halves(k, s); //                                        S of both halves of the head dim
            self.descale(k, s, &factors, rows); //                           S·f, if f changes with the block
            self.cap(k, s); //                                               S = tanh(S·c'), if capped
            self.run_programs(k, s, &visit, rows, (Elements::Ahead, &staged)); // S = score(S)
            self.read_ahead(k, walk, position, rows);
            if let (Some(speculative), Coverage::Full) = (&self.speculative, coverage) {
                return self.softmax_speculative(k, speculative, &visit, (rows, &factors, &staged));
            }
            keys.release(k); //                                          15  for K
            self.hide(k, s, &visit, rows); //                                S = −∞ where a row sees no key
            let rescale = softmax.update_row_max(k, s, *chains); //      13  m = max(m, S·c); l·α
            let sums = softmax.exponentials(k, s, *chains); //           13  P = exp2(S·c − m)
            softmax.add_sums(k, &sums); //                               13  l += Σ P
            self.wait_for_output(k); //                                  14
            values.release(k); //                                        15  for V
            s.round_to(k, *weights, p); //                               16  P, rounded to the input type
            self.add_output(k); //                                           O += P V, if by block
            self.rescale_output(k, &rescale); //                         14  O·α
            self.set_value_factors(k, &factors, rows);
        });
    }

    /// The first block, up to its probabilities.
    fn first_block(&self, k: &mut Builder, visit: &Visit, rows: (&TileRows, &Loaded)) {
        if let Some(halved) = self.halved {
            return self.first_block_halved(k, halved, visit, rows);
        }
        if self.tiles == Tiles::InTurn {
            self.wait_for_first(k); //                                    3
            self.first_scores(k, &self.s); //                           4–5  S = Q Kᵀ
        }
        self.skip_owed_values(k);
        self.first_softmax(k, (&self.s, &self.p), visit, rows); //        6  m, P and l from S
    }

    /// Issues the scores of a block and the P V of the block before it, and runs `between` between the two.
    /// With ping-pong scheduling, the warpgroup waits for its turn first.
    pub(super) fn issue_both(&self, k: &mut Builder, between: impl FnOnce(&mut Builder)) {
        self.keys.wait(k); //                                             8
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.wait(k);
        }
        self.issue(k, |k| self.scores(k, &self.s)); //                    9  S = Q Kᵀ
        between(k);
        self.values.wait(k); //                                          10
        self.output(k); //                                               11  O += P V
        k.wgmma_commit();
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.arrive(k);
        }
    }

    /// The P V of a tile's last block, with nothing else in flight.
    pub(super) fn last_output(&self, k: &mut Builder) {
        self.values.wait(k); //                                          18
        self.issue(k, |k| self.output(k)); //                            19  O += P V
        k.wgmma_wait(0);
        self.add_output(k);
    }

    /// Waits for a tile's queries and the keys of its first block.
    pub(super) fn wait_for_first(&self, k: &mut Builder) {
        self.queries.wait(k);
        if let Some(skips) = &self.skips {
            skips.before_first_keys(k);
        }
        self.keys.wait(k);
    }

    /// The scores of the first block for as many keys as `s` has columns, with no other product in flight.
    pub(super) fn first_scores(&self, k: &mut Builder, s: &AccTile) {
        self.issue(k, |k| self.scores(k, s));
        k.wgmma_wait(0);
        self.keys.release(k);
    }

    /// The softmax of a tile's first block, or of the part of the block that `s` holds. O is zero, so nothing
    /// is rescaled.
    pub(super) fn first_softmax(
        &self,
        k: &mut Builder,
        (s, p): (&AccTile, &OperandTile),
        visit: &Visit,
        (rows, factors): (&TileRows, &Loaded),
    ) {
        let staged = self.tables.read(k, 8 * s.n_tiles());
        self.add_halves(k, s);
        self.descale(k, s, factors, rows);
        self.cap(k, s);
        self.run_programs(k, s, visit, rows, (Elements::InPlace, &staged));
        self.hide(k, s, visit, rows);
        rows.softmax.update_row_max(k, s, self.chains);
        let sums = rows.softmax.exponentials(k, s, self.chains);
        rows.softmax.add_sums(k, &sums);
        s.round_to(k, self.weights, p);
    }

    /// Waits for the scores. In order [`Order::ScoresAhead`], P V may still be in flight.
    fn wait_for_scores(&self, k: &mut Builder) {
        match self.order {
            Order::ScoresAhead => k.wgmma_wait(1),
            Order::InTurn => k.wgmma_wait(0),
        }
    }

    /// Waits for the P V of the block before.
    pub(super) fn wait_for_output(&self, k: &mut Builder) {
        if self.order == Order::ScoresAhead {
            k.wgmma_wait(0);
        }
    }

    /// Issues a group of products, after a fence for the registers that the warps have written.
    pub(super) fn issue(&self, k: &mut Builder, products: impl FnOnce(&mut Builder)) {
        k.wgmma_fence();
        products(k);
        k.wgmma_commit();
    }

    /// S = Q Kᵀ of the current block for as many keys as `s` has columns.
    pub(super) fn scores(&self, k: &mut Builder, s: &AccTile) {
        let key = self.keys.matrix(k);
        let q = self.queries.matrix(k);
        self.products.wgmma_ss(k, q, key, s, Accumulate::Set);
    }

    /// O += P V of the current values.
    fn output(&self, k: &mut Builder) {
        if let Some(probs) = &self.shared_probs {
            probs.write(k, &self.p);
        }
        let value = self.values.matrix(k);
        let (sums, accumulate) = match &self.block_output {
            None => (&self.o, Accumulate::Add),
            Some(block) => (&block.sums, Accumulate::Set),
        };
        match &self.shared_probs {
            None => self.output_products.wgmma_rs(k, &self.p, value, sums, accumulate),
            Some(probs) => self.output_products.wgmma_ss(k, probs.matrix, value, sums, accumulate),
        }
    }

    /// If two warpgroups divide the head dim, adds the scores of the other half. The second barrier ensures
    /// that the exchange buffer is not overwritten by the next scores before both warps have read it.
    fn add_halves(&self, k: &mut Builder, s: &AccTile) {
        if let Some(sum) = &self.sum {
            sum.add(k, s);
            sum.wait(k);
        }
    }

    /// Loads the descale factors of a block, if they change from block to block.
    fn load_factors(&self, k: &mut Builder, visit: &Visit, rows: &TileRows) -> Loaded {
        if rows.scores.is_none() && rows.values.is_none() {
            return Loaded { of_keys: Vec::new(), of_values: None };
        }
        let origin = k.mul(visit.block, self.block_n);
        let keys = WarpKeys { origin, count: self.block_n, coverage: visit.coverage };
        Loaded {
            of_keys: rows.scores.map_or(Vec::new(), |scores| scores.load(k, &keys)),
            of_values: rows.values.map(|values| (values.load(k, &keys), keys)),
        }
    }

    /// Multiplies the scores by the descale factors of a block, if they change from block to block.
    pub(super) fn descale(&self, k: &mut Builder, s: &AccTile, factors: &Loaded, rows: &TileRows) {
        if let Some(scores) = rows.scores {
            scores.apply(k, s, &factors.of_keys);
            scores.enter(k);
        }
    }

    /// Applies the softcap, if there is one.
    pub(super) fn cap(&self, k: &mut Builder, s: &AccTile) {
        if let Some(softcap) = &self.softcap {
            softcap.apply(k, s);
        }
    }

    /// Runs the score and mask programs, if there are any.
    pub(super) fn run_programs(
        &self,
        k: &mut Builder,
        s: &AccTile,
        visit: &Visit,
        rows: &TileRows,
        (elements, staged): (Elements, &[Words]),
    ) {
        if let Some(programs) = rows.programs {
            let hides = visit.hides.filter(|_| programs.only_mask() && visit.coverage == Coverage::Partial);
            Hides::by_program(hides, k, |k| {
                let origin = k.mul(visit.block, self.block_n);
                programs.apply_with(k, s, (origin, visit.coverage), elements, staged);
            });
        }
    }

    /// Reads table elements for the block after the one at `position`, if there is such a block. All of its
    /// keys exist: only the first block is ragged.
    fn read_ahead(&self, k: &mut Builder, walk: &Walk, position: R32, rows: &TileRows) {
        let Some(programs) = rows.programs.filter(|programs| programs.reads_ahead()) else { return };
        let more = k.setp_s(CmpOp::Gt, position, walk.from.clone());
        k.if_(more, |k| {
            let next = k.sub(position, 1);
            let block = rows.list.map_or(next, |list| list.block(k, next));
            let origin = k.mul(block, self.block_n);
            programs.read_ahead(k, origin);
        });
    }

    /// Hides the keys of a partial block that a row does not see.
    fn hide(&self, k: &mut Builder, s: &AccTile, visit: &Visit, rows: &TileRows) {
        if let (Some(mask), Coverage::Partial) = (rows.mask, visit.coverage) {
            Hides::by_band(visit.hides, k, |k| {
                let origin = k.mul(visit.block, self.block_n);
                mask.apply(k, s, origin, visit.coverage);
            });
        }
    }
}
