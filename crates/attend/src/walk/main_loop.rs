//! Main loop of a consumer warpgroup over the KV blocks of a tile, from the last block to the first, with
//! keys and values from rings: FlashAttention-3 (Shah et al. 2024), Algorithm 2.
//!
//! [`MainLoop::blocks`] is the loop in issue order. The numbers at its margin are the lines of Algorithm 2,
//! the equations are in the log2 domain with `c = scale · log2 e`. The scores of a block are issued together
//! with the P V of the block before it. Both are in flight while the warpgroup waits for the scores alone. A
//! `wgmma` with A in registers blocks its warps until these registers are read, some 200 cycles before the
//! product ends. Within one warpgroup the product therefore overlaps only the beginning of the exponentials;
//! the rest of the overlap must come from another warpgroup ([`PingPong`]).
//!
//! Variants replace one step each: `halved.rs` the first block, `speculative.rs` the softmax of a full block,
//! `overlapped.rs` the end of a tile; `skips.rs` passes over blocks before the first one.

use ptx::{Builder, Half, Pred, R32};
use tile::{AccTile, Accumulate, PingPong, ProbTile, Products, TileStream};

use super::{Order, SharedProbs, Skips, Tiles, Walk};
use crate::{Chains, Coverage, Masker, OnlineSoftmax, Softcap, SpeculativeMax};

/// Registers and rings of a consumer warpgroup.
#[derive(Clone, Debug)]
pub struct MainLoop {
    /// Type of P.
    pub half: Half,
    /// Keys of a block.
    pub block_n: u32,
    /// Whether the P V of a block is in flight during the softmax of the next block.
    pub order: Order,
    /// The ring of Q, read as the warpgroup's own 64 rows.
    pub queries: TileStream,
    /// The ring of K.
    pub keys: TileStream,
    /// The ring of V.
    pub values: TileStream,
    /// The products S = Q Kᵀ and O += P V.
    pub products: Products,
    /// The softcap, if there is one.
    pub softcap: Option<Softcap>,
    /// Chains of the reductions of maximum and sum.
    pub chains: Chains,
    /// S.
    pub s: AccTile,
    /// P.
    pub p: ProbTile,
    /// The copy of P in shared memory, if P V takes P from there.
    pub shared_probs: Option<SharedProbs>,
    /// The accumulator of O. Its last columns are the row sums, if a product computes them.
    pub o: AccTile,
    /// The ping-pong barriers, if the warpgroups use the tensor cores in turn.
    pub ping_pong: Option<PingPong>,
    /// How successive tiles of query rows follow each other.
    pub tiles: Tiles,
    /// Non-zero if the warpgroup's rows see at most the first half of the first block visited; `None` if that
    /// is not used.
    pub halved: Option<R32>,
    /// Blocks to skip, if the warpgroup visits only blocks that its own rows see.
    pub skips: Option<Skips>,
    /// Present if full blocks take no row max (speculative softmax).
    pub speculative: Option<SpeculativeMax>,
}

