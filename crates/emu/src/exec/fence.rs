//! Releases and acquires through memory (PTX ISA, "Release and Acquire Patterns"): a fence followed by a
//! strong write, and a strong read that observes the write followed by a fence. The scopes of the read and
//! the write must include each other's thread.

use std::sync::Arc;

use ptx::{FenceSem, Scope, Space};

use super::access::Site;
use super::warp::{Fenced, Seen, Warp};
use super::{Env, SyncVariable};
use crate::decode::scope_strength;
use crate::order::{Agent, Clock, Strength};

/// How a strong write releases earlier accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Publication {
    /// Releases the accesses that the thread's fences cover, and those that the thread's last release at the
    /// location covers if no other thread wrote in between (PTX ISA, "Release and Acquire Patterns": a
    /// release followed by a strong write). Earlier releases of other threads are forgotten.
    Store,
    /// Releases all accesses before the write. Earlier releases at the location are forgotten.
    Release,
    /// Like `Store`, in a read-modify-write: earlier releases at the location stay released.
    Update,
    /// Like `Release`, in a read-modify-write: earlier releases at the location stay released.
    UpdateRelease,
}

/// The clock that a write releases, and the scope of the release.
#[derive(Default)]
struct Released {
    clock: Option<Clock>,
    strength: Strength,
    sequential: bool,
}

impl Released {
    /// Adds what a fence, or an earlier release at the location, released at a scope. Of several scopes, the
    /// widest one is used: accesses that only narrower ones cover are left out.
    fn add(&mut self, home: Agent, far: Strength, sequential: bool, clock: impl FnOnce() -> Clock) {
        self.sequential |= sequential;
        match &mut self.clock {
            Some(known) if far == self.strength => known.join(home, &clock()),
            Some(_) if far < self.strength => {}
            _ => (self.clock, self.strength) = (Some(clock()), far),
        }
    }
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
        let mut released = Released::default();
        let mut own = None;
        if release {
            let clock = warp.view.release(1 << lane);
            released.add(home, strength, false, || clock.clone());
            own = Some((Arc::new(clock), strength));
        } else {
            let before = self.variables(site.space).get(&address);
            let same = |old: &&SyncVariable| (old.agent, old.lane, old.width) == (agent, lane, width);
            own = before.filter(same).and_then(|old| old.own.clone()).or(own);
            if let Some((clock, far)) = &own {
                released.add(home, strength.min(*far), false, || (**clock).clone());
            }
        }
        for fence in warp.released.iter().filter(|f| !release && f.lanes >> lane & 1 == 1) {
            released.add(home, fence.strength.min(strength), fence.sequential, || fence.moment.of(1 << lane));
        }
        let Released { clock, strength, mut sequential } = released;
        self.toll += clock.as_ref().map_or(0, |c| toll(c.parts()));
        let variables = self.variables(site.space);
        let Some(mut clock) = clock else {
            if !update {
                variables.remove(&address);
            }
            return;
        };
        let mut reach = strength;
        if let Some(old) = variables.get(&address).filter(|old| update && old.width == width) {
            // A release sequence: earlier releases at this location stay released.
            clock.join_foreign(home, &old.clock, old.home);
            sequential |= old.sequential;
            reach = reach.min(old.strength);
        }
        let clock = Arc::new(clock);
        let variable = SyncVariable { clock, home, agent, lane, strength: reach, width, sequential, own };
        variables.insert(address, variable);
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
