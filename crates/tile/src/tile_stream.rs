//! Tiles that come by in a ring, as their readers see them: operands of products, waited for, read and given
//! back; refilled by a warp that feeds all readers, by one of the readers, or by no one.

use ptx::{Builder, CmpOp, Pred, R32, Src, TensorMapPtr};

use crate::{Consumer, Ones, Ring, SharedMatrix, TileRing, WARPGROUP_ROWS};

/// Keys or values as they come by: where a consumer stands in their ring.
#[derive(Clone, Copy, Debug)]
pub struct TileStream {
    ring: TileRing,
    at: Ring,
    /// The tile of stage 0.
    first: SharedMatrix,
    speaks: Pred,
    refill: Refill,
}

/// Who fills the place of a tile that has been read.
#[derive(Clone, Copy, Debug)]
enum Refill {
    /// A warp that feeds all readers.
    Feeder,
    /// One of the readers.
    Reader(Supply),
    /// No one: every tile has a place of its own.
    Never,
}

/// Where the tiles of a stream come from, if one of its readers requests them itself: a tensor's rows, from
/// the last to the first.
#[derive(Clone, Copy, Debug)]
pub struct Supply {
    /// The tensor's map.
    pub map: TensorMapPtr,
    /// First row of the tile that follows those of all stages; below `last` when there is none. Walks down.
    pub next: R32,
    /// No tile begins before this row; `None` for 0.
    pub last: Option<R32>,
    /// Rows from one tile to the next.
    pub step: u32,
    /// Head and batch entry.
    pub head: [R32; 2],
    /// The one thread that requests.
    pub requests: Pred,
    /// Its warp, as all lanes know.
    pub warp: Pred,
    /// Warpgroups that read the tiles. A wait for products speaks for all of a warpgroup: of one alone, no
    /// one need be asked whether a stage is free.
    pub readers: u32,
}

impl Supply {
    /// Requests the next tile, if there is one, into the stage `at`, once `free` has waited for it. The warp
    /// branches as a whole and one lane's instructions are guarded: after a branch of a lane's own ptxas
    /// would take the ring's state, and so the descriptors, for something that lanes differ in.
    fn fill(&self, k: &mut Builder, ring: &TileRing, at: &Ring, free: impl FnOnce(&mut Builder)) {
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

    fn request(&self, k: &mut Builder, ring: &TileRing, at: &Ring, row: R32) {
        let [head, batch] = self.head;
        ring.fill(k, at, self.map, [row, head, batch].map(Src::from));
    }
}

impl TileStream {
    /// Tiles whose columns the product sums over: keys.
    pub fn over_columns(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_columns(k, ring.tile, ring.first);
        TileStream::new(k, ring, first, consumer)
    }

    /// Tiles of which each warpgroup takes its own 64 rows: queries.
    pub fn own_rows(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let whole = TileStream::over_columns(k, ring, consumer);
        TileStream { first: whole.first.row_part(k, consumer.group, WARPGROUP_ROWS), ..whole }
    }

    /// Tiles whose rows the product sums over: values.
    pub fn over_rows(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_rows(k, ring.tile, ring.first);
        TileStream::new(k, ring, first, consumer)
    }

    /// The same with columns of ones after the tiles' own.
    pub fn over_rows_beside(k: &mut Builder, ring: TileRing, ones: Ones, consumer: &Consumer) -> TileStream {
        let first = SharedMatrix::over_rows_beside(k, ring.tile, ring.first, ones);
        TileStream::new(k, ring, first, consumer)
    }

    fn new(k: &mut Builder, ring: TileRing, first: SharedMatrix, consumer: &Consumer) -> TileStream {
        let speaks = ring.handover.speakers(k, consumer);
        TileStream { ring, at: ring.handover.reader(k), first, speaks, refill: Refill::Feeder }
    }

    /// The same, requested by one of the readers: the first stages when told, later ones whenever one has
    /// been left.
    #[must_use]
    pub fn supplied(self, supply: Supply) -> TileStream {
        TileStream { refill: Refill::Reader(supply), ..self }
    }

    /// The same where all tiles have been requested and each has a place of its own.
    #[must_use]
    pub fn resident(self) -> TileStream {
        TileStream { refill: Refill::Never, ..self }
    }

    /// Requests the first tile of a stage, if there is one, of a stream that one of its readers supplies. For
    /// the thread that requests.
    pub fn request_first(&self, k: &mut Builder, stage: u32) {
        if let Refill::Reader(supply) = &self.refill {
            let at = self.at.at_stage(k, stage);
            let ahead = (self.at.stages() - stage) * supply.step;
            let row = k.add(supply.next, ahead);
            let exists = k.setp_s(CmpOp::Ge, row, supply.last());
            k.if_(exists, |k| supply.request(k, &self.ring, &at, row));
        }
    }

    /// Places of the ring.
    pub(crate) fn stages(&self) -> u32 {
        self.at.stages()
    }

    /// Whether CTAs of a cluster share the ring's tiles.
    pub(crate) fn has_peers(&self) -> bool {
        self.ring.handover.peers().is_some()
    }

    /// The tile, once it has landed.
    pub fn wait(&self, k: &mut Builder) {
        self.ring.handover.wait_full(k, &self.at);
    }

    /// The tile, which has landed.
    pub fn matrix(&self, k: &mut Builder) -> SharedMatrix {
        if self.at.stages() == 1 { self.first } else { self.first.stage(k, self.at.stage) }
    }

    /// Gives the tile's place back, for a warp whose products with it are complete, and goes on to the next.
    pub fn release(&self, k: &mut Builder) {
        let handover = &self.ring.handover;
        match &self.refill {
            Refill::Feeder => handover.release(k, &self.at, self.speaks),
            Refill::Reader(supply) if supply.readers == 1 => supply.fill(k, &self.ring, &self.at, |_| {}),
            Refill::Reader(supply) => {
                handover.release(k, &self.at, self.speaks);
                supply.fill(k, &self.ring, &self.at, |k| handover.wait_free(k, &self.at));
            }
            Refill::Never => {}
        }
        self.at.advance(k);
    }
}
