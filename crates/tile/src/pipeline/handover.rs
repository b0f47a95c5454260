//! Handover of tiles among consumer warpgroups: all of them write parts of a tile that all of them read.

use ptx::{Builder, Pred, Shared};

use crate::{Mbarriers, PipelineState};

/// One mbarrier for each slot of a ring of tiles that consumer warps fill together. No barrier says that a
/// slot may be filled again. With two slots none is needed if a warp reads a slot before it fills the next
/// one: a warp that waits for a slot then knows that all warps have read the slot before.
#[derive(Clone, Copy, Debug)]
pub struct Handover {
    slots: u32,
    filled: Mbarriers,
}

impl Handover {
    /// A ring of `slots` tiles whose barriers begin at `barriers`.
    pub const fn new(barriers: Shared, slots: u32) -> Handover {
        Handover { slots, filled: Mbarriers::new(barriers) }
    }

    /// Bytes of the barriers.
    pub const fn bytes(slots: u32) -> u32 {
        slots * Mbarriers::BYTES
    }

    /// Initialises the barriers for tiles that `warps` warps fill. Run by one thread.
    pub fn init(&self, k: &mut Builder, warps: u32) {
        for slot in 0..self.slots {
            k.mbarrier_init(self.filled.at(slot), warps);
        }
    }

    /// The position of a consumer in the ring.
    pub fn state(&self, k: &mut Builder) -> PipelineState {
        PipelineState::consumer(k, self.slots)
    }

    /// Passes on a warp's part of the current slot, which `wgmma` will read.
    pub fn publish(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        k.fence_proxy_async_shared();
        k.warp_sync();
        let barrier = self.barrier(k, at);
        k.guarded(elected, |k| k.mbarrier_arrive(barrier));
    }

    /// Waits until all warps have passed on their parts of the current slot.
    pub fn wait(&self, k: &mut Builder, at: &PipelineState) {
        let barrier = self.barrier(k, at);
        k.mbarrier_wait_parity(barrier, at.parity);
    }

    fn barrier(&self, k: &mut Builder, at: &PipelineState) -> Shared {
        self.filled.index(k, at.stage)
    }
}
