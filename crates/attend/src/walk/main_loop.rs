//! Main loop of a consumer warpgroup over the KV blocks, from the last to the first, in the issue order of
//! FlashAttention-3's Algorithm 2, with keys and values from rings.
//!
//! The scores of block `n` are issued together with the P V of block `n + 1`. Both are in flight while the
//! warpgroup waits for the scores alone. A `wgmma` with A in registers blocks its warps until these registers
//! are read, some 200 cycles before the product ends. Within one warpgroup the product therefore overlaps
//! only the beginning of the exponentials; the rest of the overlap must come from another warpgroup.

use ptx::{Builder, CmpOp, F32, Half, Pred, R32, Src};

use tile::{AccTile, PingPong, ProbTile, SharedMatrix, TileStream, WarpgroupVote};

use super::{Order, SharedProbs, Skips, Tiles};
use crate::softmax::largest_sum;
use crate::{Chains, Coverage, OnlineSoftmax, Softcap, Sums};

/// Which blocks at the upper end need a mask.
#[derive(Clone, Copy, Debug)]
pub enum Masked {
    /// None.
    Never,
    /// The first block visited, which is ragged.
    First,
    /// The first block visited, and all blocks from this one on.
    From(R32),
}

/// The KV blocks of a tile, visited downward. There is at least one.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The lowest block, which is visited last.
    pub from: Src<R32>,
    /// Blocks below this one need a mask; `None` if all rows of the tile see the keys at the lower end.
    pub full_from: Option<R32>,
    /// One past the last block.
    pub end: R32,
    /// Blocks at the upper end that need a mask.
    pub masked: Masked,
}

/// The steps of a block, from the kernel.
pub struct BlockSteps<S, M, A> {
    /// Issues S = Q Kᵀ.
    pub scores: S,
    /// Masks S; the register is the first key.
    pub hide: M,
    /// Issues O += P V.
    pub accumulate: A,
}

/// The optimistic softmax: a block's scores are assumed not to exceed the references by much, and the
/// assumption is checked afterwards.
#[derive(Clone, Copy, Debug)]
pub struct SpeculativeMax {
    /// What a lane's sum of a block's probabilities must stay below; where a product makes the sums, each
    /// must stay below 2.
    limit: f32,
    /// The vote of the warpgroup, which issues products together.
    vote: WarpgroupVote,
}

impl SpeculativeMax {
    /// That a lane's sum of a block's probabilities stays below `2^limit` times that of a maximum, and in f16
    /// within its range.
    pub fn new(half: Half, limit: u8, vote: WarpgroupVote) -> SpeculativeMax {
        SpeculativeMax { limit: largest_sum(half, limit), vote }
    }
}

/// Registers and rings of a consumer warpgroup.
#[derive(Clone, Debug)]
pub struct Visits {
    /// Type of P.
    pub half: Half,
    /// Keys of a block.
    pub block_n: u32,
    /// How successive tiles of query rows follow each other.
    pub tiles: Tiles,
    /// Whether the P V of a block is in flight during the softmax of the next block.
    pub products: Order,
    /// The ring of Q, read as the warpgroup's own 64 rows.
    pub queries: TileStream,
    /// The ring of K.
    pub keys: TileStream,
    /// The ring of V.
    pub values: TileStream,
    /// The ping-pong barriers, if the warpgroups take turns.
    pub ping_pong: Option<PingPong>,
    /// Present if unmasked blocks take no row max (optimistic softmax).
    pub speculative: Option<SpeculativeMax>,
    /// Chains of the reductions of maximum and sum.
    pub chains: Chains,
    /// Non-zero if the warpgroup's rows see at most the first half of the first block visited; `None` if that
    /// is not used.
    pub halved: Option<R32>,
    /// Blocks to skip, if the warpgroup visits only blocks that its own rows see.
    pub skips: Option<Skips>,
    /// The softcap, if there is one.
    pub softcap: Option<Softcap>,
    /// S.
    pub s: AccTile,
    /// P.
    pub p: ProbTile,
    /// The copy of P in shared memory, if P V takes P from there.
    pub shared_probs: Option<SharedProbs>,
    /// The accumulator of O. Its last columns are the row sums, if a product computes them.
    pub o: AccTile,
}

