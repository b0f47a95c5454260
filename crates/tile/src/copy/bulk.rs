//! Epilogue through shared memory. Each warp writes its 16 rows with `stmatrix`, and one elected lane stores
//! them by TMA. The warp waits for that store only before it overwrites its rows in shared memory with the
//! next tile.

use ptx::{Builder, Half, Pred, Shared, Src, TensorMapPtr};

use crate::{AccTile, Consumer, SwizzledTile, WarpRows};

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

    /// Creates the store for a warp of a consumer warpgroup. `first` is the staging buffer of warp 0; the
    /// buffers of the other warps follow it.
    pub fn new(
        k: &mut Builder,
        tile: SwizzledTile,
        first: Shared,
        map: TensorMapPtr,
        consumer: &Consumer,
    ) -> BulkStore {
        let place = k.shared_index(first, consumer.threads.row_warp, tile.bytes());
        let rows = WarpRows::new(k, tile, place, &consumer.threads);
        BulkStore { tile, place, rows, map, elected: consumer.elected }
    }

    /// Rounds the warp's rows and stores them at a row, head and batch entry, which for a ragged tile are
    /// those of [`SwizzledTile::ragged_at`]. TMA drops rows beyond the end.
    pub fn store(&self, k: &mut Builder, half: Half, o: &AccTile, to: [Src<ptx::R32>; 3]) {
        k.guarded(self.elected, |k| k.bulk_wait_read(0));
        k.warp_sync();
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
