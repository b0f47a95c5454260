//! Tiles that are handed out at run time: a counter in global memory, and how what it gives reaches all
//! roles.

use ptx::{
    Atomic, AtomicOp, Builder, CmpOp, Global, MemSem, Op, Operand, Pointer, Pred, R32, Scope, Shared, Src,
    Type, Value,
};

use crate::{Handover, Peers, Ring, TileGrid, WorkTile};

/// Bytes of the counter in global memory: the next tile, and the CTAs that are done. All zero before and
/// after a launch.
pub const COUNTER_BYTES: usize = 8;

/// A tile's number, which may be beyond the last, and what it stands for: worked out once, by the thread that
/// feeds, so that the divisions are nobody's wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Letter {
    pub(crate) index: R32,
    pub(crate) tile: WorkTile,
}

impl Letter {
    /// Bytes of one.
    const BYTES: u32 = 16;

    pub(crate) fn new(k: &mut Builder, grid: &TileGrid, index: R32) -> Letter {
        Letter { index: k.mov(index), tile: grid.tile(k, index) }
    }

    fn words(&self) -> [R32; 4] {
        [self.index, self.tile.row_block, self.tile.head, self.tile.batch]
    }

    /// Takes another one's words.
    pub(crate) fn copy_from(&self, k: &mut Builder, other: &Letter) {
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

    /// With its barriers and slots at `place`, a multiple of 16 bytes. In a cluster the first CTA sends to
    /// all, and waits for all: those who feed receive the number as everyone does.
    pub fn new(place: Shared, counter: Global, peers: Option<Peers>) -> Mailbox {
        let slots = place.at(i64::from(Handover::bytes(Mailbox::STAGES)));
        let handover = Handover::new(place, Mailbox::STAGES);
        let handover = if peers.is_some() { handover.among(peers).read_by_feeder() } else { handover };
        Mailbox { handover, slots, counter }
    }

    fn slot(&self, k: &mut Builder, at: &Ring) -> Shared {
        k.shared_index(self.slots, at.stage, Letter::BYTES)
    }

    /// Takes a number from the counter: that plus the number of CTAs is the next tile, since each CTA's first
    /// is its own. The latency is not waited for here.
    pub(crate) fn take(&self, k: &mut Builder) -> R32 {
        k.atom(AtomicOp::Add, self.counter, 1)
    }

    pub(crate) fn send(&self, k: &mut Builder, at: &Ring, letter: &Letter) {
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

    pub(crate) fn receive(&self, k: &mut Builder, at: &Ring, speaks: Pred, letter: &Letter) {
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
    pub(crate) fn receive_alone(&self, k: &mut Builder, at: &Ring, letter: &Letter) {
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

    /// The last CTA that is done leaves the counter as it was before the launch. The others have taken their
    /// last tiles before they say that they are done, so their atomic releases and the last one's acquires.
    pub(crate) fn reset(&self, k: &mut Builder, takers: R32) {
        let done: R32 = k.reg();
        add_one(k, done, self.counter.at(4));
        let after = k.add(done, 1);
        let last = k.setp_u(CmpOp::Eq, after, takers);
        k.if_(last, |k| {
            let zero: R32 = k.mov(0);
            k.st_vec(self.counter, [zero, zero]);
        });
    }
}

/// Adds one to a counter that CTAs share: `before` is what it was. What the thread did before is released by
/// it, and what others released before is acquired.
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
