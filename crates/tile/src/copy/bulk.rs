//! Epilogue through shared memory. Each warp writes its 16 rows with `stmatrix`, and one elected lane stores
//! them by TMA. The warp waits for that store only before the rows in shared memory are overwritten:
//! by the next tile's rows ([`BulkStore::wait_until_free`]), or by the queries of a later tile, if the rows
//! lie in a stage of Q ([`TileStream::release_kept`](crate::TileStream::release_kept)).

use ptx::{Builder, Half, Pred, Shared, Src, TensorMapPtr};

use crate::{AccTile, Consumer, PipelineState, SwizzledTile, WarpRows};

/// A warp's staging buffer in shared memory for its rows of O.
#[derive(Clone, Copy, Debug)]
pub struct BulkStore {
    tile: SwizzledTile,
    place: Shared,
    rows: WarpRows,
    map: TensorMapPtr,
    elected: Pred,
}

impl BulkStore {
    /// The tile that one warp stores. `columns` must be a multiple of 64. `ragged` says whether rows end
    /// with their sequence instead of with the tensor.
    pub const fn tile(columns: u32, ragged: bool) -> SwizzledTile {
        SwizzledTile::new(WarpRows::ROWS, columns).ragged(ragged)
    }

    /// Creates the store for a warp of a consumer warpgroup whose staging buffer is `place`.
    pub fn new(
        k: &mut Builder,
        tile: SwizzledTile,
        place: Shared,
        map: TensorMapPtr,
        consumer: &Consumer,
    ) -> BulkStore {
        let rows = WarpRows::new(k, tile, place, &consumer.threads);
        BulkStore { tile, place, rows, map, elected: consumer.elected }
    }

    /// The store whose staging buffer lies in a stage of a ring of tiles of `bytes` bytes. The buffer of
    /// `self` lies in stage 0.
    #[must_use]
    pub fn at_stage(self, k: &mut Builder, at: &PipelineState, bytes: u32) -> BulkStore {
        let place = at.place(k, self.place, bytes);
        BulkStore { place, rows: self.rows.at_stage(k, at, bytes), ..self }
    }

    /// Waits until the warp's last store has read the staging buffer.
    pub fn wait_until_free(&self, k: &mut Builder) {
        k.guarded(self.elected, |k| k.bulk_wait_read(0));
        k.warp_sync();
    }

    /// Rounds the warp's rows and stores them at a row, head and batch entry, which for a ragged tile are
    /// those of [`SwizzledTile::ragged_at`]. TMA drops rows beyond the end. The staging buffer must be
    /// free.
    pub fn store(&self, k: &mut Builder, half: Half, o: &AccTile, to: [Src<ptx::R32>; 3]) {
        let rounded = o.round(k, half);
        self.rows.write(k, &rounded);
        k.fence_proxy_async_shared();
        k.warp_sync();
        k.guarded(self.elected, |k| {
            self.tile.store(k, self.place, self.map, to);
            k.bulk_commit();
        });
    }

    /// Waits until the bulk stores have read shared memory. Required before the CTA exits.
    pub fn finish(&self, k: &mut Builder) {
        k.guarded(self.elected, |k| k.bulk_wait_read(0));
    }
}
