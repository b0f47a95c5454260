//! Producer/consumer pipeline over a ring of stages in shared memory: one thread (the producer) fills the
//! stages, the consumer warps read them, and each stage has a full and an empty mbarrier.

use ptx::{Builder, BulkOptions, Global, Pointer, Pred, R32, Shared, Src, TensorMapPtr};

use crate::{Cluster, Consumer, Mbarriers, PipelineState, SwizzledTile};

/// The mbarriers of a ring: one *full* barrier per stage, then one *empty* barrier per stage. The functions
/// have the names of CUTLASS's `PipelineTmaAsync`.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    stages: u32,
    full: Mbarriers,
    /// The cluster whose consumers release a stage, if a copy fills the stage of several CTAs (multicast).
    cluster: Option<Cluster>,
    /// Producer threads that also read the stages: 0 or 1 per CTA.
    reading_producers: u32,
    /// Whether other rings already delay the producer, so that this ring needs no empty barriers.
    without_empty: bool,
}

impl Pipeline {
    /// Bytes of the barriers.
    pub const fn bytes(stages: u32) -> u32 {
        2 * stages * Mbarriers::BYTES
    }

    /// A ring whose barriers begin at `barriers`.
    pub const fn new(barriers: Shared, stages: u32) -> Pipeline {
        Pipeline {
            stages,
            full: Mbarriers::new(barriers),
            cluster: None,
            reading_producers: 0,
            without_empty: false,
        }
    }

    /// A ring in a cluster, where each copy fills the stage of all CTAs.
    #[must_use]
    pub const fn in_cluster(self, cluster: Option<Cluster>) -> Pipeline {
        Pipeline { cluster, ..self }
    }

    /// A ring that the producer thread reads too.
    #[must_use]
    pub const fn read_by_producer(self) -> Pipeline {
        Pipeline { reading_producers: 1, ..self }
    }

    /// With `omit`, omits the *empty* barriers. Sound when another ring already delays the producer until
    /// this ring's stage has been read.
    #[must_use]
    pub const fn without_empty_barriers(self, omit: bool) -> Pipeline {
        Pipeline { without_empty: omit, ..self }
    }

    pub const fn cluster(&self) -> Option<Cluster> {
        self.cluster
    }

    /// The lanes that arrive for a consumer warp: the elected lane, or in a cluster one lane for each CTA.
    pub fn elected(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        self.cluster.map_or(consumer.elected, |cluster| cluster.elected(k, consumer))
    }

    /// Initialises the barriers; run by one thread. A full barrier expects one arrival. An empty barrier
    /// expects `readers` arrivals from each CTA of the cluster.
    pub fn init(&self, k: &mut Builder, readers: u32) {
        let readers = (readers + self.reading_producers) * self.cluster.map_or(1, |cluster| cluster.ctas);
        self.init_full(k);
        for stage in (0..self.stages).filter(|_| !self.without_empty) {
            k.mbarrier_init(self.full.at(self.stages + stage), readers);
        }
    }

    /// Initialises only the full barriers, for a ring without empty barriers.
    pub fn init_full(&self, k: &mut Builder) {
        for stage in 0..self.stages {
            k.mbarrier_init(self.full.at(stage), 1);
        }
    }

    /// Pipeline state of the producer. In the first round every stage counts as empty.
    pub fn producer_state(&self, k: &mut Builder) -> PipelineState {
        PipelineState::producer(k, self.stages)
    }

    /// Pipeline state of a consumer.
    pub fn consumer_state(&self, k: &mut Builder) -> PipelineState {
        PipelineState::consumer(k, self.stages)
    }

    pub(crate) fn full_barrier(&self, k: &mut Builder, at: &PipelineState) -> Shared {
        if self.stages == 1 { self.full.at(0) } else { self.full.index(k, at.stage) }
    }

    pub(crate) fn empty_barrier(&self, k: &mut Builder, at: &PipelineState) -> Shared {
        self.full_barrier(k, at).at(i64::from(self.stages * Mbarriers::BYTES))
    }

    /// Waits until the stage is empty: until all consumers have released it.
    pub fn producer_acquire(&self, k: &mut Builder, at: &PipelineState) {
        if self.without_empty {
            return;
        }
        let barrier = self.empty_barrier(k, at);
        self.wait(k, barrier, at);
    }

    /// Waits until the stage is full.
    pub fn consumer_wait(&self, k: &mut Builder, at: &PipelineState) {
        let barrier = self.full_barrier(k, at);
        self.wait(k, barrier, at);
    }

