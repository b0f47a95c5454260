//! How a warpgroup visits the blocks of keys, from the last to the first: the order of issue of
//! FlashAttention-3's Algorithm 2, with keys and values from rings that another warpgroup fills.
//!
//! The scores of block `n` are issued together with what block `n + 1` adds to O, and both are in flight
//! while their warpgroup waits for the scores alone. An `rs` product holds up its warps until its A registers
//! are read, some 200 cycles before it ends; so what is left to overlap inside a warpgroup is the head of the
//! exponentials, and the rest must come from another warpgroup.

use ptx::{Builder, CmpOp, F32, Half, Pred, R32, Src};

use crate::softmax::largest_sum;
use crate::{
    AccTile, Agreement, Chains, Circle, Coverage, OnlineSoftmax, Order, ProbTile, SharedMatrix, SharedProbs,
    Skips, Softcap, Sums, TileStream,
};

/// How successive tiles of query rows follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tiles {
    /// One after the other: the first scores of a tile and the last products are alone on the tensor cores.
    InTurn,
    /// The first scores of a tile are issued together with the last products of the tile before it. Queries
    /// have two places, so that the next ones are there.
    Overlapped,
}

impl Tiles {
    /// Places of queries in shared memory.
    pub const fn query_stages(self) -> u32 {
        match self {
            Tiles::InTurn => 1,
            Tiles::Overlapped => 2,
        }
    }
}

/// Which blocks need a mask.
#[derive(Clone, Copy, Debug)]
pub enum Masked {
    /// None.
    Never,
    /// The first that is visited, which is ragged.
    First,
    /// The first, and those from this one on.
    From(R32),
}

/// The blocks of a tile that are visited, downward. There is at least one.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The lowest, which comes last.
    pub from: Src<R32>,
    /// Blocks below this one need a mask; `None` where no row of the tile misses keys at the lower end.
    pub full_from: Option<R32>,
    /// One past the last.
    pub end: R32,
    /// Those that need a mask.
    pub masked: Masked,
}

/// What is done with a block.
pub struct BlockSteps<S, M, A> {
    /// Issues S = Q Kᵀ.
    pub scores: S,
    /// Masks S of the keys from one on.
    pub hide: M,
    /// Issues O += P V.
    pub accumulate: A,
}

/// A guess that a block's scores do not exceed the references by much, and how it is checked.
#[derive(Clone, Copy, Debug)]
pub struct Guess {
    /// What a lane's sum of a block's probabilities must stay below; where a product makes the sums, each
    /// must stay below 2.
    limit: f32,
    /// How the warpgroup agrees, since products are its common business.
    agreement: Agreement,
}

impl Guess {
    /// That a lane's sum of a block's probabilities stays below `2^limit` times that of a maximum, and in f16
    /// within its range.
    pub fn new(half: Half, limit: u8, agreement: Agreement) -> Guess {
        Guess { limit: largest_sum(half, limit), agreement }
    }
}

/// A warpgroup's registers and streams while it visits the blocks of a tile of query rows.
#[derive(Clone, Debug)]
pub struct Visits {
    /// Type of P.
    pub half: Half,
    /// Keys of a block.
    pub block_n: u32,
    /// How successive tiles of query rows follow.
    pub tiles: Tiles,
    /// Whether what a block adds to O is in flight while the softmax of the next one runs.
    pub products: Order,
    /// Queries: the warpgroup's own rows.
    pub queries: TileStream,
    /// Keys.
    pub keys: TileStream,
    /// Values.
    pub values: TileStream,
    /// Its place among the warpgroups that take turns.
    pub circle: Option<Circle>,
    /// Whether maxima are taken of blocks that need no mask.
    pub guess: Option<Guess>,
    /// Chains of maxima and sums.
    pub chains: Chains,
    /// Not zero where the warpgroup's rows see no more than the first half of the first block visited; `None`
    /// where no use is made of it.
    pub halved: Option<R32>,
    /// Blocks that the warpgroup lets pass, where it visits those alone that its own rows see.
    pub skips: Option<Skips>,
    /// The cap on logits, if there is one.
    pub softcap: Option<Softcap>,
    /// Scores.
    pub s: AccTile,
    /// Probabilities.
    pub p: ProbTile,
    /// Where products take them from, if not from registers.
    pub shared_probs: Option<SharedProbs>,
    /// The sums of the tile, those of the probabilities in the last columns where products make them.
    pub o: AccTile,
}

impl Visits {
    /// Issues the scores of the first block of the CTA's first tile, where tiles overlap. The steps of a
    /// block begin with scores that are complete.
    pub fn open<S>(&self, k: &mut Builder, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        if self.tiles == Tiles::Overlapped {
            self.first_scores(k, scores);
        }
    }

    /// Visits the blocks of a tile, after those it skips. `advance` goes on to the next
    /// tile and says whether there is one; gives what it says.
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

    /// The same of a warpgroup that has no other tile: no one waits for the places of its queries and last
    /// values.
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

    /// All of a tile but what its last block adds to O.
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
                // Scores that were issued beside the products of the tile before are all there.
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

    /// The blocks below `block` of a band with a bound before the diagonal: partial ones, full ones down to
    /// `full_from`, and partial ones down to `from`.
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

    /// The scores of a tile's first block, alone.
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

