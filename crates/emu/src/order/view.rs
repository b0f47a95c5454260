//! The accesses that the lanes of a warp know to have happened before.

use super::{Actors, Agent, Clock, Epoch, FLIGHT, ProxySpace, Strength, TensorPipe};

/// The accesses that happened before, as the lanes of one warp know them.
#[derive(Clone, Debug)]
pub(crate) struct WarpView {
    /// First warp of the cluster.
    home: Agent,
    /// Index of the warp in its cluster.
    warp: usize,
    actors: Actors,
    /// Lanes that exist.
    present: u32,
    /// The epoch of accesses made now.
    now: Epoch,
    /// The times that every lane knows.
    base: Clock,
    /// Later times that only some lanes know.
    groups: Vec<(u32, Clock)>,
    /// Accesses that lanes made themselves and have ordered for another proxy.
    shown: Vec<Shown>,
}

/// Accesses of some lanes up to an epoch that are ordered for another proxy. Each lane knows this of its own
/// accesses alone.
#[derive(Clone, Copy, Debug)]
struct Shown {
    /// The agent that stands for these accesses in the other proxy.
    agent: Agent,
    lanes: u32,
    epoch: Epoch,
}

/// The accesses that lanes of a warp knew and had made at some time. Each lane releases its part of them
/// later.
#[derive(Clone, Debug)]
pub(crate) struct Moment(WarpView);

impl Moment {
    /// The accesses that `lanes` knew and had made.
    pub fn of(&self, lanes: u32) -> Clock {
        self.0.known_to(lanes)
    }

    /// The number of listed parts: the cost of copying the moment.
    pub fn parts(&self) -> usize {
        self.0.groups.iter().fold(self.0.base.parts(), |sum, (_, clock)| sum + clock.parts())
    }
}

impl WarpView {
    pub fn new(home: Agent, warp: usize, actors: Actors, present: u32) -> WarpView {
        let base = Clock::new(actors.total());
        WarpView { home, warp, actors, present, now: 1, base, groups: Vec::new(), shown: Vec::new() }
    }

    pub fn now(&self) -> Epoch {
        self.now
    }

    pub fn home(&self) -> Agent {
        self.home
    }

    pub fn actors(&self) -> Actors {
        self.actors
    }

    /// Whether an agent is a warp, whose accesses are those of the generic proxy.
    pub fn is_warp(&self, agent: Agent) -> bool {
        agent % (self.actors.total() as Agent) < self.actors.threads() as Agent
    }

    /// The scope that an access must have to include an agent.
    pub fn reach(&self, agent: Agent) -> Strength {
        let (total, threads) = (self.actors.total() as Agent, self.actors.threads() as Agent);
        let local = agent.wrapping_sub(self.home);
        if local >= total {
            Strength::Gpu
        } else if local < threads
            && local / self.actors.warps as Agent == (self.warp / self.actors.warps) as Agent
        {
            Strength::Cta
        } else {
            Strength::Cluster
        }
    }

    pub fn agent(&self) -> Agent {
        self.home + self.warp as Agent
    }

    /// The epoch up to which every lane of this warp knows every lane of another actor of the cluster; 0 for
    /// other clusters.
    #[inline(always)]
    pub fn known_to_all(&self, warp: usize) -> Epoch {
        self.base.warp(warp)
    }

    /// Whether every lane of this warp knows the accesses of `lanes` of any agent at `epoch` from a
    /// synchronisation of all lanes. Otherwise each lane may still know them.
    #[inline]
    pub fn all_were_told(&self, agent: Agent, lanes: u32, epoch: Epoch) -> bool {
        self.base.unknown(self.home, agent, lanes, epoch) == 0
    }

    /// Whether the accesses of `lanes` of a warp of this cluster at `epoch` happened before what `lane` does
    /// now.
    #[inline(always)]
    pub fn knows(&self, lane: usize, warp: usize, lanes: u32, epoch: Epoch) -> bool {
        epoch <= self.base.warp(warp)
            || (epoch != FLIGHT && warp == self.warp && lanes == 1 << lane)
            || self.knows_agent(lane, self.home + warp as Agent, lanes, epoch)
    }

    /// Whether the accesses of `lanes` of any agent of the grid at `epoch` happened before what `lane` does
    /// now.
    pub fn knows_agent(&self, lane: usize, agent: Agent, lanes: u32, epoch: Epoch) -> bool {
        if epoch == FLIGHT {
            return false;
        }
        let own = if agent == self.agent() { 1 << lane } else { 0 };
        self.was_told(lane, agent, lanes & !own, epoch)
    }

    /// Whether `lane` knows the accesses from a synchronisation, or has ordered its own with
    /// [`WarpView::show`]. That `lane` made the accesses itself is not enough.
    pub fn was_told(&self, lane: usize, agent: Agent, lanes: u32, epoch: Epoch) -> bool {
        let own = |s: &Shown| s.agent == agent && s.lanes >> lane & 1 == 1 && epoch <= s.epoch;
        let lanes = if self.shown.iter().any(own) { lanes & !(1 << lane) } else { lanes };
        let mut left = self.base.unknown(self.home, agent, lanes, epoch);
        for (members, clock) in &self.groups {
            if members >> lane & 1 == 1 {
                left &= clock.unknown(self.home, agent, left, epoch);
            }
        }
        left == 0
    }

    /// The accesses that `lanes` know and have made so far.
    fn known_to(&self, lanes: u32) -> Clock {
        let mut clock = self.base.clone();
        for (members, known) in &self.groups {
            if members & lanes != 0 {
                clock.join(self.home, known);
            }
        }
        let whole = |lanes| if lanes & self.present == self.present { !0 } else { lanes };
        clock.learn(self.home, self.agent(), whole(lanes), self.now);
        for shown in self.shown.iter().filter(|s| s.lanes & lanes != 0) {
            clock.learn(self.home, shown.agent, whole(shown.lanes & lanes), shown.epoch);
        }
        clock
    }

