//! A ring of slots that the warps of one warpgroup fill and the warps of another one read. On either side
//! there may be one thread instead.

use ptx::{Builder, Pred, Shared};

use crate::{Mbarriers, PipelineState};

/// Warps of a warpgroup: the arrivals of a phase.
const WARPS: u32 = 4;

/// The mbarriers of the ring: one *full* barrier per slot, then one *empty* barrier per slot.
#[derive(Clone, Copy, Debug)]
pub struct Relay {
    slots: u32,
    /// The arrivals that fill a slot, and those that return it.
    arrivals: [u32; 2],
    full: Mbarriers,
    empty: Mbarriers,
}

impl Relay {
    /// A ring of `slots` slots whose barriers begin at `barriers`.
    pub fn new(barriers: Shared, slots: u32) -> Relay {
        let full = Mbarriers::new(barriers);
        Relay { slots, arrivals: [WARPS; 2], full, empty: full.from(slots) }
    }

    /// With slots that one thread fills.
    #[must_use]
    pub const fn from_thread(self) -> Relay {
        let [_, readers] = self.arrivals;
        Relay { arrivals: [1, readers], ..self }
    }

    /// With slots that one thread reads.
    #[must_use]
    pub const fn to_thread(self) -> Relay {
        let [writers, _] = self.arrivals;
        Relay { arrivals: [writers, 1], ..self }
    }

    /// Bytes of the barriers.
    pub const fn bytes(slots: u32) -> u32 {
        2 * slots * Mbarriers::BYTES
    }

    /// Initialises the barriers. Run by one thread.
    pub fn init(&self, k: &mut Builder) {
        for (barriers, arrivals) in [self.full, self.empty].into_iter().zip(self.arrivals) {
            for slot in 0..self.slots {
                k.mbarrier_init(barriers.at(slot), arrivals);
            }
        }
    }

    /// The position of a warp that fills the slots.
    pub fn writer(&self, k: &mut Builder) -> PipelineState {
        PipelineState::producer(k, self.slots)
    }

    /// The position of a warp that reads the slots.
    pub fn reader(&self, k: &mut Builder) -> PipelineState {
        PipelineState::consumer(k, self.slots)
    }

    /// Waits until the current slot may be filled.
    pub fn acquire(&self, k: &mut Builder, at: &PipelineState) {
        let barrier = self.empty.index(k, at.stage);
        k.mbarrier_wait_parity(barrier, at.parity);
    }

    /// Passes on a warp's part of the current slot, and advances.
    pub fn publish(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        k.warp_sync();
        self.arrive(k, self.full, at, elected);
    }

    /// Like [`Relay::publish`], for parts that `wgmma` or bulk copies will read.
    pub fn publish_operand(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        k.fence_proxy_async_shared();
        self.publish(k, at, elected);
    }

    /// Passes on the current slot if one thread fills the slots, and advances.
    pub fn publish_by_thread(&self, k: &mut Builder, at: &PipelineState) {
        Relay::arrive_once(k, self.full, at);
    }

    /// Waits until all warps have passed on their parts of the current slot.
    pub fn wait(&self, k: &mut Builder, at: &PipelineState) {
        let barrier = self.full.index(k, at.stage);
        k.mbarrier_wait_parity(barrier, at.parity);
    }

    /// Returns the current slot for a warp that has read it, and advances.
    pub fn release(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        k.warp_sync();
        self.release_operand(k, at, elected);
    }

    /// Like [`Relay::release`], for a warp whose products with the slot are complete.
    pub fn release_operand(&self, k: &mut Builder, at: &PipelineState, elected: Pred) {
        self.arrive(k, self.empty, at, elected);
    }

    /// Returns the current slot if one thread reads the slots, and advances.
    pub fn release_by_thread(&self, k: &mut Builder, at: &PipelineState) {
        Relay::arrive_once(k, self.empty, at);
    }

    fn arrive_once(k: &mut Builder, barriers: Mbarriers, at: &PipelineState) {
        let barrier = barriers.index(k, at.stage);
        k.mbarrier_arrive(barrier);
        at.advance(k);
    }

    fn arrive(&self, k: &mut Builder, barriers: Mbarriers, at: &PipelineState, elected: Pred) {
        let barrier = barriers.index(k, at.stage);
        k.guarded(elected, |k| k.mbarrier_arrive(barrier));
        at.advance(k);
    }
}