    /// The scores of as many keys of the first block as `s` has columns.
    fn first_scores_of<S>(&self, k: &mut Builder, s: &AccTile, scores: &S)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        self.issue(k, |k| self.scores(k, s, scores));
        k.wgmma_wait(0);
        self.keys.release(k);
    }

    /// The softmax of a tile's first block, or of the part of it that `s` holds.
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
        // O is zero: it owes nothing.
        softmax.move_references(k, s, self.chains);
        let sums = softmax.exponentials(k, s, self.chains);
        softmax.add_sums(k, &sums);
        s.round_to(k, self.half, p);
    }

    /// What a tile's last block adds to O, where tiles overlap beside the first scores of the next.
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
            // Each path waits for what it issued: where they join, no product is in flight.
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
                    // After the CTA's last tile no one waits for the place of its values.
                    if self.skips.is_some() {
                        k.if_(more, |k| {
                            self.values.release(k);
                            self.skip_turn(k);
                            // As many blocks were skipped as there are stages: the keys at hand were
                            // requested after another warpgroup of the CTA had left the first, and with them
                            // seen the queries. In a cluster that may be another CTA's.
                            if self.keys.has_peers() {
                                self.queries.wait(k);
                            }
                            self.skip_in_step(k);
                            self.keys.wait(k);
                            // No register of a product has been touched since the fence before those alone.
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

    /// Issues the scores of a block and what the block before it adds to O.
    fn issue_both<S, M, A>(&self, k: &mut Builder, steps: &BlockSteps<S, M, A>)
    where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
        A: Fn(&mut Builder, &ProbTile, SharedMatrix, &AccTile),
    {
        self.keys.wait(k);
        if let Some(circle) = &self.circle {
            circle.take(k);
        }
        self.issue(k, |k| self.scores(k, &self.s, &steps.scores));
        self.values.wait(k);
        self.accumulate(k, steps);
        k.wgmma_commit();
        if let Some(circle) = &self.circle {
            circle.pass(k);
        }
    }

    /// One block: its scores beside what the block before it adds to O, and its softmax.
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
        match (&self.guess, coverage) {
            (Some(guess), Coverage::Full) => self.follow_guessing(k, guess, softmax, steps),
            _ => {
                self.keys.release(k);
                self.hide(k, &self.s, block, coverage, steps);
                self.follow(k, softmax);
            }
        }
    }

    /// Waits for what the block before adds to O, and gives its values back.
    fn settle_values(&self, k: &mut Builder) {
        if self.products == Order::ScoresAhead {
            k.wgmma_wait(0);
        }
        self.values.release(k);
    }

    /// The softmax of a block by its maximum.
    fn follow(&self, k: &mut Builder, softmax: &OnlineSoftmax) {
        let due = softmax.move_references(k, &self.s, self.chains);
        let sums = softmax.exponentials(k, &self.s, self.chains);
        softmax.add_sums(k, &sums);
        self.settle_values(k);
        self.s.round_to(k, self.half, &self.p);
        due.pay(k, &self.o);
    }

    /// The softmax of a block without a maximum, against the references as they are. If that was a bad guess
    /// for any row of the warpgroup, infinities and what is not a number included, the block is done once
    /// more: its keys are still there, and neither O nor the running sums have seen it.
    fn follow_guessing<S, M, A>(
        &self,
        k: &mut Builder,
        guess: &Guess,
        softmax: &OnlineSoftmax,
        steps: &BlockSteps<S, M, A>,
    ) where
        S: Fn(&mut Builder, SharedMatrix, SharedMatrix, &AccTile),
    {
        let sums = softmax.guessed_exponentials(k, &self.s, self.chains);
        self.settle_values(k);
        self.s.round_to(k, self.half, &self.p);
        let good = match softmax.sums {
            Sums::Lanes => all_below(k, &sums, guess.limit),
            Sums::Product => self.p.below_two(k),
        };
        let good = guess.agreement.all(k, good);
        k.if_(!good, |k| {
            self.issue(k, |k| self.scores(k, &self.s, &steps.scores));
            k.wgmma_wait(0);
            self.cap(k, &self.s);
            softmax.raise_references(k, &self.s, self.chains).pay(k, &self.o);
            let exact = softmax.exponentials(k, &self.s, self.chains);
            for (&sum, &exact) in sums.iter().zip(&exact) {
                k.mov_to(sum, exact);
            }
            self.s.round_to(k, self.half, &self.p);
        });
        self.keys.release(k);
        softmax.add_sums(k, &sums);
    }

    /// Caps the scores of a block, where there is a cap.
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

    /// A group of products; what the warps did to its registers goes before.
    fn issue(&self, k: &mut Builder, products: impl FnOnce(&mut Builder)) {
        k.wgmma_fence();
        products(k);
        k.wgmma_commit();
    }

    /// What a block adds to O, with nothing else in flight.
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

/// Whether all values are below the limit. What is not a number is not.
fn all_below(k: &mut Builder, values: &[F32], limit: f32) -> Pred {
    let first = k.setp_f(CmpOp::Lt, values[0], limit);
    values[1..].iter().fold(first, |below, &value| {
        let this = k.setp_f(CmpOp::Lt, value, limit);
        k.and_pred(below, this)
    })
}
