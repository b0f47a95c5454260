//! Tile scheduler: which CTA of a persistent kernel computes which tiles of query rows, and in which order.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use super::broadcast::Letter;
use super::grid::remainder;
use crate::{Consumer, Mailbox, Part, Peers, Ring, Shares, TileGrid, WorkTile};

/// How tiles are assigned to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handout {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, `i + 2n`, …
    Static,
    /// CTA `i` of `n` takes tiles `i`, `2n − 1 − i`, `2n + i`, `4n − 1 − i`, …. If tiles are sorted from long
    /// to short, a CTA with a long tile gets a short one next, without an atomic counter.
    Folded,
    /// A CTA takes the next tile from an atomic counter when it has finished one.
    Dynamic,
    /// One CTA per tile, not persistent: the hardware starts CTAs as others exit.
    Grid,
}

/// The sequence of a CTA's tile indices, where it is known in advance.
#[derive(Clone, Copy, Debug)]
struct Walk {
    index: R32,
    /// How one index follows from the other.
    stride: Stride,
}

#[derive(Clone, Copy, Debug)]
enum Stride {
    /// Plus the number of takers.
    Even,
    /// Folded: the sum of this index and the next.
    Folded(R32),
    /// Plus the number of takers, and after the whole tiles the taker's piece of the shared tiles. The
    /// registers are the first block of the tile and one past the last.
    Shared([R32; 2]),
}

/// The tile scheduler for both roles. A launch has at most as many CTAs as tiles (or as KV blocks, if the
/// tiles of the last round are shared), so every CTA has work at the start.
#[derive(Clone, Copy, Debug)]
pub struct Scheduler {
    pub handout: Handout,
    pub grid: TileGrid,
    /// Present with dynamic scheduling.
    pub mailbox: Option<Mailbox>,
    /// Present where the CTAs of a cluster take a tile together.
    pub peers: Option<Peers>,
    /// How the tiles of the last round are shared, if they are. Requires [`Handout::Static`].
    pub shares: Option<Shares>,
}

impl Scheduler {
    /// Runs `feed` for each tile of the CTA, in the producer thread. `feed` must call the closure that it is
    /// given exactly once, before its last request: the closure takes the next tile index from the counter.
    /// Taken earlier, the index would bind the CTA to a tile while other CTAs are already idle, which costs
    /// 5% where tiles differ in length. The wait for the last request's stage hides the latency of the
    /// atomic.
    pub fn feed_each(
        &self,
        k: &mut Builder,
        feed: impl FnOnce(&mut Builder, &WorkTile, &mut dyn FnMut(&mut Builder)),
    ) {
        let (index, takers) = (self.first(k), self.takers(k));
        match (&self.mailbox, self.peers) {
            (None, _) => {
                let walk = self.walk(k, index);
                k.do_while(|k| {
                    let tile = self.tile(k, &walk);
                    feed(k, &tile, &mut |_| ());
                    self.step(k, &walk, takers);
                    k.setp_u(CmpOp::Lt, walk.index, self.grid.tiles)
                });
            }
            (Some(mailbox), None) => {
                let (sent, letter) = (mailbox.handover.filler(k), Letter::new(k, &self.grid, index));
                k.do_while(|k| {
                    let mut taken = k.reg();
                    feed(k, &letter.tile, &mut |k| taken = mailbox.take(k));
                    let next = k.add(taken, takers);
                    let next = Letter::new(k, &self.grid, next);
                    mailbox.send(k, &sent, &next);
                    letter.copy_from(k, &next);
                    k.setp_u(CmpOp::Lt, letter.index, self.grid.tiles)
                });
                mailbox.reset(k, takers);
            }
            (Some(mailbox), Some(peers)) => {
                let (sent, received) = (mailbox.handover.filler(k), mailbox.handover.reader(k));
                let sends = k.setp_u(CmpOp::Eq, peers.rank, 0);
                let letter = Letter::new(k, &self.grid, index);
                k.do_while(|k| {
                    let mut taken = k.reg();
                    feed(k, &letter.tile, &mut |k| taken = k.guarded(sends, |k| mailbox.take(k)));
                    k.if_(sends, |k| {
                        let next = k.add(taken, takers);
                        let next = Letter::new(k, &self.grid, next);
                        mailbox.send(k, &sent, &next);
                    });
                    mailbox.receive_alone(k, &received, &letter);
                    k.setp_u(CmpOp::Lt, letter.index, self.grid.tiles)
                });
                k.if_(sends, |k| mailbox.reset(k, takers));
            }
        }
    }

    /// The first tile of a CTA or cluster: its own index.
    fn first(&self, k: &mut Builder) -> R32 {
        k.special(if self.peers.is_some() { SpecialReg::ClusteridX } else { SpecialReg::CtaidX })
    }

    /// Number of CTAs or clusters that take tiles.
    fn takers(&self, k: &mut Builder) -> R32 {
        k.special(if self.peers.is_some() { SpecialReg::NclusteridX } else { SpecialReg::NctaidX })
    }

