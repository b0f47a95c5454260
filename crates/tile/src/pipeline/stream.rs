//! A ring of tiles from the consumers' side: operands to wait for, read and release. Stages are refilled by
//! the producer warpgroup, by one of the consumers, or not at all.

use ptx::{Builder, CmpOp, Pred, R32, Src, TensorMapPtr};

use crate::{Consumer, Ones, PipelineState, SharedMatrix, TileRing, WARPGROUP_ROWS};

/// A consumer's position in a ring of tiles.
#[derive(Clone, Copy, Debug)]
pub struct TileStream {
    ring: TileRing,
    at: PipelineState,
    /// The tile of stage 0.
    first: SharedMatrix,
    elected: Pred,
    refill: Refill,
}

/// How a released stage is refilled.
#[derive(Clone, Copy, Debug)]
enum Refill {
    /// By the producer warpgroup.
    Producer,
    /// By one of the consumers.
    Consumer(Supply),
    /// Never: every tile has its own stage.
    Never,
}

/// The requests of a stream whose tiles are requested by one of its consumers: rows of a tensor, from the
/// last to the first.
#[derive(Clone, Copy, Debug)]
pub struct Supply {
    pub map: TensorMapPtr,
    /// First row of the next tile to request; the first `stages` tiles were requested before. It decreases by
    /// `step`. Below `last`, no tile is left.
    pub next: R32,
    /// First row of the last tile; `None` for 0.
    pub last: Option<R32>,
    /// Rows from one tile to the next.
    pub step: u32,
    /// Head and batch entry.
    pub head: [R32; 2],
    /// Whether this thread issues the requests.
    pub requests: Pred,
    /// Whether this warp issues the requests; uniform in the warp.
    pub warp: Pred,
    /// Number of warpgroups that read the tiles. With one warpgroup, the wait for its products already shows
    /// that a stage is free, so no empty barrier is needed.
    pub readers: u32,
}

impl Supply {
    /// Requests the next tile, if there is one, into the stage `at`, after `free` has waited for that stage.
    /// The branch is warp-uniform, and the instructions of the one lane are predicated. With a branch for the
    /// single lane, ptxas would treat the ring state, and hence the descriptors, as divergent.
    fn fill(&self, k: &mut Builder, ring: &TileRing, at: &PipelineState, free: impl FnOnce(&mut Builder)) {
        let more = k.setp_s_and(CmpOp::Ge, self.next, self.last(), self.warp);
        k.if_(more, |k| {
            free(k);
            k.guarded(self.requests, |k| self.request(k, ring, at, self.next));
        });
        k.sub_to(self.next, self.next, self.step);
    }

    fn last(&self) -> Src<R32> {
        self.last.map_or(0.into(), Src::from)
    }

    fn request(&self, k: &mut Builder, ring: &TileRing, at: &PipelineState, row: R32) {
        let [head, batch] = self.head;
        ring.fill(k, at, self.map, [row, head, batch].map(Src::from));
    }
}

impl TileStream {
    /// Tiles whose columns are the k dimension of the product.
    pub fn over_columns(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_columns(k, ring.tile, ring.first);
        TileStream::new(k, ring, first, consumer)
    }

    /// Tiles of which each warpgroup reads its own 64 rows, with the columns as the k dimension.
    pub fn own_rows(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let whole = TileStream::over_columns(k, ring, consumer);
        TileStream { first: whole.first.row_part(k, consumer.group, WARPGROUP_ROWS), ..whole }
    }

    /// Tiles whose rows are the k dimension of the product.
    pub fn over_rows(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_rows(k, ring.tile, ring.first);
        TileStream::new(k, ring, first, consumer)
    }

    /// Like [`TileStream::over_rows`], with columns of ones appended to the tile's columns.
    pub fn over_rows_beside(k: &mut Builder, ring: TileRing, ones: Ones, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_rows_beside(k, ring.tile, ring.first, ones);
        TileStream::new(k, ring, first, consumer)
    }