    /// Waits for a phase of a barrier. Other CTAs of the cluster may arrive on it.
    fn wait(&self, k: &mut Builder, barrier: Shared, at: &PipelineState) {
        match self.cluster {
            None => k.mbarrier_wait_parity(barrier, at.parity),
            Some(_) => k.mbarrier_wait_parity_cluster(barrier, at.parity),
        }
    }

    /// Marks a stage as full after the thread itself has written its data.
    pub fn producer_commit(&self, k: &mut Builder, at: &PipelineState) {
        let barrier = self.full_barrier(k, at);
        k.mbarrier_arrive(barrier);
    }

    /// Arrives on the empty barrier for a warp that has read the stage, in the lanes of
    /// [`Pipeline::elected`].
    pub fn consumer_release(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        if self.without_empty {
            return;
        }
        let barrier = self.empty_barrier(k, at);
        match self.cluster {
            None => k.guarded(elected, |k| k.mbarrier_arrive(barrier)),
            Some(cluster) => {
                let barrier = k.mapa(barrier, cluster.arrives_at());
                k.guarded(elected, |k| k.mbarrier_arrive(barrier));
            }
        }
    }
}

/// A ring of tiles that TMA fills.
#[derive(Clone, Copy, Debug)]
pub struct TileRing {
    pub pipeline: Pipeline,
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
    pub fn request(&self, k: &mut Builder, at: &PipelineState, map: TensorMapPtr, from: [Src<R32>; 3]) {
        self.pipeline.producer_acquire(k, at);
        self.fill(k, at, map, from);
        at.advance(k);
    }

    /// Like [`TileRing::request`], for the tile at a row and a column of a matrix
    /// ([`SwizzledTile::load_at`]).
    pub fn request_at(&self, k: &mut Builder, at: &PipelineState, map: TensorMapPtr, from: [Src<R32>; 4]) {
        self.pipeline.producer_acquire(k, at);
        let (to, full) = self.expect(k, at);
        self.tile.load_at(k, to, map, from, full);
        at.advance(k);
    }

    /// Like [`TileRing::request`], for a tile whose boxes each have a place of their own, which `from` gives.
    pub fn request_boxes(
        &self,
        k: &mut Builder,
        at: &PipelineState,
        map: TensorMapPtr,
        mut from: impl FnMut(&mut Builder, u32) -> [Src<R32>; 3],
    ) {
        self.pipeline.producer_acquire(k, at);
        let (to, full) = self.expect(k, at);
        for index in 0..self.tile.boxes {
            let from = from(k, index);
            match self.tile.boxes {
                1 => self.tile.load(k, to, map, from, full),
                _ => self.tile.load_box(k, (to, index), map, from, full),
            }
        }
        at.advance(k);
    }

    /// Like [`TileRing::request`], together with `bytes` bytes, a multiple of 16, of global memory. The bytes
    /// go to a place of their own for each stage, from `first` on.
    pub fn request_beside(
        &self,
        k: &mut Builder,
        at: &PipelineState,
        (map, from): (TensorMapPtr, [Src<R32>; 3]),
        (first, source, bytes): (Shared, Global, u32),
    ) {
        self.pipeline.producer_acquire(k, at);
        let full = self.pipeline.full_barrier(k, at);
        k.mbarrier_arrive_expect_tx(full, self.tile.loaded_bytes() + bytes);
        let to = at.place(k, self.first, self.tile.bytes());
        self.tile.load(k, to, map, from, full);
        let beside = at.place(k, first, bytes);
        k.bulk_load(beside, source, bytes, full, BulkOptions::default());
        at.advance(k);
    }

    /// Requests a tile into a stage that is known to be empty, without advancing the ring.
    pub fn fill(&self, k: &mut Builder, at: &PipelineState, map: TensorMapPtr, from: [Src<R32>; 3]) {
        let (to, full) = self.expect(k, at);
        match self.pipeline.cluster {
            None => self.tile.load(k, to, map, from, full),
            Some(cluster) => self.tile.load_part(k, to, map, from, full, &cluster),
        }
    }

    /// Lets the full barrier of a stage expect a tile. Returns the place of the tile, and the barrier.
    fn expect(&self, k: &mut Builder, at: &PipelineState) -> (Shared, Shared) {
        let full = self.pipeline.full_barrier(k, at);
        k.mbarrier_arrive_expect_tx(full, self.tile.loaded_bytes());
        let to =
            if self.pipeline.stages == 1 { self.first } else { at.place(k, self.first, self.tile.bytes()) };
        (to, full)
    }
}
