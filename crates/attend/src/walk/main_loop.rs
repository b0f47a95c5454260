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
    BlockList, BlockScores, Chains, Coverage, Elements, Hides, OnlineSoftmax, ScoreChain, SpeculativeMax,
    StagedTables, ValueFactors, WarpKeys, Words,
};

/// Registers and rings of a consumer warpgroup.
#[derive(Clone, Debug)]
pub struct MainLoop {
    /// The type to which P is rounded.
    pub weights: OperandType,
    /// Keys of a block.
    pub block_n: u32,
    /// Chains of the reductions of maximum and sum.
    pub chains: Chains,
    pub rings: Rings,
    pub products: LoopProducts,
    pub tiles: LoopTiles,
    pub schedule: LoopSchedule,
}

/// The rings from which the loop reads.
#[derive(Clone, Debug)]
pub struct Rings {
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
}

/// The products of the loop.
#[derive(Clone, Debug)]
pub struct LoopProducts {
    /// S = Q Kᵀ.
    pub scores: Products,
    /// P V, which adds to O.
    pub output: Products,
    /// The sum of the two parts of S, if two warpgroups divide the head dim.
    pub sum: Option<PairSum>,
}

/// The tiles of the loop in registers.
#[derive(Clone, Debug)]
pub struct LoopTiles {
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
}

