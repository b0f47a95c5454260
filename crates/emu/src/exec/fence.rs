//! Fences, and what strong writes and reads release and acquire.

use ptx::{FenceSem, Scope, Space};

use super::Env;
use super::access::Site;
use super::units::{Observation, Publication, StrongAccess};
use super::warp::Warp;
use crate::decode::scope_strength;
use crate::memory::Chunk;
use crate::order::Strength;
use crate::report::HazardKind;

fn strong(site: &Site, lane: usize, address: u64) -> StrongAccess {
    StrongAccess { space: site.space, address, lane, strength: site.strength, width: site.inst.width }
}

impl Env<'_> {
    pub(super) fn fence(&mut self, warp: &mut Warp, sem: FenceSem, scope: Scope, lanes: u32) {
        let strength = scope_strength(scope);
        let sequential = sem == FenceSem::Sc && strength == Strength::Gpu;
        if sequential && self.facts.context.options.weak {
            // For every second pair of seeds, the fence comes early in Fence-SC order.
            let early = self.facts.context.options.seed / 2 % 2 == 1;
            self.order.grid.weak.fence(&warp.view, lanes, early);
        }
        self.log.toll += warp.fences.fence(&mut warp.view, (lanes, warp.live), strength, sequential);
    }

    /// Records a strong write by a lane.
    pub(super) fn publish(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lane: usize,
        address: u64,
        kind: Publication,
    ) {
        let write = strong(site, lane, address);
        self.log.toll += self.order.publish(&mut warp.view, &warp.fences, &write, kind);
    }

    /// Records a strong read by a lane.
    pub(super) fn observe(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lane: usize,
        address: u64,
        kind: Observation,
    ) {
        let read = strong(site, lane, address);
        let (view, live) = (&mut warp.view, warp.live);
        self.log.toll += self.order.observe((view, live), &mut warp.fences, &read, kind);
    }

    fn is_weak(&self, site: &Site) -> bool {
        self.facts.context.options.weak
            && site.space == Space::Global
            && site.strength != Strength::Weak
            && matches!(site.bytes, 4 | 8)
    }

    /// Called before a strong write of global memory, with the value that it replaces. `observes` states that
    /// the write also reads that value.
    pub(super) fn note_replaced(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        (value, observes): (Chunk, bool),
    ) {
        if self.is_weak(site) {
            let place = (address, site.bytes);
            self.order.grid.weak.replace(&warp.view, (lane, site.strength), place, (value, observes));
        }
    }

    /// The value that a strong read of global memory returns. `newest` is the value in memory.
    pub(super) fn weak_value(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        newest: Chunk,
    ) -> Chunk {
        if !self.is_weak(site) {
            return newest;
        }
        let (place, weak) = ((address, site.bytes), &mut self.order.grid.weak);
        let (value, older) = weak.read(&warp.view, (lane, site.strength), place, newest, &mut self.rng);
        if older {
            self.order.stale |= 1 << lane;
            let place = Some((Space::Global, address));
            self.report(HazardKind::WeakOrder, site.inst, warp.index, lane, place, || {
                "a relaxed or volatile read may return an older value: no release and acquire order the write before it"
                    .into()
            });
        }
        value
    }
}
