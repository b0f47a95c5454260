//! Handing tiles over in shared memory: a thread fills the stages of a ring, warps empty them, and a pair of
//! mbarriers a stage keeps them apart.

use ptx::{Builder, Pointer, Pred, R32, Shared, Src, TensorMapPtr};

use crate::{Consumer, Mbarriers, Peers, Ring, SwizzledTile};

/// The barriers of a ring: one a stage that tells that it is full, and one that tells that it is free.
#[derive(Clone, Copy, Debug)]
pub struct Handover {
    stages: u32,
    full: Mbarriers,
    /// Whose readers free a stage, where it is filled in several CTAs at once.
    peers: Option<Peers>,
    /// Threads that feed and read, too.
    feeders: u32,
    /// Whether other rings keep the filling thread from overtaking the readers.
    paced: bool,
}

impl Handover {
    /// Bytes of the barriers.
    pub const fn bytes(stages: u32) -> u32 {
        2 * stages * Mbarriers::BYTES
    }

    /// A ring whose barriers begin at `barriers`.
    pub const fn new(barriers: Shared, stages: u32) -> Handover {
        Handover { stages, full: Mbarriers::new(barriers), peers: None, feeders: 0, paced: false }
    }

    /// The same, filled by each of the peers in all of them.
    #[must_use]
    pub const fn among(self, peers: Option<Peers>) -> Handover {
        Handover { peers, ..self }
    }

    /// The same, read also by the thread that feeds.
    #[must_use]
    pub const fn read_by_feeder(self) -> Handover {
        Handover { feeders: 1, ..self }
    }

    /// The same where, if so, the filling thread never comes to a stage that is still read, because it has
    /// waited for other rings first: then no one is asked, and no one says, whether a stage is free.
    #[must_use]
    pub const fn paced_by_others(self, paced: bool) -> Handover {
        Handover { paced, ..self }
    }

    /// The peers.
    pub const fn peers(&self) -> Option<Peers> {
        self.peers
    }

    /// The lanes that speak for a consumer's warp.
    pub fn speakers(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        self.peers.map_or(consumer.speaks, |peers| peers.speakers(k, consumer))
    }

    /// Prepares the barriers, in one thread: one arrival fills a stage, `readers` of each peer free it.
    pub fn init(&self, k: &mut Builder, readers: u32) {
        let readers = (readers + self.feeders) * self.peers.map_or(1, |peers| peers.ctas);
        self.init_full(k);
        for stage in (0..self.stages).filter(|_| !self.paced) {
            k.mbarrier_init(self.full.at(self.stages + stage), readers);
        }
    }

    /// The same where no one asks whether a stage is free.
    pub fn init_full(&self, k: &mut Builder) {
        for stage in 0..self.stages {
            k.mbarrier_init(self.full.at(stage), 1);
        }
    }

    /// Where the filling thread stands: the first round finds every stage free.
    pub fn filler(&self, k: &mut Builder) -> Ring {
        Ring::producer(k, self.stages)
    }

    /// Where a reader stands.
    pub fn reader(&self, k: &mut Builder) -> Ring {
        Ring::consumer(k, self.stages)
    }

    pub(crate) fn full(&self, k: &mut Builder, at: &Ring) -> Shared {
        if self.stages == 1 { self.full.at(0) } else { self.full.index(k, at.stage) }
    }

    pub(crate) fn free(&self, k: &mut Builder, at: &Ring) -> Shared {
        self.full(k, at).at(i64::from(self.stages * Mbarriers::BYTES))
    }

    /// Waits until the stage is free.
    pub fn wait_free(&self, k: &mut Builder, at: &Ring) {
        if self.paced {
            return;
        }
        let barrier = self.free(k, at);
        self.wait(k, barrier, at);
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.full(k, at);
        self.wait(k, barrier, at);
    }

    /// Waits for the phase of a barrier, on which peers may arrive.
    fn wait(&self, k: &mut Builder, barrier: Shared, at: &Ring) {
        match self.peers {
            None => k.mbarrier_wait_parity(barrier, at.parity),
            Some(_) => k.mbarrier_wait_parity_cluster(barrier, at.parity),
        }
    }

    /// Says that the stage is full, of what the thread itself has written there.
    pub fn publish(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.full(k, at);
        k.mbarrier_arrive(barrier);
    }

    /// Says, for a warp, that it has read the stage: in the lanes that speak for it.
    pub fn release(&self, k: &mut Builder, at: &Ring, speaks: Pred) {
        if self.paced {
            return;
        }
        let barrier = self.free(k, at);
        match self.peers {
            None => k.guarded(speaks, |k| k.mbarrier_arrive(barrier)),
            Some(peers) => {
                let barrier = k.mapa(barrier, peers.to());
                k.guarded(speaks, |k| k.mbarrier_arrive(barrier));
            }
        }
    }
}

/// A ring of tiles that the tensor memory accelerator fills.
#[derive(Clone, Copy, Debug)]
pub struct TileRing {
    /// Its barriers.
    pub handover: Handover,
    /// The tile of a stage.
    pub tile: SwizzledTile,
    /// The tile of stage 0; the others follow.
    pub first: Shared,
}

impl TileRing {
    /// Bytes of the tiles.
    pub const fn bytes(tile: SwizzledTile, stages: u32) -> u32 {
        stages * tile.bytes()
    }

    /// Requests the tile at a row of a head of a batch entry into the next stage, once it is free. For one
    /// thread.
    pub fn request(&self, k: &mut Builder, at: &Ring, map: TensorMapPtr, from: [Src<R32>; 3]) {
        self.handover.wait_free(k, at);
        self.fill(k, at, map, from);
        at.advance(k);
    }

    /// The same into a stage that is free, without going on.
    pub fn fill(&self, k: &mut Builder, at: &Ring, map: TensorMapPtr, from: [Src<R32>; 3]) {
        let full = self.handover.full(k, at);
        k.mbarrier_arrive_expect_tx(full, self.tile.bytes());
        let to =
            if self.handover.stages == 1 { self.first } else { at.place(k, self.first, self.tile.bytes()) };
        match self.handover.peers {
            None => self.tile.load(k, to, map, from, full),
            Some(peers) => self.tile.load_part(k, to, map, from, full, &peers),
        }
    }
}
