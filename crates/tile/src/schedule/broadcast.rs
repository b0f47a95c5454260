//! Dynamic tile scheduler: a counter in global memory, and the broadcast of its values to all roles of a CTA.

use ptx::{
    Atomic, AtomicOp, Builder, CmpOp, Global, MemSem, Op, Operand, Pointer, Pred, R32, Scope, Shared, Src,
    Type, Value,
};

use crate::{Cluster, Pipeline, PipelineState, TileScheduler, WorkTile};

/// Bytes of the counter in global memory: the next tile, and the number of CTAs that have finished. Both are
/// zero before and after a launch.
pub const COUNTER_BYTES: usize = 8;

/// The tile index (an index ≥ the tile count means stop) with its decoded coordinates. The producer decodes
/// once, so the divisions are off the consumers' critical path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexedTile {
    pub(crate) index: R32,
    pub(crate) tile: WorkTile,
}

impl IndexedTile {
    pub(crate) fn new(k: &mut Builder, schedule: &TileScheduler<'_>, index: R32) -> IndexedTile {
        IndexedTile { index: k.mov(index), tile: schedule.decode(k, index) }
    }

    /// Four or, with spans, eight words.
    fn words(&self) -> Vec<R32> {
        let WorkTile { row_block, head, batch, spans, .. } = self.tile;
        let spans = spans.into_iter().flat_map(|spans| [spans.rows, spans.reduced].concat());
        [self.index, row_block, head, batch].into_iter().chain(spans).collect()
    }

    /// The words in groups, each written or read by one access to shared memory, with the offset of each
    /// group in bytes.
    fn groups(&self) -> Vec<(i64, [R32; 4])> {
        let words = self.words();
        let groups = words.chunks_exact(4).map(|group| [group[0], group[1], group[2], group[3]]);
        (0..).step_by(16).zip(groups).collect()
    }

    fn read(&self, k: &mut Builder, slot: Shared) {
        for (offset, words) in self.groups() {
            k.ld_vec_to(words, slot.at(offset));
        }
    }

    /// Copies the registers of another tile.
    pub(crate) fn copy_from(&self, k: &mut Builder, other: &IndexedTile) {
        for (to, from) in self.words().into_iter().zip(other.words()) {
            k.mov_to(to, from);
        }
    }
}

/// The ring through which the producer broadcasts dynamically scheduled tiles to the consumers.
#[derive(Clone, Copy, Debug)]
pub struct TileBroadcast {
    pub pipeline: Pipeline,
    /// One [`IndexedTile`] per stage.
    slots: Shared,
    /// Bytes of a slot.
    slot_bytes: u32,
    /// [`COUNTER_BYTES`] in global memory.
    counter: Global,
}

impl TileBroadcast {
    /// Number of tiles that can be announced ahead.
    const STAGES: u32 = 2;
    /// Bytes of an [`IndexedTile`].
    const fn slot_bytes(with_spans: bool) -> u32 {
        if with_spans { 32 } else { 16 }
    }

    /// Bytes of shared memory: barriers and slots. `with_spans` means that tiles have
    /// [`Spans`](crate::Spans).
    pub const fn shared_bytes(with_spans: bool) -> u32 {
        Pipeline::bytes(TileBroadcast::STAGES) + TileBroadcast::slot_bytes(with_spans) * TileBroadcast::STAGES
    }

    /// Places the barriers and slots at `place`, a multiple of 16 bytes. In a cluster, CTA 0 sends to all
    /// CTAs and waits for the readers of all of them; the producers receive the tile like the consumers.
    /// Tiles of a cluster have no spans.
    pub fn new(place: Shared, counter: Global, cluster: Option<Cluster>, with_spans: bool) -> TileBroadcast {
        let slots = place.at(i64::from(Pipeline::bytes(TileBroadcast::STAGES)));
        let pipeline = Pipeline::new(place, TileBroadcast::STAGES);
        let pipeline =
            if cluster.is_some() { pipeline.in_cluster(cluster).read_by_producer() } else { pipeline };
        TileBroadcast { pipeline, slots, slot_bytes: TileBroadcast::slot_bytes(with_spans), counter }
    }

    fn slot(&self, k: &mut Builder, at: &PipelineState) -> Shared {
        k.shared_index(self.slots, at.stage, self.slot_bytes)
    }

    /// Increments the counter. The next tile is the counter's old value plus the number of CTAs, because the
    /// first tile of each CTA is its own index. The caller can do other work during the latency of the
    /// atomic.
    pub(crate) fn take(&self, k: &mut Builder) -> R32 {
        k.atom(AtomicOp::Add, self.counter, 1)
    }

    pub(crate) fn send(&self, k: &mut Builder, at: &PipelineState, tile: &IndexedTile) {
        self.pipeline.producer_acquire(k, at);
        let slot = self.slot(k, at);
        match self.pipeline.cluster() {
            None => {
                for (offset, words) in tile.groups() {
                    k.st_vec(slot.at(offset), words);
                }
                self.pipeline.producer_commit(k, at);
            }
            Some(cluster) => {
                let full = self.pipeline.full_barrier(k, at);
                for rank in 0..cluster.ctas {
                    let [slot, full] = [slot, full].map(|place| k.mapa(place, rank));
                    k.mbarrier_arrive_expect_tx(full, self.slot_bytes);
                    for (offset, words) in tile.groups() {
                        k.st_async_vec(slot.at(offset), words, full);
                    }
                }
            }
        }
        at.advance(k);
    }

    pub(crate) fn receive(&self, k: &mut Builder, at: &PipelineState, elected: Pred, tile: &IndexedTile) {
        self.pipeline.consumer_wait(k, at);
        let slot = self.slot(k, at);
        // The lane that reads the slot also releases it.
        k.guarded(elected, |k| tile.read(k, slot));
        for word in tile.words() {
            let sent = k.uniform(word);
            k.mov_to(word, sent);
        }
        self.release(k, at, elected);
        at.advance(k);
    }

    /// Like [`TileBroadcast::receive`], but for the single producer thread.
    pub(crate) fn receive_alone(&self, k: &mut Builder, at: &PipelineState, tile: &IndexedTile) {
        self.pipeline.consumer_wait(k, at);
        let slot = self.slot(k, at);
        tile.read(k, slot);
        let always = k.setp_u(CmpOp::Eq, at.stage, at.stage);
        self.release(k, at, always);
        at.advance(k);
    }

    /// Releases the slot of a tile that has been read.
    fn release(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        match self.pipeline.cluster() {
            None => self.pipeline.consumer_release(k, at, elected),
            Some(_) => {
                let empty = self.pipeline.empty_barrier(k, at);
                let sender = k.mapa(empty, 0);
                k.guarded(elected, |k| k.mbarrier_arrive(sender));
            }
        }
    }

    /// The CTA that finishes last resets the counter to zero. Each CTA has taken its last tile before it
    /// counts itself as finished: its atomic releases, and the last CTA's atomic acquires.
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

/// Adds one to a counter shared by CTAs; `before` receives the old value. The atomic releases the thread's
/// earlier writes and acquires those that other threads released.
pub fn add_one(k: &mut Builder, before: R32, counter: Global) {
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
