//! Releases and acquires through memory (PTX ISA, "Release and Acquire Patterns"): a fence followed by a
//! strong write, and a strong read that observes the write followed by a fence. The scopes of the read and
//! the write must include each other's thread.

use std::sync::Arc;

use ptx::{FenceSem, Scope, Space};

use super::access::Site;
use super::warp::{Fenced, Seen, Warp};
use super::{Env, SyncVariable};
use crate::decode::scope_strength;
use crate::order::{Clock, Strength};

/// How a strong write releases earlier accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Publication {
    /// Releases the accesses that the thread's fences cover. Earlier releases at the location are forgotten.
    Store,
    /// Releases all accesses before the write. Earlier releases at the location are forgotten.
    Release,
    /// Like `Store`, in a read-modify-write: earlier releases at the location stay released.
    Update,
    /// Like `Release`, in a read-modify-write: earlier releases at the location stay released.
    UpdateRelease,
}

/// How a strong read acquires the accesses that it observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Observation {
    /// The next fence of the thread acquires them.
    Relaxed,
    /// The read itself acquires them.
    Acquire,
}

impl Env<'_> {
    pub(super) fn fence(&mut self, warp: &mut Warp, sem: FenceSem, scope: Scope, lanes: u32) {
        let strength = scope_strength(scope);
        for seen in std::mem::take(&mut warp.seen) {
            // If the scope of a release is too wide for this fence, a later fence with a wider scope acquires
            // it.
            let here = if strength >= seen.strength { seen.lanes & lanes } else { 0 };
            if here != 0 {
                warp.view.acquire(here, warp.live, &seen.clock);
            }
            self.toll += toll(seen.clock.parts());
            if seen.lanes & !here != 0 {
                warp.seen.push(Seen { lanes: seen.lanes & !here, ..seen });
            }
        }
        let moment = warp.view.moment(lanes);
        self.toll += toll(moment.parts());
        let sequential = sem == FenceSem::Sc && strength == Strength::Gpu;
        for before in &mut warp.released {
            // An earlier fence of these lanes with a wider scope, or an earlier `fence.sc`, still covers the
            // accesses before it.
            if before.strength <= strength && (sequential || !before.sequential) {
                before.lanes &= !lanes;
            }
        }
        warp.released.retain(|f| f.lanes != 0);
        if sequential {
            self.note_fence(warp, lanes);
        }
        warp.released.push(Fenced { lanes, strength, sequential, moment });
    }

    /// The accesses that a relaxed arrival releases: those that earlier fences of these lanes cover, if the
    /// fences have at least this scope. Fences for initialised mbarriers are among them.
    pub(super) fn released_by_fences(&mut self, warp: &mut Warp, lanes: u32, scope: Strength) -> Clock {
        let mut clock = warp.view.release(lanes);
        clock.keep(&self.actors.initialisations(), self.actors.total());
        for fence in warp.released.iter().filter(|f| f.lanes & lanes != 0 && f.strength >= scope) {
            clock.join(warp.view.home(), &fence.moment.of(fence.lanes & lanes));
        }
        clock
    }

    fn variables(&mut self, space: Space) -> &mut std::collections::HashMap<u64, SyncVariable> {
        if space == Space::Shared { &mut self.shared_sync } else { &mut self.order.sync }
    }

    /// Records a strong write by a lane. Later acquires of this location learn the accesses that the lane has
    /// released.
    pub(super) fn publish(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lane: usize,
        address: u64,
        kind: Publication,
    ) {
        let strength = site.strength;
        let release = matches!(kind, Publication::Release | Publication::UpdateRelease);
        let update = matches!(kind, Publication::Update | Publication::UpdateRelease);
        let (home, agent, width) = (warp.view.home(), warp.view.agent(), site.inst.width);
        let mut clock: Option<Clock> = None;
        let mut reach = Strength::Weak;
        if release {
            clock = Some(warp.view.release(1 << lane));
            reach = strength;
        }
        let mut sequential = false;
        for fence in warp.released.iter().filter(|f| !release && f.lanes >> lane & 1 == 1) {
            let far = fence.strength.min(strength);
            sequential |= fence.sequential;
            let released = || fence.moment.of(1 << lane);
            match &mut clock {
                // If there are fences of several scopes, the widest one is used. Accesses that only narrower
                // fences cover are left out.
                Some(known) if far == reach => known.join(home, &released()),
                Some(_) if far < reach => {}
                _ => (clock, reach) = (Some(released()), far),
            }
        }
        self.toll += clock.as_ref().map_or(0, |c| toll(c.parts()));
        let variables = self.variables(site.space);
        match (clock, variables.get_mut(&address)) {
            (Some(clock), Some(old)) if update && old.width == width => {
                // A release sequence: earlier releases at this location stay released.
                let mut joined = clock;
                joined.join_foreign(home, &old.clock, old.home);
                let sequential = sequential || old.sequential;
                let clock = Arc::new(joined);
                let strength = reach.min(old.strength);
                *old = SyncVariable { clock, home, agent, strength, width, sequential };
            }
            (Some(clock), _) => {
                let clock = Arc::new(clock);
                let strength = reach;
                variables.insert(address, SyncVariable { clock, home, agent, strength, width, sequential });
            }
            (None, Some(_)) if !update => {
                variables.remove(&address);
            }
            (None, _) => {}
        }
    }

    /// Records a strong read by a lane. If the read acquires, the lane learns the released accesses at once;
    /// otherwise, at its next fence.
    pub(super) fn observe(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lane: usize,
        address: u64,
        kind: Observation,
    ) {
        let actors = self.actors.total();
        let Some(variable) = self.variables(site.space).get(&address) else { return };
        let home = warp.view.home();
        let (reach, sequential) = (warp.view.reach(variable.agent), variable.sequential);
        let narrow = reach > Strength::Cta && variable.strength.min(site.strength) < reach;
        if narrow || variable.width != site.inst.width {
            return;
        }
        let last = Arc::clone(&variable.clock);
        let mut seen = warp.seen.iter_mut().find(|s| s.lanes == 1 << lane && s.strength == reach);
        if kind == Observation::Relaxed
            && let Some(seen) = &mut seen
            && seen.last.as_ref().is_some_and(|l| Arc::ptr_eq(l, &last))
        {
            return;
        }
        let mut clock = Clock::new(actors);
        clock.join_foreign(home, &last, variable.home);
        self.toll += toll(clock.parts());
        if kind == Observation::Acquire {
            warp.view.acquire(1 << lane, warp.live, &clock);
            return;
        }
        match seen {
            Some(seen) => {
                seen.clock.join(home, &clock);
                seen.sequential |= sequential;
                seen.last = Some(last);
            }
            None => {
                let last = Some(last);
                warp.seen.push(Seen { lanes: 1 << lane, strength: reach, sequential, clock, last });
            }
        }
    }
}

/// Cost of copying and joining a clock with `parts` parts, in warp instructions.
fn toll(parts: usize) -> u64 {
    1 + parts as u64 / 16
}
