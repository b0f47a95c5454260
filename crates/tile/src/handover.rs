//! Handing tiles over in shared memory: a thread fills the stages of a ring, warps empty them, and a pair of mbarriers a stage
//! keeps them apart.

use ptx::{Builder, Pointer, Pred, R32, Shared, Src, TensorMapPtr};

use crate::{Mbarriers, Ring, SwizzledTile};

/// The barriers of a ring: one a stage that tells that it is full, and one that tells that it is free.
#[derive(Clone, Copy, Debug)]
pub struct Handover {
    stages: u32,
    full: Mbarriers,
}

impl Handover {
    /// Bytes of the barriers.
    pub const fn bytes(stages: u32) -> u32 {
        2 * stages * Mbarriers::BYTES
    }

    /// A ring whose barriers begin at `barriers`.
    pub const fn new(barriers: Shared, stages: u32) -> Handover {
        Handover { stages, full: Mbarriers::new(barriers) }
    }

    /// Prepares the barriers, in one thread: one arrival fills a stage, `readers` free it.
    pub fn init(&self, k: &mut Builder, readers: u32) {
        for stage in 0..self.stages {
            k.mbarrier_init(self.full.at(stage), 1);
            k.mbarrier_init(self.full.at(self.stages + stage), readers);
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

    fn full(&self, k: &mut Builder, at: &Ring) -> Shared {
        if self.stages == 1 { self.full.at(0) } else { self.full.index(k, at.stage) }
    }

    fn free(&self, k: &mut Builder, at: &Ring) -> Shared {
        self.full(k, at).at(i64::from(self.stages * Mbarriers::BYTES))
    }

    /// Waits until the stage is free.
    pub fn wait_free(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.free(k, at);
        k.mbarrier_wait_parity(barrier, at.parity);
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.full(k, at);
        k.mbarrier_wait_parity(barrier, at.parity);
    }

    /// Whether the stage is full.
    pub fn test_full(&self, k: &mut Builder, at: &Ring) -> Pred {
        let barrier = self.full(k, at);
        k.mbarrier_try_wait_parity(barrier, at.parity)
    }

    /// Says that the stage is full, of what the thread itself has written there.
    pub fn publish(&self, k: &mut Builder, at: &Ring) {
        let barrier = self.full(k, at);
        k.mbarrier_arrive(barrier);
    }

    /// Says, for a warp, that it has read the stage.
    pub fn release(&self, k: &mut Builder, at: &Ring, speaks: Pred) {
        let barrier = self.free(k, at);
        k.guarded(speaks, |k| k.mbarrier_arrive(barrier));
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

    /// Requests the tile at a row of a head of a batch entry into the next stage, once it is free. For one thread.
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
        self.tile.load(k, to, map, from, full);
    }
}
