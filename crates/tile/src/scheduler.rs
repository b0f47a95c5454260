//! How the tiles of query rows reach the CTAs of a persistent kernel, and in which order.

use ptx::{
    Atomic, AtomicOp, Builder, CmpOp, Global, MemSem, Op, Operand, Pointer, Pred, R32, Scope, SpecialReg,
    Src, Type,
};
use ptx::{Shared, Value};

use crate::{Consumer, Handover, Part, Peers, Ring, Shares};

/// How tiles are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handout {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, `i + 2n`, …
    Static,
    /// CTA `i` of `n` takes tiles `i`, `2n − 1 − i`, `2n + i`, `4n − 1 − i`, …: where tiles become ever shorter, who had a long one gets
    /// a short one, and nobody asks for it.
    Folded,
    /// CTAs take the next tile of an atomic counter when they are done with one.
    Dynamic,
    /// Each CTA takes the tile of its number and there are as many CTAs, which the hardware starts as others end: not persistent.
    Grid,
}

/// The order of the tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TileOrder {
    /// Head by head, rows in order.
    InOrder,
    /// By sections of heads whose keys and values fit L2 together; in a section, all heads' last rows first, which see most
    /// of a causal mask.
    LongestFirst,
    /// Each a stride behind the one before, in the order of [`TileOrder::InOrder`] and around its end, with a stride that is coprime to the
    /// number of tiles: neighbours in time are of all lengths and of different heads.
    Strided,
}

/// Bytes of the counter in global memory: the next tile, and the CTAs that are done. All zero before and after a launch.
pub const COUNTER_BYTES: usize = 8;

/// The grid of tiles, in registers.
#[derive(Clone, Copy, Debug)]
pub struct TileGrid {
    /// Their order.
    pub order: TileOrder,
    /// Tiles in all.
    pub tiles: R32,
    /// Tiles of a head.
    pub row_blocks: R32,
    /// Heads of a batch entry.
    pub heads: R32,
    /// Of [`TileOrder::LongestFirst`] the heads of a section, a divisor of all heads; of [`TileOrder::Strided`] the stride, of which as many as
    /// there are tiles fit 32 bits.
    pub section: R32,
}

/// A tile of query rows.
#[derive(Clone, Copy, Debug)]
pub struct WorkTile {
    /// Which of the head's tiles.
    pub row_block: R32,
    /// The query head, or the group of packed heads.
    pub head: R32,
    /// The batch entry.
    pub batch: R32,
    /// The blocks of keys to compute; `None` for all, unless tiles of the last round are shared.
    pub part: Option<Part>,
}

impl TileGrid {
    fn tile(&self, k: &mut Builder, index: R32) -> WorkTile {
        let (row_block, batch_head) = match self.order {
            TileOrder::InOrder => self.in_order(k, index),
            TileOrder::Strided => {
                let line = k.mul(index, self.section);
                let index = k.rem_u(line, self.tiles);
                self.in_order(k, index)
            }
            TileOrder::LongestFirst => {
                let of_section = k.mul(self.section, self.row_blocks);
                let section = k.div_u(index, of_section);
                let index = remainder(k, index, section, of_section);
                let from_last = k.div_u(index, self.section);
                let head = remainder(k, index, from_last, self.section);
                let last = k.sub(self.row_blocks, 1);
                (k.sub(last, from_last), k.mad(section, self.section, head))
            }
        };
        let batch = k.div_u(batch_head, self.heads);
        WorkTile { row_block, head: remainder(k, batch_head, batch, self.heads), batch, part: None }
    }

    /// Row block and batch entry's head of a tile's number, head by head.
    fn in_order(&self, k: &mut Builder, index: R32) -> (R32, R32) {
        let batch_head = k.div_u(index, self.row_blocks);
        (remainder(k, index, batch_head, self.row_blocks), batch_head)
    }
}

/// `a − quotient · by`.
fn remainder(k: &mut Builder, a: R32, quotient: R32, by: R32) -> R32 {
    let whole = k.mul(quotient, by);
    k.sub(a, whole)
}

/// A tile's number, which may be beyond the last, and what it stands for: worked out once, by the thread that feeds, so that the
/// divisions are nobody's wait.
#[derive(Clone, Copy, Debug)]
struct Letter {
    index: R32,
    tile: WorkTile,
}

impl Letter {
    /// Bytes of one.
    const BYTES: u32 = 16;

    fn new(k: &mut Builder, grid: &TileGrid, index: R32) -> Letter {
        Letter { index: k.mov(index), tile: grid.tile(k, index) }
    }

    fn words(&self) -> [R32; 4] {
        [self.index, self.tile.row_block, self.tile.head, self.tile.batch]
    }

    /// Takes another one's words.
    fn copy_from(&self, k: &mut Builder, other: &Letter) {
        for (to, from) in self.words().into_iter().zip(other.words()) {
            k.mov_to(to, from);
        }
    }
}

/// Where tiles that are handed out at run time pass from the feeding thread to the others.
#[derive(Clone, Copy, Debug)]
pub struct Mailbox {
    /// Its barriers.
    pub handover: Handover,
    /// A [`Letter`] a stage.
    slots: Shared,
    /// [`COUNTER_BYTES`] in global memory.
    counter: Global,
}

