//! Two consumer warpgroups that pass on results to each other through shared memory.

use ptx::{Builder, R32};

use crate::WARPGROUP_THREADS;
use crate::named_barriers::{FIRST_PASS, PAIR};

/// The named barriers of two warpgroups. A warpgroup arrives on its own barrier when it has written, and the
/// other one waits there before it reads.
#[derive(Clone, Copy, Debug)]
pub struct WarpgroupPair {
    own: R32,
    other: R32,
}

impl WarpgroupPair {
    /// For warpgroup `number`, 0 or 1.
    pub fn new(k: &mut Builder, number: R32) -> WarpgroupPair {
        let peer = k.xor(number, 1);
        WarpgroupPair { own: k.add(number, FIRST_PASS), other: k.add(peer, FIRST_PASS) }
    }

    /// Says that the warpgroup has written.
    pub fn pass_on(&self, k: &mut Builder) {
        k.named_barrier_arrive(self.own, 2 * WARPGROUP_THREADS);
    }

    /// Waits until the other warpgroup has written.
    pub fn receive(&self, k: &mut Builder) {
        k.named_barrier_sync(self.other, 2 * WARPGROUP_THREADS);
    }

    /// Waits until both warpgroups have arrived.
    pub fn sync(&self, k: &mut Builder) {
        k.named_barrier_sync(PAIR, 2 * WARPGROUP_THREADS);
    }
}
