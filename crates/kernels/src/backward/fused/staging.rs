//! Parts of dQ on their way to the sums: each consumer warp copies its part to shared memory, and a bulk
//! reduction adds it from there.

use ptx::{Builder, CmpOp, Global, Pointer, R64};
use tile::warp_vectors;

use super::consume::Warpgroup;
use super::convert::PART_BYTES;

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

    /// Orders the stores of the warp's part before bulk reductions that read it.
    pub fn order_part(&self, k: &mut Builder) {
        k.fence_proxy_async_shared();
        k.warp_sync();
    }

    /// Sends the warp's part of dQ, which has been ordered, from shared memory to the sums at an address,
    /// unless it is 0. If additions have an order, has it sent in its turn.
    pub fn send_part(&self, k: &mut Builder, sums: R64) {
        if let Some(outbox) = &self.outbox {
            return outbox.relay.publish(k, &outbox.at, self.consumer.elected);
        }
        let warp = self.consumer.threads.row_warp;
        let staged = k.shared_index(self.main.staging, warp, PART_BYTES);
        let to = k.index(Global { base: sums, offset: 0 }, warp, PART_BYTES);
        let sends = k.setp_u_and(CmpOp::Ne, sums, 0, self.consumer.elected);
        k.guarded(sends, |k| {
            k.bulk_add(to, staged, PART_BYTES);
            k.bulk_commit();
        });
    }
}
