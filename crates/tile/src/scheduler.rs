//! How the tiles of query rows reach the CTAs of a persistent kernel.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use crate::mailbox::Letter;
use crate::tile_grid::remainder;
use crate::{Consumer, Mailbox, Part, Peers, Ring, Shares, TileGrid, WorkTile};

/// How tiles are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handout {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, `i + 2n`, …
    Static,
    /// CTA `i` of `n` takes tiles `i`, `2n − 1 − i`, `2n + i`, `4n − 1 − i`, …: where tiles become ever
    /// shorter, who had a long one gets a short one, and nobody asks for it.
    Folded,
    /// CTAs take the next tile of an atomic counter when they are done with one.
    Dynamic,
    /// Each CTA takes the tile of its number and there are as many CTAs, which the hardware starts as others
    /// end: not persistent.
    Grid,
}

/// The numbers of a CTA's tiles, where they are known before.
#[derive(Clone, Copy, Debug)]
struct Walk {
    index: R32,
    /// How they follow each other.
    stride: Stride,
}

#[derive(Clone, Copy, Debug)]
enum Stride {
    /// By as many as there are takers.
    Even,
    /// Folded: what this number and the next one add up to.
    Folded(R32),
    /// Evenly, and then by the taker's piece of the tiles that are left: the first and one past the last
    /// block of the tile.
    Shared([R32; 2]),
}

/// Hands tiles out to both roles. A launch has no more CTAs than tiles, or than blocks of keys where tiles of
/// the last round are shared, so each CTA has something to begin with.
#[derive(Clone, Copy, Debug)]
pub struct Scheduler {
    /// How.
    pub handout: Handout,
    /// What there is to do.
    pub grid: TileGrid,
    /// Present where tiles are handed out at run time.
    pub mailbox: Option<Mailbox>,
    /// Present where the CTAs of a cluster take tiles together.
    pub peers: Option<Peers>,
    /// How the tiles of the last round are shared, if they are. For [`Handout::Static`].
    pub shares: Option<Shares>,
}

impl Scheduler {
    /// Runs `feed` for each tile of the CTA, in the thread that feeds. It must run what it is given, once,
    /// before its last request: there a number is taken. Taken sooner, it would bind the CTA to a tile while
    /// others are done and find none, which costs a twentieth where tiles differ in length; the wait for the
    /// last request's place hides the atomic's latency.
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

    /// The first tile of a CTA or cluster: that of its number.
    fn first(&self, k: &mut Builder) -> R32 {
        k.special(if self.peers.is_some() { SpecialReg::ClusteridX } else { SpecialReg::CtaidX })
    }

    /// CTAs or clusters that take tiles.
    fn takers(&self, k: &mut Builder) -> R32 {
        k.special(if self.peers.is_some() { SpecialReg::NclusteridX } else { SpecialReg::NctaidX })
    }

    /// From the first tile on.
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
            // Where there are fewer tiles than CTAs, all of them are shared.
            let beyond = k.setp_u(CmpOp::Ge, first, shares.whole);
            k.if_(beyond, |k| {
                let start = shares.start(k, first);
                self.go_to(k, shares, (walk.index, span), start);
            });
        }
        walk
    }

    /// What is to be done where the walk is.
    fn tile(&self, k: &mut Builder, walk: &Walk) -> WorkTile {
        let tile = self.grid.tile(k, walk.index);
        let part = match (walk.stride, &self.shares) {
            (Stride::Shared(span), Some(shares)) => Some(Part::new(k, shares, walk.index, span)),
            _ => None,
        };
        WorkTile { part, ..tile }
    }

    /// To the next number. Numbers of later rounds are larger, so the first that is no tile's is the end.
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

    /// To the tile and the blocks with which the CTA's piece goes on at a block of the line; beyond the last
    /// tile where it has ended.
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

    /// Where a consumer stands: at the CTA's first tile.
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

/// What a consumer has received.
#[derive(Clone, Copy, Debug)]
struct Post {
    mailbox: Mailbox,
    received: Ring,
    now: Letter,
    next: Letter,
}

/// Where a consumer stands in the CTA's tiles.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    scheduler: &'a Scheduler,
    /// At the tile, or the next one once it is known, where tiles are not handed out at run time.
    walk: Walk,
    post: Option<Post>,
    speaks: Pred,
}

impl Turn<'_> {
    /// Runs `compute` for each tile of the CTA, in all threads of a consumer. It must call [`Turn::advance`]
    /// once, and return what that returned.
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

    /// Goes on to the next tile. Whether there is one.
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

    /// The tile that [`Turn::advance`] went on to, if there is one; at the start, the first.
    pub fn next(&self, k: &mut Builder) -> WorkTile {
        match &self.post {
            None => self.scheduler.tile(k, &self.walk),
            Some(post) => post.next.tile,
        }
    }
}