impl Mailbox {
    /// Tiles that are announced ahead.
    const STAGES: u32 = 2;
    /// Shared memory that it takes.
    pub const SHARED_BYTES: u32 = Handover::bytes(Mailbox::STAGES) + Letter::BYTES * Mailbox::STAGES;

    /// With its barriers and slots at `place`, a multiple of 16 bytes. In a cluster the first CTA sends to all, and waits for all: those who feed receive the
    /// number as everyone does.
    pub fn new(place: Shared, counter: Global, peers: Option<Peers>) -> Mailbox {
        let slots = place.at(i64::from(Handover::bytes(Mailbox::STAGES)));
        let handover = Handover::new(place, Mailbox::STAGES);
        let handover = if peers.is_some() { handover.among(peers).read_by_feeder() } else { handover };
        Mailbox { handover, slots, counter }
    }

    fn slot(&self, k: &mut Builder, at: &Ring) -> Shared {
        k.shared_index(self.slots, at.stage, Letter::BYTES)
    }

    /// Takes a number from the counter: that plus the number of CTAs is the next tile, since each CTA's first is its own. The latency
    /// is not waited for here.
    fn take(&self, k: &mut Builder) -> R32 {
        k.atom(AtomicOp::Add, self.counter, 1)
    }

    fn send(&self, k: &mut Builder, at: &Ring, letter: &Letter) {
        self.handover.wait_free(k, at);
        let slot = self.slot(k, at);
        match self.handover.peers() {
            None => {
                k.st_vec(slot, letter.words());
                self.handover.publish(k, at);
            }
            Some(peers) => {
                let full = self.handover.full(k, at);
                for rank in 0..peers.ctas {
                    let [slot, full] = [slot, full].map(|place| k.mapa(place, rank));
                    k.mbarrier_arrive_expect_tx(full, Letter::BYTES);
                    k.st_async_vec(slot, letter.words(), full);
                }
            }
        }
        at.advance(k);
    }

    fn receive(&self, k: &mut Builder, at: &Ring, speaks: Pred, letter: &Letter) {
        self.handover.wait_full(k, at);
        let slot = self.slot(k, at);
        // The lane that reads the slot is the one that frees it.
        k.guarded(speaks, |k| k.ld_vec_to(letter.words(), slot));
        for word in letter.words() {
            let sent = k.uniform(word);
            k.mov_to(word, sent);
        }
        self.release(k, at, speaks);
        at.advance(k);
    }

    /// As [`Mailbox::receive`], for the thread that feeds.
    fn receive_alone(&self, k: &mut Builder, at: &Ring, letter: &Letter) {
        self.handover.wait_full(k, at);
        let slot = self.slot(k, at);
        k.ld_vec_to(letter.words(), slot);
        let always = k.setp_u(CmpOp::Eq, at.stage, at.stage);
        self.release(k, at, always);
        at.advance(k);
    }

    /// Frees the place of a number that was read.
    fn release(&self, k: &mut Builder, at: &Ring, speaks: Pred) {
        match self.handover.peers() {
            None => self.handover.release(k, at, speaks),
            Some(_) => {
                let free = self.handover.free(k, at);
                let sender = k.mapa(free, 0);
                k.guarded(speaks, |k| k.mbarrier_arrive(sender));
            }
        }
    }
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
    /// Evenly, and then by the taker's piece of the tiles that are left: the first and one past the last block of the tile.
    Shared([R32; 2]),
}

/// Hands tiles out to both roles. A launch has no more CTAs than tiles, or than blocks of keys where tiles of the last round are shared,
/// so each CTA has something to begin with.
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
    /// Runs `feed` for each tile of the CTA, in the thread that feeds. It must run what it is given, once, before its last request:
    /// there a number is taken. Taken sooner, it would bind the CTA to a tile while others are done and find none, which costs a
    /// twentieth where tiles differ in length; the wait for the last request's place hides the atomic's latency.
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
                reset(k, mailbox.counter, takers);
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
                k.if_(sends, |k| reset(k, mailbox.counter, takers));
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

    /// To the tile and the blocks with which the CTA's piece goes on at a block of the line; beyond the last tile where it has ended.
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
    /// Runs `compute` for each tile of the CTA, in all threads of a consumer. It must call [`Turn::advance`] once, and return what
    /// that returned.
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

/// Adds one to a counter that CTAs share: `before` is what it was. What the thread did before is released by it, and what others released before is
/// acquired.
pub(crate) fn add_one(k: &mut Builder, before: R32, counter: Global) {
    let atomic = Atomic {
        op: AtomicOp::Add,
        space: Global::SPACE,
        ty: Type::U32,
        vector: 1,
        sem: MemSem::AcqRel,
        scope: Some(Scope::Gpu),
        noftz: false,
        cache_hint: false,
    };
    let one: Src<R32> = 1.into();
    k.op(Op::Atom(atomic), [Operand::Reg(before.reg()), Operand::Address(counter.address()), one.into()]);
}

/// The last CTA that is done leaves the counter as it was before the launch. The others have taken their last tiles before they
/// say that they are done, so their atomic releases and the last one's acquires.
fn reset(k: &mut Builder, counter: Global, takers: R32) {
    let done: R32 = k.reg();
    add_one(k, done, counter.at(4));
    let after = k.add(done, 1);
    let last = k.setp_u(CmpOp::Eq, after, takers);
    k.if_(last, |k| {
        let zero: R32 = k.mov(0);
        k.st_vec(counter, [zero, zero]);
    });
}
