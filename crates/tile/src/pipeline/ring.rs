//! Producer/consumer pipeline over a ring of stages in shared memory: one thread (the producer) fills the
//! stages, the consumer warps read them, and each stage has a full and an empty mbarrier.

use ptx::{Builder, Pointer, Pred, R32, Shared, Src, TensorMapPtr};

use crate::{Consumer, Mbarriers, Peers, Ring, SwizzledTile};

/// The mbarriers of a ring: one *full* barrier per stage, then one *empty* barrier per stage.
#[derive(Clone, Copy, Debug)]
pub struct Handover {
    stages: u32,
    full: Mbarriers,
    /// The CTAs of the cluster whose consumers release a stage, if the stage is filled in several CTAs at
    /// once (multicast).
    peers: Option<Peers>,
    /// Producer threads that also read the stages: 0 or 1 per CTA.
    feeders: u32,
    /// Whether other rings already delay the producer, so that this ring needs no empty barriers.
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

    /// A ring that each of the peers fills in all of them.
    #[must_use]
    pub const fn among(self, peers: Option<Peers>) -> Handover {
        Handover { peers, ..self }
    }

    /// A ring that the producer thread reads, too.
    #[must_use]
    pub const fn read_by_feeder(self) -> Handover {
        Handover { feeders: 1, ..self }
    }

    /// With `paced`, omits the *empty* barriers. Sound when another ring already delays the producer until
    /// this ring's stage has been read.
    #[must_use]
    pub const fn paced_by_others(self, paced: bool) -> Handover {
        Handover { paced, ..self }
    }

    pub const fn peers(&self) -> Option<Peers> {
        self.peers
    }

    /// The lanes that arrive for a consumer warp: the elected lane, or in a cluster one lane for each CTA.
    pub fn speakers(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        self.peers.map_or(consumer.speaks, |peers| peers.speakers(k, consumer))
    }

    /// Initialises the barriers; run by one thread. A full barrier expects one arrival, an empty barrier
    /// `readers` arrivals from each peer.
    pub fn init(&self, k: &mut Builder, readers: u32) {
        let readers = (readers + self.feeders) * self.peers.map_or(1, |peers| peers.ctas);
        self.init_full(k);
        for stage in (0..self.stages).filter(|_| !self.paced) {
            k.mbarrier_init(self.full.at(self.stages + stage), readers);
        }
    }

    /// Initialises the full barriers alone, for a ring without empty barriers.
    pub fn init_full(&self, k: &mut Builder) {
        for stage in 0..self.stages {
            k.mbarrier_init(self.full.at(stage), 1);
        }
    }

    /// Pipeline state of the producer. In the first round every stage counts as empty.
    pub fn filler(&self, k: &mut Builder) -> Ring {
        Ring::producer(k, self.stages)
    }

    /// Pipeline state of a consumer.
    pub fn reader(&self, k: &mut Builder) -> Ring {
        Ring::consumer(k, self.stages)
    }

    pub(crate) fn full(&self, k: &mut Builder, at: &Ring) -> Shared {
        if self.stages == 1 { self.full.at(0) } else { self.full.index(k, at.stage) }
    }

    pub(crate) fn free(&self, k: &mut Builder, at: &Ring) -> Shared {
        self.full(k, at).at(i64::from(self.stages * Mbarriers::BYTES))
    }

    /// Waits on the empty barrier of the stage.
    pub fn wait_free(&self, k: &mut Builder, at: &Ring) {
        if self.paced {
            return;
        }
        let barrier = self.free(k, at);
        self.wait(k, barrier, at);
    }

    /// Waits on the full barrier of the stage.
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

    /// Arrives on the full barrier, for data that the thread itself has written to the stage.
    pub fn publish(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.full(k, at);
        k.mbarrier_arrive(barrier);
    }

    /// Arrives on the empty barrier for a warp that has read the stage, in the lanes of
    /// [`Handover::speakers`].
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

/// A ring of tiles that TMA fills.
#[derive(Clone, Copy, Debug)]
pub struct TileRing {
    pub handover: Handover,
    /// The tile of each stage.
    pub tile: SwizzledTile,
    /// The tile of stage 0; the tiles of the other stages follow.
    pub first: Shared,
}

impl TileRing {
    /// Bytes of the tiles.
    pub const fn bytes(tile: SwizzledTile, stages: u32) -> u32 {
        stages * tile.bytes()
    }

    /// Requests the tile at a row, head and batch entry into the next stage, once that stage is empty. Run by
    /// one thread.
    pub fn request(&self, k: &mut Builder, at: &Ring, map: TensorMapPtr, from: [Src<R32>; 3]) {
        self.handover.wait_free(k, at);
        self.fill(k, at, map, from);
        at.advance(k);
    }

    /// Requests a tile into a stage that is known to be empty, without advancing the ring.
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