    /// The stream of one half of the columns, which are the k dimension ([`SharedMatrix::in_halves`]).
    #[must_use]
    pub fn in_halves(self, k: &mut Builder, half: R32) -> TileStream {
        TileStream { first: self.first.in_halves(k, half), ..self }
    }

    /// The stream of part `part` of `width` columns of tiles whose rows are the k dimension. Parts begin at
    /// panels.
    #[must_use]
    pub fn column_part(self, k: &mut Builder, part: R32, width: u32) -> TileStream {
        TileStream { first: self.first.column_part(k, part, width), ..self }
    }

    fn new(k: &mut Builder, ring: TileRing, first: SharedMatrix, consumer: &Consumer) -> TileStream {
        let elected = ring.pipeline.elected(k, consumer);
        TileStream { ring, at: ring.pipeline.consumer_state(k), first, elected, refill: Refill::Producer }
    }

    /// The stream with requests by one of its consumers: explicit requests for the first stages, later ones
    /// when a stage is released.
    #[must_use]
    pub fn supplied(self, supply: Supply) -> TileStream {
        TileStream { refill: Refill::Consumer(supply), ..self }
    }

    /// The stream with every tile already requested, each in its own stage.
    #[must_use]
    pub fn resident(self) -> TileStream {
        TileStream { refill: Refill::Never, ..self }
    }

    /// Requests the first tile of a stage, if there is one, in a stream whose tiles a consumer requests. Run
    /// by the requesting thread.
    pub fn request_first(&self, k: &mut Builder, stage: u32) {
        if let Refill::Consumer(supply) = &self.refill {
            let at = self.at.at_stage(k, stage);
            let ahead = (self.at.stages() - stage) * supply.step;
            let row = k.add(supply.next, ahead);
            let exists = k.setp_s(CmpOp::Ge, row, supply.last());
            k.if_(exists, |k| supply.request(k, &self.ring, &at, row));
        }
    }

    /// Number of stages.
    pub fn stages(&self) -> u32 {
        self.at.stages()
    }

    /// Whether CTAs of a cluster share the tiles by multicast.
    pub fn is_multicast(&self) -> bool {
        self.ring.pipeline.cluster().is_some()
    }

    /// Waits for the full barrier of the current stage.
    pub fn wait(&self, k: &mut Builder) {
        self.ring.pipeline.consumer_wait(k, &self.at);
    }

    /// The current tile as an operand; the tile must have arrived.
    pub fn matrix(&self, k: &mut Builder) -> SharedMatrix {
        if self.at.stages() == 1 { self.first } else { self.first.stage(k, self.at.stage) }
    }

    /// Advances to the next stage without releasing this one. [`TileStream::release_kept`] releases it later.
    pub fn keep(&self, k: &mut Builder) {
        self.at.advance(k);
    }

    /// The stage before the current one.
    pub fn previous(&self, k: &mut Builder) -> PipelineState {
        self.at.previous(k)
    }

    /// Releases the stage before the current one for a warp that has kept it, if `kept` is not zero. Waits
    /// before that until the bulk stores of the warp have read shared memory, because they may read that
    /// stage.
    pub fn release_kept(&self, k: &mut Builder, kept: R32) {
        let previous = self.previous(k);
        let releases = k.setp_u_and(CmpOp::Ne, kept, 0, self.elected);
        k.guarded(releases, |k| k.bulk_wait_read(0));
        self.ring.pipeline.consumer_release(k, &previous, releases);
    }

    /// Releases the stage for a warp whose products with the tile are complete, and advances to the next
    /// stage.
    pub fn release(&self, k: &mut Builder) {
        let pipeline = &self.ring.pipeline;
        match &self.refill {
            Refill::Producer => pipeline.consumer_release(k, &self.at, self.elected),
            Refill::Consumer(supply) if supply.readers == 1 => supply.fill(k, &self.ring, &self.at, |_| {}),
            Refill::Consumer(supply) => {
                pipeline.consumer_release(k, &self.at, self.elected);
                supply.fill(k, &self.ring, &self.at, |k| pipeline.producer_acquire(k, &self.at));
            }
            Refill::Never => {}
        }
        self.at.advance(k);
    }
}
