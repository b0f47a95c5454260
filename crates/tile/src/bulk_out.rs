//! Accumulators to global memory through shared memory: a warp writes its 16 rows there by `stmatrix`, one of
//! its lanes sends them off by TMA, and no one waits until the warp has its next rows to write.

use ptx::{Builder, Half, Pred, Shared, Src, TensorMapPtr};

use crate::{AccTile, Consumer, SwizzledTile, WarpRows};

/// A warp's place for its rows on their way out.
#[derive(Clone, Copy, Debug)]
pub struct BulkStore {
    tile: SwizzledTile,
    place: Shared,
    rows: WarpRows,
    map: TensorMapPtr,
    speaks: Pred,
}

impl BulkStore {
    /// The tile that a warp sends, of `columns` columns: a multiple of 64.
    pub const fn tile(columns: u32) -> SwizzledTile {
        SwizzledTile::new(WarpRows::ROWS, columns)
    }

    /// For a consumer's warp; `first` is the place of the first warp, those of the others follow.
    pub fn new(
        k: &mut Builder,
        columns: u32,
        first: Shared,
        map: TensorMapPtr,
        consumer: &Consumer,
    ) -> BulkStore {
        let tile = BulkStore::tile(columns);
        let place = k.shared_index(first, consumer.threads.row_warp, tile.bytes());
        let rows = WarpRows::new(k, tile, place, &consumer.threads);
        BulkStore { tile, place, rows, map, speaks: consumer.speaks }
    }

    /// Rounds the warp's rows and sends them to a row of a head of a batch entry; rows beyond the tensor's
    /// last are left out.
    pub fn store(&self, k: &mut Builder, half: Half, o: &AccTile, to: [Src<ptx::R32>; 3]) {
        k.guarded(self.speaks, |k| k.bulk_wait_read(0));
        k.warp_sync();
        let rounded = o.round(k, half);
        self.rows.write(k, &rounded);
        k.fence_proxy_async_shared();
        k.warp_sync();
        k.guarded(self.speaks, |k| {
            self.tile.store(k, self.place, self.map, to);
            k.bulk_commit();
        });
    }

    /// Waits until nothing is read any more: before the CTA ends.
    pub fn finish(&self, k: &mut Builder) {
        k.guarded(self.speaks, |k| k.bulk_wait_read(0));
    }
}
