//! Parts of dQ on their way to the sums: each consumer warp copies its part to shared memory, and a bulk
//! reduction adds it from there.

use ptx::{Builder, Global, Pointer};
use tile::warp_vectors;

use super::consume::Warpgroup;
use super::convert::PART_BYTES;
use super::emit::Visit;

impl Warpgroup<'_> {
    /// Copies the warp's part of dQ to shared memory, once the part before it has been read from there.
    pub fn stage_part(&self, k: &mut Builder) {
        let threads = &self.consumer.threads;
        let staged = k.shared_index(self.main.staging, threads.row_warp, PART_BYTES);
        let own = k.shared_index(staged, threads.lane, 16);
        match &self.outbox {
            Some(outbox) => outbox.relay.acquire(k, &outbox.at),
            None => {
                k.guarded(self.consumer.elected, |k| k.bulk_wait_read(0));
                k.warp_sync();
            }
        }
        for (n, &tile) in (0..).zip(self.tiles.dq.tiles()) {
            k.st_vec(own.at(warp_vectors(n)), tile);
        }
    }

    /// The sums of a visit's tile; `None` if another thread adds to them.
    pub fn sums(&self, k: &mut Builder, visit: Visit) -> Option<Global> {
        self.outbox.is_none().then(|| {
            let place = self.main.place(k, visit);
            self.main.params.row_tiles.sums(k, place)
        })
    }

    /// Sends the warp's part of dQ from shared memory to the sums of the tile, or has it sent in its turn if
    /// additions have an order.
    pub fn send_part(&self, k: &mut Builder, sums: Option<Global>) {
        if let Some(outbox) = &self.outbox {
            return outbox.relay.publish_operand(k, &outbox.at, self.consumer.elected);
        }
        let Some(sums) = sums else { return };
        let warp = self.consumer.threads.row_warp;
        let staged = k.shared_index(self.main.staging, warp, PART_BYTES);
        let to = k.index(sums, warp, PART_BYTES);
        k.fence_proxy_async_shared();
        k.warp_sync();
        k.guarded(self.consumer.elected, |k| {
            k.bulk_add(to, staged, PART_BYTES);
            k.bulk_commit();
        });
    }
}
