//! The order of memory accesses of a cluster: releases and acquires through memory (PTX ISA, "Release and
//! Acquire Patterns"). They are a fence followed by a strong write, and a strong read that observes the write
//! followed by a fence. The scopes of the read and the write must include each other's thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use ptx::Space;

use super::fences::{Fences, Seen, clock_toll};
use super::weak::WeakMemory;
use crate::order::{Agent, Clock, PagedShadow, Strength, WarpView};

/// The order of accesses to global memory: one per cluster when clusters run independently, otherwise one per
/// grid.
#[derive(Debug, Default)]
pub(crate) struct GlobalOrder {
    pub shadow: PagedShadow,
    sync: HashMap<u64, SyncVariable>,
    pub weak: WeakMemory,
    /// The clusters that have not started, in the order in which they start, if the kernel may cancel them.
    pub unstarted: VecDeque<u64>,
}

impl GlobalOrder {
    pub fn new(granule: u32) -> GlobalOrder {
        GlobalOrder { shadow: PagedShadow::new(granule), ..GlobalOrder::default() }
    }

    /// Size in bytes of the records of reads.
    pub fn bytes(&self) -> u64 {
        self.shadow.bytes()
    }
}

/// The accesses that happened before an acquire that reads this location.
#[derive(Clone, Debug)]
struct SyncVariable {
    clock: Arc<Clock>,
    /// First agent of the cluster that the clock belongs to, and the agent that released it.
    home: Agent,
    agent: Agent,
    lane: usize,
    strength: Strength,
    /// Bytes of the element: accesses of other widths do not synchronise with it.
    width: u8,
    sequential: bool,
    /// The clock that the thread's last release at this location released, and its scope.
    own: Option<(Arc<Clock>, Strength)>,
}

/// A strong access of a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StrongAccess {
    pub space: Space,
    pub address: u64,
    pub lane: usize,
    pub strength: Strength,
    /// Bytes of an element.
    pub width: u8,
}

/// How a strong write releases earlier accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Publication {
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
pub(crate) enum Observation {
    /// The next fence of the thread acquires them.
    Relaxed,
    /// The read itself acquires them.
    Acquire,
}

/// The strong writes and the reads of a cluster.
#[derive(Debug, Default)]
pub(crate) struct MemoryOrder {
    /// Global memory. Clusters that communicate pass it on to each other.
    pub grid: GlobalOrder,
    shared: HashMap<u64, SyncVariable>,
    /// The lanes whose present strong read returns an older value, if reads may do so.
    pub stale: u32,
}

impl MemoryOrder {
    pub fn new(grid: GlobalOrder) -> MemoryOrder {
        MemoryOrder { grid, ..MemoryOrder::default() }
    }

    fn variables(&mut self, space: Space) -> &mut HashMap<u64, SyncVariable> {
        if space == Space::Shared { &mut self.shared } else { &mut self.grid.sync }
    }

    /// Records a strong write by a lane. Later acquires of this location learn the accesses that the lane has
    /// released. Returns the cost in warp instructions.
    pub fn publish(
        &mut self,
        view: &mut WarpView,
        fences: &Fences,
        write: &StrongAccess,
        kind: Publication,
    ) -> u64 {
        let StrongAccess { space, address, lane, strength, width } = *write;
        let release = matches!(kind, Publication::Release | Publication::UpdateRelease);
        let update = matches!(kind, Publication::Update | Publication::UpdateRelease);
        let (home, agent) = (view.home(), view.agent());
        let mut released = Released::default();
        let mut own = None;
        if release {
            let clock = view.release(1 << lane);
            released.add(home, strength, false, || clock.clone());
            own = Some((Arc::new(clock), strength));
        } else {
            let before = self.variables(space).get(&address);
            let same = |old: &&SyncVariable| (old.agent, old.lane, old.width) == (agent, lane, width);
            own = before.filter(same).and_then(|old| old.own.clone()).or(own);
            if let Some((clock, far)) = &own {
                released.add(home, strength.min(*far), false, || (**clock).clone());
            }
        }
        for fence in fences.released.iter().filter(|f| !release && f.lanes >> lane & 1 == 1) {
            released.add(home, fence.strength.min(strength), fence.sequential, || fence.moment.of(1 << lane));
        }
        let Released { clock, strength, mut sequential } = released;
        let toll = clock.as_ref().map_or(0, |c| clock_toll(c.parts()));
        let variables = self.variables(space);
        let Some(mut clock) = clock else {
            if !update {
                variables.remove(&address);
            }
            return toll;
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
        toll
    }

    /// Records a strong read by a lane. If the read acquires, the lane learns the released accesses at once;
    /// otherwise, at its next fence. Returns the cost in warp instructions.
    pub fn observe(
        &mut self,
        (view, live): (&mut WarpView, u32),
        fences: &mut Fences,
        read: &StrongAccess,
        kind: Observation,
    ) -> u64 {
        let StrongAccess { space, address, lane, strength, width } = *read;
        let Some(variable) = self.variables(space).get(&address) else { return 0 };
        let home = view.home();
        let (reach, sequential) = (view.reach(variable.agent), variable.sequential);
        let narrow = reach > Strength::Cta && variable.strength.min(strength) < reach;
        if narrow || variable.width != width {
            return 0;
        }
        let last = Arc::clone(&variable.clock);
        let mut seen = fences.seen.iter_mut().find(|s| s.lanes == 1 << lane && s.strength == reach);
        if kind == Observation::Relaxed
            && let Some(seen) = &mut seen
            && seen.last.as_ref().is_some_and(|l| Arc::ptr_eq(l, &last))
        {
            return 0;
        }
        let mut clock = Clock::new(view.actors().total());
        clock.join_foreign(home, &last, variable.home);
        let toll = clock_toll(clock.parts());
        if kind == Observation::Acquire {
            view.acquire(1 << lane, live, &clock);
            return toll;
        }
        match seen {
            Some(seen) => {
                seen.clock.join(home, &clock);
                seen.sequential |= sequential;
                seen.last = Some(last);
            }
            None => {
                let last = Some(last);
                fences.seen.push(Seen { lanes: 1 << lane, strength: reach, sequential, clock, last });
            }
        }
        toll
    }
}