    /// The accesses that `lanes` know and have made so far. A new epoch begins.
    pub fn release(&mut self, lanes: u32) -> Clock {
        let clock = self.known_to(lanes);
        self.now += 1;
        clock
    }

    /// The present state; each of `lanes` releases its part of it later. A new epoch begins.
    pub fn moment(&mut self, lanes: u32) -> Moment {
        let groups = self.groups.iter().filter(|(members, _)| members & lanes != 0).cloned().collect();
        let then = WarpView { base: self.base.clone(), groups, shown: self.shown.clone(), ..*self };
        self.now += 1;
        Moment(then)
    }

    /// A moment at which every lane knew a clock and had made no accesses.
    pub fn carried(&self, clock: &Clock) -> Moment {
        Moment(WarpView { now: 0, base: clock.clone(), groups: Vec::new(), shown: Vec::new(), ..*self })
    }

    /// Adds what `clock` knows to the knowledge of `lanes`. `live` are the lanes that still run.
    pub fn acquire(&mut self, lanes: u32, live: u32, clock: &Clock) {
        if lanes & live == live {
            self.base.join(self.home, clock);
            return;
        }
        match self.groups.iter_mut().find(|(members, _)| *members == lanes) {
            Some((_, known)) => known.join(self.home, clock),
            None => self.groups.push((lanes, clock.clone())),
        }
    }

    /// Adds the accesses of an actor of the cluster up to `epoch` to the knowledge of `lanes`.
    pub fn learn(&mut self, lanes: u32, live: u32, (actor, of): (usize, u32), epoch: Epoch) {
        let agent = self.home + actor as Agent;
        if lanes & live == live {
            return self.base.learn(self.home, agent, of, epoch);
        }
        let mut clock = Clock::new(self.actors.total());
        clock.learn(self.home, agent, of, epoch);
        self.acquire(lanes, live, &clock);
    }

    /// Notes that `lanes` have waited for the previous grid.
    pub fn wait_for_grid(&mut self, lanes: u32, live: u32) {
        if let Some(grid) = self.actors.grid_before() {
            self.learn(lanes, live, (grid, !0), 1);
        }
    }

    /// Whether the previous grid has ended for `lane`: it waited, or synchronised with a thread that did.
    #[inline(always)]
    pub fn is_behind_grid(&self, lane: usize) -> bool {
        let Some(grid) = self.actors.grid_before() else { return true };
        self.base.warp(grid) > 0 || self.was_told(lane, self.home + grid as Agent, 1, 1)
    }

    /// A proxy fence by `lanes`: all accesses that each of them knows and made are ordered for the
    /// asynchronous proxy's accesses to `space`. No lane learns the accesses of other lanes.
    pub fn fence_proxy(&mut self, lanes: u32, live: u32, space: ProxySpace) {
        let known = self.groups.iter().filter(|(members, _)| members & lanes != 0);
        let known = known.map(|(members, clock)| (members & lanes, clock.clone()));
        let known: Vec<_> = std::iter::once((lanes, self.base.clone())).chain(known).collect();
        for (members, mut clock) in known {
            clock.fence(self.home, self.actors, space);
            self.acquire(members, live, &clock);
        }
        self.show(lanes, self.warp + self.actors.fenced(space));
    }

    /// Records the accesses of each of `lanes` so far as accesses of `actor`. A new epoch begins.
    pub fn show(&mut self, lanes: u32, actor: usize) {
        let agent = self.home + actor as Agent;
        self.shown.iter_mut().filter(|s| s.agent == agent).for_each(|s| s.lanes &= !lanes);
        self.shown.retain(|s| s.lanes != 0);
        self.shown.push(Shown { agent, lanes, epoch: self.now });
        self.now += 1;
    }

    /// The view of an asynchronous instruction of tensor memory that `lane` issues: it executes after the
    /// products that this warp issued, up to epoch `own`, and after those of other warps of which the lane
    /// knows that they were issued.
    pub fn as_issuer(&self, lane: usize, own: Epoch) -> WarpView {
        let mut base = self.known_to(1 << lane);
        for warp in 0..self.actors.threads() {
            let issued = base.warp(self.actors.tensor(warp, TensorPipe::Issued));
            let issued = if warp == self.warp { own } else { issued };
            let products = self.home + self.actors.tensor(warp, TensorPipe::Product) as Agent;
            base.learn(self.home, products, !0, issued);
        }
        WarpView { base, groups: Vec::new(), shown: self.shown.clone(), ..*self }
    }

    /// The view of an instruction that `live` lanes execute together: it knows what each of them knows.
    pub fn together(&self, live: u32) -> WarpView {
        WarpView { base: self.known_to(live), groups: Vec::new(), shown: self.shown.clone(), ..*self }
    }

    /// The instructions of tensor memory that `lanes` know to be complete, or issued, as a moment.
    pub fn tensor_moment(&self, lanes: u32) -> Moment {
        let mut clock = self.known_to(lanes);
        clock.keep(&self.actors.tensors(), self.actors.total());
        self.carried(&clock)
    }

    /// Synchronises lanes: afterwards each knows what all of them know.
    pub fn meet(&mut self, lanes: u32, live: u32) {
        let clock = self.release(lanes);
        self.acquire(lanes, live, &clock);
        if lanes & live == live {
            self.groups.clear();
        }
    }

    /// Drops the separate knowledge of single lanes after a synchronisation in which all live lanes took
    /// part.
    pub fn merged(&mut self) {
        self.groups.clear();
    }
}
