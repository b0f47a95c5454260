//! A ring of tiles of which each consumer warp reads its own rows into registers.

use ptx::{Builder, Pred, R32};

use crate::{Consumer, PipelineState, SwizzledTile, TileRing, WarpRows};

/// A consumer warp's position in a ring of tiles, of which it reads its own 16 rows. Warps that share rows
/// read the same rows.
#[derive(Clone, Copy, Debug)]
pub struct RowStream {
    ring: TileRing,
    at: PipelineState,
    /// The warp's rows of the tile of stage 0.
    first: WarpRows,
    elected: Pred,
}

impl RowStream {
    /// A stream at the ring's first tile.
    pub fn new(k: &mut Builder, ring: TileRing, consumer: &Consumer) -> RowStream {
        let bytes = WarpRows::ROWS * SwizzledTile::ROW_BYTES;
        let rows = k.shared_index(ring.first, consumer.threads.row_warp, bytes);
        RowStream {
            ring,
            at: ring.pipeline.consumer_state(k),
            first: WarpRows::new(k, ring.tile, rows, &consumer.threads),
            elected: ring.pipeline.elected(k, consumer),
        }
    }

    /// Waits for the full barrier of the current stage.
    pub fn wait(&self, k: &mut Builder) {
        self.ring.pipeline.consumer_wait(k, &self.at);
    }

    /// Reads the first `columns` columns, a multiple of 16, as 16×16 tiles: in each lane, words of two
    /// neighbouring elements, whose rows and columns are those of an A fragment (PTX ISA, "Matrix Fragments
    /// for mma.m16n8k16"). The tile must have arrived.
    pub fn read(&self, k: &mut Builder, columns: u32) -> Vec<[R32; 4]> {
        let rows = match self.at.stages() {
            1 => self.first,
            _ => self.first.at_stage(k, &self.at, self.ring.tile.bytes()),
        };
        rows.read(k, columns / 16)
    }

    /// Releases the stage, which the warp has read, and advances to the next stage. One lane arrives for the
    /// reads of all lanes.
    ///
    /// The proxy fence keeps the next TMA copy into the stage behind the reads. Without it, outputs were
    /// wrong on an H200: a copy overtook `ldmatrix`.
    pub fn release(&self, k: &mut Builder) {
        k.fence_proxy_async_shared();
        k.warp_sync();
        self.ring.pipeline.consumer_release(k, &self.at, self.elected);
        self.at.advance(k);
    }
}
