//! Accumulators to global memory through shared memory: a warp writes its 16 rows there by `stmatrix`, one of its lanes sends them off
//! by TMA, and no one waits until the warp has its next rows to write.

use ptx::{Builder, Half, Pred, Shared, Src, TensorMapPtr};

use crate::{AccTile, Consumer, SwizzledTile};

/// A warp's place for its rows on their way out.
#[derive(Clone, Copy, Debug)]
pub struct BulkStore {
    tile: SwizzledTile,
    place: Shared,
    /// Where the lane's row of a 16×16 tile begins, and its chunk of the first.
    lane_place: Shared,
    map: TensorMapPtr,
    speaks: Pred,
}

impl BulkStore {
    /// Rows of a warp.
    const ROWS: u32 = 16;

    /// The tile that a warp sends, of `columns` columns: a multiple of 64.
    pub const fn tile(columns: u32) -> SwizzledTile {
        SwizzledTile::new(BulkStore::ROWS, columns)
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
        // Lanes 0–7 and 8–15 have the rows of the left half of a 16×16 tile, the others those of the right (PTX ISA, "stmatrix").
        let lane = consumer.threads.lane;
        let row = k.and(lane, 15);
        let start = k.shared_index(place, row, SwizzledTile::ROW_BYTES);
        let right = k.shr_u(lane, 4);
        let in_eight = k.and(lane, 7);
        let chunk = k.xor(right, in_eight);
        let lane_place = k.shared_index(start, chunk, 16);
        BulkStore { tile, place, lane_place, map, speaks: consumer.speaks }
    }

    /// Rounds the warp's rows and sends them to a row of a head of a batch entry; rows beyond the tensor's last are left out.
    pub fn store(&self, k: &mut Builder, half: Half, o: &AccTile, to: [Src<ptx::R32>; 3]) {
        k.guarded(self.speaks, |k| k.bulk_wait_read(0));
        k.warp_sync();
        let rounded = o.round(k, half);
        let per_panel = SwizzledTile::PANEL / 16;
        // A step of two chunks is a bit of the address that the swizzle has left alone or turned.
        let lane_places: Vec<Shared> = (0..per_panel)
            .map(|j| Shared { base: k.xor(self.lane_place.base, 32 * j), offset: self.lane_place.offset })
            .collect();
        for j in 0..rounded.k_tiles() {
            let panel = i64::from(j / per_panel * self.tile.panel_bytes());
            let place = lane_places[(j % per_panel) as usize];
            k.stmatrix(Shared { offset: place.offset + panel, ..place }, rounded.fragment(0, j));
        }
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