    /// The sequence from tile `first` on.
    fn walk(&self, k: &mut Builder, first: R32) -> Walk {
        let stride = match (self.handout, &self.shares) {
            (Handout::Folded, _) => {
                let takers = self.takers(k);
                let round = k.mul(takers, 2);
                Stride::Folded(k.sub(round, 1))
            }
            (_, Some(shares)) => Stride::Shared([k.mov(0), k.mov(shares.blocks)]),
            (_, None) => Stride::Even,
        };
        let walk = Walk { index: k.mov(first), stride };
        if let (Stride::Shared(span), Some(shares)) = (stride, &self.shares) {
            // If there are fewer tiles than CTAs, all tiles are shared.
            let beyond = k.setp_u(CmpOp::Ge, first, shares.whole);
            k.if_(beyond, |k| {
                let start = shares.start(k, first);
                self.go_to(k, shares, (walk.index, span), start);
            });
        }
        walk
    }

    /// The work tile at the walk's position.
    fn tile(&self, k: &mut Builder, walk: &Walk) -> WorkTile {
        let tile = self.grid.tile(k, walk.index);
        let part = match (walk.stride, &self.shares) {
            (Stride::Shared(span), Some(shares)) => Some(Part::new(k, shares, walk.index, span)),
            _ => None,
        };
        WorkTile { part, ..tile }
    }

    /// Advances to the next index. Indices of later rounds are larger, so the first index beyond the last
    /// tile ends the walk.
    fn step(&self, k: &mut Builder, walk: &Walk, takers: R32) {
        match (walk.stride, &self.shares) {
            (Stride::Folded(sum), _) => {
                let next = k.sub(sum, walk.index);
                k.mov_to(walk.index, next);
                let both = k.mad(takers, 2, sum);
                k.mov_to(sum, both);
            }
            (Stride::Shared(span), Some(shares)) => {
                let next = k.add(walk.index, takers);
                let whole = k.setp_u(CmpOp::Lt, next, shares.whole);
                k.if_else(
                    whole,
                    |k| k.mov_to(walk.index, next),
                    |k| {
                        let first = self.first(k);
                        let start = shares.start(k, first);
                        let before = k.sub(walk.index, shares.whole);
                        let done = k.mad(before, shares.blocks, span[1]);
                        let began = k.setp_u(CmpOp::Ge, walk.index, shares.whole);
                        let at = k.selp(done, start, began);
                        self.go_to(k, shares, (walk.index, span), at);
                    },
                );
            }
            _ => k.add_to(walk.index, walk.index, takers),
        }
    }

    /// Moves to the tile and blocks at which the CTA's piece continues, from block `at` of the line; moves
    /// beyond the last tile if the piece has ended.
    fn go_to(&self, k: &mut Builder, shares: &Shares, (index, [from, end]): (R32, [R32; 2]), at: R32) {
        let first = self.first(k);
        let next = k.add(first, 1);
        let stop = shares.start(k, next);
        let tile = k.div_u(at, shares.blocks);
        let block = remainder(k, at, tile, shares.blocks);
        let left = k.sub(stop, at);
        let past = k.add(block, left);
        let past = k.min_u(past, shares.blocks);
        k.mov_to(from, block);
        k.mov_to(end, past);
        let more = k.setp_u(CmpOp::Lt, at, stop);
        let tile = k.add(shares.whole, tile);
        k.selp_to(index, tile, self.grid.tiles, more);
    }

    /// A consumer's position, at the CTA's first tile.
    pub fn consumer<'a>(&'a self, k: &mut Builder, consumer: &Consumer) -> Turn<'a> {
        let index = self.first(k);
        Turn {
            scheduler: self,
            walk: self.walk(k, index),
            post: self.mailbox.map(|mailbox| {
                let [now, next] = [(); 2].map(|()| Letter::new(k, &self.grid, index));
                Post { mailbox, received: mailbox.handover.reader(k), now, next }
            }),
            speaks: consumer.speaks,
        }
    }
}

/// A consumer's state with dynamic scheduling: ring position and the letter received last.
#[derive(Clone, Copy, Debug)]
struct Post {
    mailbox: Mailbox,
    received: Ring,
    now: Letter,
    next: Letter,
}

/// A consumer's position in the sequence of the CTA's tiles.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    scheduler: &'a Scheduler,
    /// The current tile, or the next one once it is known; unused with dynamic scheduling.
    walk: Walk,
    post: Option<Post>,
    speaks: Pred,
}

impl Turn<'_> {
    /// Runs `compute` for each tile of the CTA, in all threads of a consumer. `compute` must call
    /// [`Turn::advance`] exactly once and return its result.
    pub fn for_each(&self, k: &mut Builder, compute: impl FnOnce(&mut Builder, &WorkTile) -> Pred) {
        k.do_while(|k| {
            let tile = match &self.post {
                None => self.scheduler.tile(k, &self.walk),
                Some(post) => post.now.tile,
            };
            let more = compute(k, &tile);
            if let Some(post) = &self.post {
                post.now.copy_from(k, &post.next);
            }
            more
        });
    }

    /// Advances to the next tile. Returns whether there is one.
    pub fn advance(&self, k: &mut Builder) -> Pred {
        let index = match &self.post {
            None => {
                let takers = self.scheduler.takers(k);
                self.scheduler.step(k, &self.walk, takers);
                self.walk.index
            }
            Some(post) => {
                post.mailbox.receive(k, &post.received, self.speaks, &post.next);
                post.next.index
            }
        };
        k.setp_u(CmpOp::Lt, index, self.scheduler.grid.tiles)
    }

    /// The tile that [`Turn::advance`] has moved to, if there is one; before the first call, the first tile.
    pub fn next(&self, k: &mut Builder) -> WorkTile {
        match &self.post {
            None => self.scheduler.tile(k, &self.walk),
            Some(post) => post.next.tile,
        }
    }
}