/// The order of the loop's steps, and its variants.
#[derive(Clone, Debug)]
pub struct LoopSchedule {
    /// Whether the P V of a block is in flight during the softmax of the next block.
    pub order: Order,
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

/// The scores and the softmax of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub struct TileRows<'a> {
    /// The steps between the product of Q and K and the softmax.
    pub chain: ScoreChain<'a>,
    pub softmax: &'a OnlineSoftmax,
    /// The list of blocks, if the walk counts positions in a list; `None` if it counts blocks.
    pub list: Option<&'a BlockList>,
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
    /// The block's scores.
    pub(super) fn scores<'a>(
        &self,
        factors: &'a Loaded,
        elements: (Elements, &'a [Words]),
    ) -> BlockScores<'a> {
        BlockScores {
            coverage: self.coverage,
            hides: self.hides,
            descale: (&factors.of_keys, true),
            elements,
        }
    }

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
        match self.rings.kept_queries {
            None => self.rings.queries.release(k),
            Some(kept) => {
                self.rings.queries.keep(k);
                k.mov_to(kept, 1);
            }
        }
        if let Some(skips) = self.schedule.skips.as_ref().filter(|skips| skips.has_last_blocks()) {
            // The producer takes the next tile after most requests of this one, which may wait for the stages
            // of the skipped blocks. So these come first.
            self.last_output(k);
            self.rings.values.release(k);
            skips.after_last_values(k);
            return advance(k);
        }
        let more = advance(k);
        match self.schedule.tiles {
            Tiles::InTurn => {
                self.last_output(k);
                self.rings.values.release(k);
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
        let MainLoop { weights, chains, rings, tiles, schedule, .. } = self;
        let (s, p, softmax) = (&tiles.s, &tiles.p, rows.softmax);
        self.clear_output(k); //                                          2  O = 0 (`softmax`: l = 0, m = −∞)
        let position = walk.first(k);
        self.read_ahead(k, walk, position, rows);
        let first = rows.first_visit(k, position, walk.first_coverage());
        let factors = self.load_factors(k, &first, rows);
        self.first_block(k, &first, (rows, &factors)); //                3–6
        self.set_value_factors(k, &factors, rows);
        if let Some(kept) = self.rings.kept_queries {
            self.rings.queries.release_kept(k, kept);
        }
        walk.rest(k, position, |k, coverage| {
            //                                                            7  for each further block
            let visit = rows.visit(k, position, coverage);
            let factors = self.load_factors(k, &visit, rows);
            let mut staged = Vec::new(); //                                  elements of tables in tiles
            let read = |k: &mut Builder| staged = rings.tables.read(k, self.block_n);
            self.issue_both(k, read); //                               8–11  S = Q Kᵀ, beside O += P V
            self.wait_for_scores(k); //                                  12
            self.add_halves(k, s); //                                        S of both halves of the head dim
            let block = visit.scores(&factors, (Elements::Ahead, &staged));
            let origin = |k: &mut Builder| self.origin(k, &visit);
            rows.chain.transform(k, s, &block, origin); //                   S = score(S·f)
            self.read_ahead(k, walk, position, rows);
            if let (Some(speculative), Coverage::Full) = (&schedule.speculative, coverage) {
                return self.softmax_speculative(k, speculative, &visit, (rows, &factors, &staged));
            }
            rings.keys.release(k); //                                    15  for K
            rows.chain.hide(k, s, &block, origin); //                        S = −∞ where a row sees no key
            let rescale = softmax.update_row_max(k, s, *chains); //      13  m = max(m, S·c); l·α
            let sums = softmax.exponentials(k, s, *chains); //           13  P = exp2(S·c − m)
            softmax.add_sums(k, &sums); //                               13  l += Σ P
            self.wait_for_output(k); //                                  14
            rings.values.release(k); //                                  15  for V
            s.round_to(k, *weights, p); //                               16  P, rounded to the input type
            self.add_output(k); //                                           O += P V, if by block
            self.rescale_output(k, &rescale); //                         14  O·α
            self.set_value_factors(k, &factors, rows);
        });
    }

    /// The first block, up to its probabilities.
    fn first_block(&self, k: &mut Builder, visit: &Visit, rows: (&TileRows, &Loaded)) {
        if let Some(halved) = self.schedule.halved {
            return self.first_block_halved(k, halved, visit, rows);
        }
        if self.schedule.tiles == Tiles::InTurn {
            self.wait_for_first(k); //                                    3
            self.first_scores(k, &self.tiles.s); //                           4–5  S = Q Kᵀ
        }
        self.skip_owed_values(k);
        self.first_softmax(k, (&self.tiles.s, &self.tiles.p), visit, rows); //        6  m, P and l from S
    }

    /// Issues the scores of a block and the P V of the block before it, and runs `between` between the two.
    /// With ping-pong scheduling, the warpgroup waits for its turn first.
    pub(super) fn issue_both(&self, k: &mut Builder, between: impl FnOnce(&mut Builder)) {
        self.rings.keys.wait(k); //                                             8
        if let Some(ping_pong) = &self.schedule.ping_pong {
            ping_pong.wait(k);
        }
        self.issue(k, |k| self.scores(k, &self.tiles.s)); //                    9  S = Q Kᵀ
        between(k);
        self.rings.values.wait(k); //                                          10
        self.output(k); //                                               11  O += P V
        k.wgmma_commit();
        if let Some(ping_pong) = &self.schedule.ping_pong {
            ping_pong.arrive(k);
        }
    }

    /// The P V of a tile's last block, with nothing else in flight.
    pub(super) fn last_output(&self, k: &mut Builder) {
        self.rings.values.wait(k); //                                          18
        self.issue(k, |k| self.output(k)); //                            19  O += P V
        k.wgmma_wait(0);
        self.add_output(k);
    }

    /// Waits for a tile's queries and the keys of its first block.
    pub(super) fn wait_for_first(&self, k: &mut Builder) {
        self.rings.queries.wait(k);
        if let Some(skips) = &self.schedule.skips {
            skips.before_first_keys(k);
        }
        self.rings.keys.wait(k);
    }

    /// The scores of the first block for as many keys as `s` has columns, with no other product in flight.
    pub(super) fn first_scores(&self, k: &mut Builder, s: &AccTile) {
        self.issue(k, |k| self.scores(k, s));
        k.wgmma_wait(0);
        self.rings.keys.release(k);
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
        let staged = self.rings.tables.read(k, 8 * s.n_tiles());
        self.add_halves(k, s);
        let block = visit.scores(factors, (Elements::InPlace, &staged));
        rows.chain.apply(k, s, &block, |k| self.origin(k, visit));
        rows.softmax.update_row_max(k, s, self.chains);
        let sums = rows.softmax.exponentials(k, s, self.chains);
        rows.softmax.add_sums(k, &sums);
        s.round_to(k, self.weights, p);
    }

    /// Waits for the scores. In order [`Order::ScoresAhead`], P V may still be in flight.
    fn wait_for_scores(&self, k: &mut Builder) {
        match self.schedule.order {
            Order::ScoresAhead => k.wgmma_wait(1),
            Order::InTurn => k.wgmma_wait(0),
        }
    }

    /// Waits for the P V of the block before.
    pub(super) fn wait_for_output(&self, k: &mut Builder) {
        if self.schedule.order == Order::ScoresAhead {
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
        let key = self.rings.keys.matrix(k);
        let q = self.rings.queries.matrix(k);
        self.products.scores.wgmma_ss(k, q, key, s, Accumulate::Set);
    }

    /// O += P V of the current values.
    fn output(&self, k: &mut Builder) {
        if let Some(probs) = &self.tiles.shared_probs {
            probs.write(k, &self.tiles.p);
        }
        let value = self.rings.values.matrix(k);
        let (sums, accumulate) = match &self.tiles.block_output {
            None => (&self.tiles.o, Accumulate::Add),
            Some(block) => (&block.sums, Accumulate::Set),
        };
        match &self.tiles.shared_probs {
            None => self.products.output.wgmma_rs(k, &self.tiles.p, value, sums, accumulate),
            Some(probs) => self.products.output.wgmma_ss(k, probs.matrix, value, sums, accumulate),
        }
    }

    /// If two warpgroups divide the head dim, adds the scores of the other half. The second barrier ensures
    /// that the exchange buffer is not overwritten by the next scores before both warps have read it.
    fn add_halves(&self, k: &mut Builder, s: &AccTile) {
        if let Some(sum) = &self.products.sum {
            sum.add(k, s);
            sum.wait(k);
        }
    }

    /// Loads the descale factors of a block, if they change from block to block.
    fn load_factors(&self, k: &mut Builder, visit: &Visit, rows: &TileRows) -> Loaded {
        if rows.chain.descale.is_none() && rows.values.is_none() {
            return Loaded { of_keys: Vec::new(), of_values: None };
        }
        let origin = k.mul(visit.block, self.block_n);
        let keys = WarpKeys { origin, count: self.block_n, coverage: visit.coverage };
        Loaded {
            of_keys: rows.chain.descale.map_or(Vec::new(), |scores| scores.load(k, &keys)),
            of_values: rows.values.map(|values| (values.load(k, &keys), keys)),
        }
    }

    /// The first key of a visited block.
    pub(super) fn origin(&self, k: &mut Builder, visit: &Visit) -> R32 {
        k.mul(visit.block, self.block_n)
    }

    /// Reads table elements for the block after the one at `position`, if there is such a block. All of its
    /// keys exist: only the first block is ragged.
    fn read_ahead(&self, k: &mut Builder, walk: &Walk, position: R32, rows: &TileRows) {
        let Some(programs) = rows.chain.programs.filter(|programs| programs.reads_ahead()) else { return };
        let more = k.setp_s(CmpOp::Gt, position, walk.from.clone());
        k.if_(more, |k| {
            let next = k.sub(position, 1);
            let block = rows.list.map_or(next, |list| list.block(k, next));
            let origin = k.mul(block, self.block_n);
            programs.read_ahead(k, origin);
        });
    }
}