/// The mask and the softmax of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub struct TileRows<'a> {
    pub mask: &'a Masker,
    pub softmax: &'a OnlineSoftmax,
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
        self.queries.release(k);
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

    /// All of a tile except the P V of its last block.
    fn blocks(&self, k: &mut Builder, walk: &Walk, rows: &TileRows) {
        let MainLoop { half, keys, values, s, p, o, chains, .. } = self;
        let softmax = rows.softmax;
        o.clear(k); //                                                1  O = 0 (`softmax` has l = 0, m = −∞)
        let block = walk.first(k);
        match self.halved {
            Some(halved) => self.first_block_halved(k, halved, (block, walk.first_coverage()), rows),
            None => {
                if self.tiles == Tiles::InTurn {
                    self.wait_for_first(k); //                        2
                    self.first_scores(k, s); //                       3  S = Q Kᵀ
                }
                self.skip_owed_values(k);
                self.first_softmax(k, (s, p), (block, walk.first_coverage()), rows); // 5
            }
        }
        walk.rest(k, block, |k, coverage| {
            //                                                        6  for each further block
            self.issue_both(k); //                                    7  S = Q Kᵀ beside O += P V
            self.wait_for_scores(k); //                              11
            self.cap(k, s); //                                           S = tanh(S·c'), if capped
            if let (Some(speculative), Coverage::Full) = (&self.speculative, coverage) {
                return self.softmax_speculative(k, speculative, softmax);
            }
            keys.release(k); //                                      14  the stage of K
            self.hide(k, s, (block, coverage), rows); //                 S = −∞ where a row sees no key
            let rescale = softmax.update_row_max(k, s, *chains); //  12  m = max(m, S·c); α = exp2(m' − m); l·α
            let sums = softmax.exponentials(k, s, *chains); //       12  P = exp2(S·c − m)
            softmax.add_sums(k, &sums); //                           12  l += Σ P
            self.wait_for_output(k); //                              13
            values.release(k); //                                    14  the stage of V
            s.round_to(k, *half, p); //                              15  P rounded to the input type
            rescale.apply(k, o); //                                  13  O·α
        });
    }

    /// Issues the scores of a block and the P V of the block before it, with the tensor cores to itself if
    /// warpgroups take turns.
    pub(super) fn issue_both(&self, k: &mut Builder) {
        self.keys.wait(k); //                                         7
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.wait(k);
        }
        self.issue(k, |k| self.scores(k, &self.s)); //                8  S = Q Kᵀ
        self.values.wait(k); //                                       9
        self.output(k); //                                           10  O += P V
        k.wgmma_commit();
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.arrive(k);
        }
    }

    /// Waits for a tile's queries and the keys of its first block.
    pub(super) fn wait_for_first(&self, k: &mut Builder) {
        self.queries.wait(k);
        if let Some(skips) = &self.skips {
            skips.before_first_keys(k);
        }
        self.keys.wait(k);
    }

    /// The scores of the first keys of the first block, as many as `s` has columns, with no other product in
    /// flight.
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
        (s, p): (&AccTile, &ProbTile),
        block: (R32, Coverage),
        rows: &TileRows,
    ) {
        self.cap(k, s);
        self.hide(k, s, block, rows);
        rows.softmax.update_row_max(k, s, self.chains);
        let sums = rows.softmax.exponentials(k, s, self.chains);
        rows.softmax.add_sums(k, &sums);
        s.round_to(k, self.half, p);
    }

    /// The P V of a tile's last block, with nothing else in flight.
    pub(super) fn last_output(&self, k: &mut Builder) {
        self.values.wait(k); //                                      17
        self.issue(k, |k| self.output(k)); //                        18  O += P V
        k.wgmma_wait(0);
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

    /// S = Q Kᵀ of the current block, for as many keys as `s` has columns.
    pub(super) fn scores(&self, k: &mut Builder, s: &AccTile) {
        let key = self.keys.matrix(k);
        let q = self.queries.matrix(k);
        self.products.wgmma_qk(k, q, key, s);
    }

    /// O += P V of the current values.
    fn output(&self, k: &mut Builder) {
        if let Some(probs) = &self.shared_probs {
            probs.write(k, &self.p);
        }
        let value = self.values.matrix(k);
        match &self.shared_probs {
            None => self.products.wgmma_pv(k, &self.p, value, &self.o, Accumulate::Add),
            Some(probs) => self.products.wgmma_pv_shared(k, probs.matrix, value, &self.o),
        }
    }

    /// Applies the softcap, if there is one.
    pub(super) fn cap(&self, k: &mut Builder, s: &AccTile) {
        if let Some(softcap) = &self.softcap {
            softcap.apply(k, s);
        }
    }

    /// Hides the keys of a partial block that a row does not see.
    fn hide(&self, k: &mut Builder, s: &AccTile, (block, coverage): (R32, Coverage), rows: &TileRows) {
        if coverage == Coverage::Partial {
            let origin = k.mul(block, self.block_n);
            rows.mask.apply(k, s, origin, coverage);
        }
    }
}