impl Visits {
    /// Issues the scores of the first block of the CTA's first tile, if tiles overlap: the steps of a block
    /// begin with complete scores.
    pub fn open<S>(&self, k: &mut Builder, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        if self.tiles == Tiles::Overlapped {
            self.first_scores(k, scores);
        }
    }

    /// Visits the blocks of a tile, after the skipped ones. `advance` moves to the next tile and returns
    /// whether there is one, which is also the result.
    pub fn for_each_block<S, M, A>(
        &self,
        k: &mut Builder,
        blocks: Blocks,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
        advance: impl FnOnce(&mut Builder) -> Pred,
    ) -> Pred
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.up_to_last_products(k, blocks, softmax, steps);
        self.queries.release(k);
        let more = advance(k);
        self.last_products(k, more, steps);
        more
    }

    /// Like [`Visits::for_each_block`], for a warpgroup with a single tile: the stages of Q and of the last V
    /// need not be released.
    pub fn for_each_block_once<S, M, A>(
        &self,
        k: &mut Builder,
        blocks: Blocks,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.up_to_last_products(k, blocks, softmax, steps);
        self.products_alone(k, steps);
    }

    /// All of a tile except the P V of its last block.
    fn up_to_last_products<S, M, A>(
        &self,
        k: &mut Builder,
        Blocks { from, full_from, end, masked }: Blocks,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.o.clear(k);
        let block = k.sub(end, 1);
        let never = matches!(masked, Masked::Never) && full_from.is_none();
        let coverage = if never { Coverage::Full } else { Coverage::Partial };
        let first = (block, coverage);
        match self.halved {
            None => {
                if self.tiles == Tiles::InTurn {
                    self.first_scores(k, &steps.scores);
                }
                self.skip_values_owed(k);
                self.begin(k, first, (&self.s, &self.p), softmax, steps);
            }
            Some(halved) => {
                if self.tiles == Tiles::InTurn {
                    self.wait_for_first(k);
                }
                // Overlapped tiles: all scores were issued beside the last P V of the previous tile, and are
                // complete.
                let scores = |k: &mut Builder, s: &AccTile| match self.tiles {
                    Tiles::InTurn => self.first_scores_of(k, s, &steps.scores),
                    Tiles::Overlapped => {}
                };
                let halved = k.setp_u(CmpOp::Ne, halved, 0);
                k.if_else(
                    halved,
                    |k| {
                        let (columns, k_tiles) = (self.s.n_tiles() / 2, self.p.k_tiles() / 2);
                        let (s, p) = (self.s.columns(0, columns), self.p.first_tiles(k_tiles));
                        scores(k, &s);
                        self.begin(k, first, (&s, &p), softmax, steps);
                        self.p.clear_from(k, k_tiles);
                    },
                    |k| {
                        scores(k, &self.s);
                        self.begin(k, first, (&self.s, &self.p), softmax, steps);
                    },
                );
                self.skip_values_owed(k);
            }
        }

        if let Some(full_from) = full_from {
            return self.down_to_lower_bound(k, block, (from, full_from), masked, softmax, steps);
        }
        if let Masked::From(full) = masked {
            k.while_(
                |k| k.setp_s(CmpOp::Gt, block, full),
                |k| {
                    k.sub_to(block, block, 1);
                    self.visit(k, block, Coverage::Partial, softmax, steps);
                },
            );
        }
        let more = k.setp_s(CmpOp::Ne, block, from.clone());
        k.if_(more, |k| {
            k.do_while(|k| {
                k.sub_to(block, block, 1);
                self.visit(k, block, Coverage::Full, softmax, steps);
                k.setp_s(CmpOp::Ne, block, from)
            });
        });
    }

    /// The blocks below `block` of a band with a lower bound: partial blocks, full blocks down to
    /// `full_from`, and partial blocks down to `from`.
    fn down_to_lower_bound<S, M, A>(
        &self,
        k: &mut Builder,
        block: R32,
        (from, full_from): (Src<R32>, R32),
        masked: Masked,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        let down_to = |k: &mut Builder, last: Src<R32>, coverage: Coverage| {
            k.while_(
                |k| k.setp_s(CmpOp::Gt, block, last),
                |k| {
                    k.sub_to(block, block, 1);
                    self.visit(k, block, coverage, softmax, steps);
                },
            );
        };
        if let Masked::From(full) = masked {
            let last = k.max_s(full, from.clone());
            down_to(k, last.into(), Coverage::Partial);
        }
        let last = k.max_s(full_from, from.clone());
        down_to(k, last.into(), Coverage::Full);
        down_to(k, from, Coverage::Partial);
    }

    /// The scores of a tile's first block, with no other product in flight.
    fn first_scores<S>(&self, k: &mut Builder, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        self.wait_for_first(k);
        self.first_scores_of(k, &self.s, scores);
    }

    /// Waits for a tile's queries and the keys of its first block.
    fn wait_for_first(&self, k: &mut Builder) {
        self.queries.wait(k);
        self.skip_in_step(k);
        self.keys.wait(k);
    }

    /// The scores of the first keys of the first block, as many as `s` has columns.
    fn first_scores_of<S>(&self, k: &mut Builder, s: &AccTile, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        self.issue(k, |k| self.scores(k, s, scores));
        k.wgmma_wait(0);
        self.keys.release(k);
    }

    /// The softmax of a tile's first block, or of the part of the block that `s` holds.
    fn begin<S, M, A>(
        &self,
        k: &mut Builder,
        (block, coverage): (R32, Coverage),
        (s, p): (&AccTile, &ProbTile),
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
    {
        self.cap(k, s);
        self.hide(k, s, block, coverage, steps);
        // O is zero, so the rescale is not needed.
        softmax.update_row_max(k, s, self.chains);
        let sums = softmax.exponentials(k, s, self.chains);
        softmax.add_sums(k, &sums);
        s.round_to(k, self.half, p);
    }

    /// The P V of a tile's last block; if tiles overlap, together with the first scores of the next tile.
    fn last_products<S, M, A>(&self, k: &mut Builder, more: Pred, steps: &BlockSteps<S, M, A>)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        let alone = |k: &mut Builder| self.products_alone(k, steps);
        match self.tiles {
            Tiles::InTurn => {
                alone(k);
                self.values.release(k);
            }
            // Each path waits for its own products: where the paths join, none is in flight.
            Tiles::Overlapped => {
                let overlaps = self.overlaps(k, more);
                let both = |k: &mut Builder| {
                    self.queries.wait(k);
                    self.skip_ahead(k);
                    self.issue_both(k, steps);
                    k.wgmma_wait(1);
                    self.keys.release(k);
                    k.wgmma_wait(0);
                    self.values.release(k);
                };
                k.if_else(overlaps, both, |k| {
                    alone(k);
                    // After the CTA's last tile, no load waits for the stage of these values.
                    if self.skips.is_some() {
                        k.if_(more, |k| {
                            self.values.release(k);
                            self.skip_turn(k);
                            // At least as many blocks were skipped as there are stages. So the current keys
                            // were requested after another warpgroup of the CTA had released the first keys,
                            // and that warpgroup had then waited for the queries. In a cluster, that may have
                            // been another CTA's warpgroup.
                            if self.keys.is_multicast() {
                                self.queries.wait(k);
                            }
                            self.skip_in_step(k);
                            self.keys.wait(k);
                            // No register of a product has been written since the fence before the P V.
                            self.scores(k, &self.s, &steps.scores);
                            k.wgmma_commit();
                            k.wgmma_wait(0);
                            self.keys.release(k);
                        });
                    }
                });
            }
        }
    }

    /// Issues the scores of a block and the P V of the block before it.
    fn issue_both<S, M, A>(&self, k: &mut Builder, steps: &BlockSteps<S, M, A>)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.keys.wait(k);
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.wait(k);
        }
        self.issue(k, |k| self.scores(k, &self.s, &steps.scores));
        self.values.wait(k);
        self.accumulate(k, steps);
        k.wgmma_commit();
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.arrive(k);
        }
    }

    /// One block: its scores beside the P V of the block before it, then its softmax.
    fn visit<S, M, A>(
        &self,
        k: &mut Builder,
        block: R32,
        coverage: Coverage,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.issue_both(k, steps);
        match self.products {
            Order::ScoresAhead => k.wgmma_wait(1), // S is complete, O perhaps not.
            Order::InTurn => k.wgmma_wait(0),
        }
        self.cap(k, &self.s);
        match (&self.speculative, coverage) {
            (Some(speculative), Coverage::Full) => self.softmax_speculative(k, speculative, softmax, steps),
            _ => {
                self.keys.release(k);
                self.hide(k, &self.s, block, coverage, steps);
                self.follow(k, softmax);
            }
        }
    }

    /// Waits for the P V of the block before and releases its values.
    fn settle_values(&self, k: &mut Builder) {
        if self.products == Order::ScoresAhead {
            k.wgmma_wait(0);
        }
        self.values.release(k);
    }

    /// The softmax of a block with its row max.
    fn follow(&self, k: &mut Builder, softmax: &OnlineSoftmax) {
        let rescale = softmax.update_row_max(k, &self.s, self.chains);
        let sums = softmax.exponentials(k, &self.s, self.chains);
        softmax.add_sums(k, &sums);
        self.settle_values(k);
        self.s.round_to(k, self.half, &self.p);
        rescale.apply(k, &self.o);
    }

    /// The softmax of a block without its row max, against the current references. If a row of the warpgroup
    /// exceeds the limit (infinities and NaN included), the block is recomputed: its keys are still in their
    /// stage, and neither O nor the running sums include the block yet.
    fn softmax_speculative<S, M, A>(
        &self,
        k: &mut Builder,
        speculative: &SpeculativeMax,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        let sums = softmax.speculative_exponentials(k, &self.s, self.chains);
        self.settle_values(k);
        self.s.round_to(k, self.half, &self.p);
        let good = match softmax.sums {
            Sums::Lanes => all_below(k, &sums, speculative.limit),
            Sums::Product => self.p.below_two(k),
        };
        let good = speculative.vote.all(k, good);
        k.if_(!good, |k| {
            self.issue(k, |k| self.scores(k, &self.s, &steps.scores));
            k.wgmma_wait(0);
            self.cap(k, &self.s);
            softmax.raise_row_max(k, &self.s, self.chains).apply(k, &self.o);
            let exact = softmax.exponentials(k, &self.s, self.chains);
            for (&sum, &exact) in sums.iter().zip(&exact) {
                k.mov_to(sum, exact);
            }
            self.s.round_to(k, self.half, &self.p);
        });
        self.keys.release(k);
        softmax.add_sums(k, &sums);
    }

    /// Applies the softcap, if there is one.
    fn cap(&self, k: &mut Builder, s: &AccTile) {
        if let Some(softcap) = &self.softcap {
            softcap.apply(k, s);
        }
    }

    fn hide<S, M, A>(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: R32,
        coverage: Coverage,
        steps: &BlockSteps<S, M, A>,
    ) where
        M: Fn(&mut Builder, &AccTile, R32, Coverage),
    {
        if coverage == Coverage::Partial {
            let origin = k.mul(block, self.block_n);
            (steps.hide)(k, s, origin, coverage);
        }
    }

    /// Issues a group of products, after a fence for the registers that the warps have written.
    fn issue(&self, k: &mut Builder, products: impl FnOnce(&mut Builder)) {
        k.wgmma_fence();
        products(k);
        k.wgmma_commit();
    }

    /// The P V of a block, with nothing else in flight.
    fn products_alone<S, M, A>(&self, k: &mut Builder, steps: &BlockSteps<S, M, A>)
    where
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.values.wait(k);
        self.issue(k, |k| self.accumulate(k, steps));
        k.wgmma_wait(0);
    }

    fn scores<S>(&self, k: &mut Builder, s: &AccTile, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        let key = self.keys.matrix(k);
        let q = self.queries.matrix(k);
        scores(k, q, key, s);
    }

    fn accumulate<S, M, A>(&self, k: &mut Builder, steps: &BlockSteps<S, M, A>)
    where
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        if let Some(probs) = &self.shared_probs {
            probs.publish(k, &self.p);
        }
        let value = self.values.matrix(k);
        (steps.accumulate)(k, &self.p, value, &self.o);
    }
}

/// Whether all values are below the limit. NaN is not.
fn all_below(k: &mut Builder, values: &[F32], limit: f32) -> Pred {
    let first = k.setp_f(CmpOp::Lt, values[0], limit);
    values[1..].iter().fold(first, |below, &value| {
        let this = k.setp_f(CmpOp::Lt, value, limit);
        k.and_pred(below, this)
    })
}
