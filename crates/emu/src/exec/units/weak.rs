//! Weak behaviours of strong accesses (PTX ISA, "Memory Consistency Model"). A relaxed or volatile read may
//! return an older value than the newest one; only coherence and happens-before limit which values are
//! possible. With [`Options::weak`](crate::Options::weak), reads of global memory return older values at
//! random.
//!
//! Each strong write keeps the value that it replaced. A read may return that value unless the write happened
//! before the read, the reading warp made the write, the thread has already seen the write, or a strong read
//! that observed the write happened before the read (PTX ISA, "Causality Order", rule 2). A fence.sc of the
//! writer after the write and a fence.sc of the reader behind it in Fence-SC order also order the write
//! before the read.

use std::collections::{HashMap, VecDeque};

use rand::{Rng, RngCore};

use super::fence_order::{FenceId, FenceOrder};
use crate::memory::Chunk;
use crate::order::{Agent, Epoch, Strength, WarpView};

/// Number of replaced values that are kept for each location.
const KEPT: usize = 4;

/// How often a thread may read an older value at one location. The limit ensures that a loop which waits for
/// the newest value ends.
const OLDER: u32 = 3;

/// A strong write, and the value that it replaced.
#[derive(Clone, Copy, Debug)]
struct Replaced {
    value: Chunk,
    agent: Agent,
    lane: usize,
    epoch: Epoch,
    strength: Strength,
    time: u64,
    /// The last fence before the writes up to the replaced value.
    behind: FenceId,
}

/// A strong read at a time, and the time of the write that it observed.
#[derive(Clone, Copy, Debug)]
struct Observer {
    agent: Agent,
    lane: usize,
    epoch: Epoch,
    at: u64,
    time: u64,
}

/// The strong accesses to a location.
#[derive(Clone, Debug, Default)]
struct Location {
    replaced: VecDeque<Replaced>,
    observers: Vec<Observer>,
    /// The last fence, in Fence-SC order, before a write of the location or a read of an older value, and the
    /// last fence before a read.
    written: FenceId,
    read: FenceId,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The time of the newest write that the thread has seen at this location.
    time: u64,
    older: u32,
}

/// The fences that limit where the next fence of a cluster stands in Fence-SC order.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    /// The last fence of the cluster.
    own: FenceId,
    /// The last fence before an access that conflicts with an earlier access of the cluster. If the next
    /// fence preceded that one, the two accesses would contradict the causality order.
    floor: FenceId,
}

type Thread = (Agent, usize);

/// The strong writes to global memory, in the order of their execution.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeakMemory {
    time: u64,
    /// Keyed by address and size in bytes.
    locations: HashMap<(u64, u32), Location>,
    seen: HashMap<(u64, Thread), Seen>,
    /// Each thread's sequentially consistent fences, with their times.
    fences: HashMap<Thread, Vec<(u64, FenceId)>>,
    order: FenceOrder,
    /// By the first agent of the cluster.
    limits: HashMap<Agent, Limits>,
}

impl Location {
    /// Notes what a strong read observes, if it is morally strong with the write at `time`.
    fn observe(&mut self, view: &WarpView, lane: usize, strength: Strength, (at, time): (u64, u64)) {
        let (agent, epoch) = (view.agent(), view.now());
        let Some(write) = self.replaced.iter().find(|write| write.time == time) else { return };
        if strength.min(write.strength) < view.reach(write.agent) {
            return;
        }
        let same = |o: &&mut Observer| (o.agent, o.lane, o.epoch) == (agent, lane, epoch);
        match self.observers.iter_mut().find(same) {
            Some(known) => (known.at, known.time) = (at, known.time.max(time)),
            None => self.observers.push(Observer { agent, lane, epoch, at, time }),
        }
    }

    /// The strong reads that observed a write or a later one.
    fn observers_of(&self, write: &Replaced) -> impl Iterator<Item = &Observer> {
        let time = write.time;
        self.observers.iter().filter(move |observer| observer.time >= time)
    }
}

impl WeakMemory {
    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// Whether sequentially consistent fences order what a thread did at a time before the present read.
    fn fenced(&self, thread: Thread, time: u64, reader: Thread) -> bool {
        let Some((_, last)) = self.fences.get(&reader).and_then(|fences| fences.last()) else { return false };
        let first = self.fences.get(&thread).into_iter().flatten().find(|(at, _)| *at >= time);
        first.is_some_and(|(_, fence)| self.order.precedes(*fence, *last))
    }

    /// Whether a write precedes the present read in causality order.
    fn precedes(&self, location: &Location, write: &Replaced, view: &WarpView, lane: usize) -> bool {
        let reader = (view.agent(), lane);
        let before = |agent: Agent, of: usize, epoch: Epoch, time: u64| {
            view.knows_agent(lane, agent, 1 << of, epoch) || self.fenced((agent, of), time, reader)
        };
        before(write.agent, write.lane, write.epoch, write.time)
            || location.observers_of(write).any(|o| before(o.agent, o.lane, o.epoch, o.at))
    }

    /// Keeps the Fence-SC order consistent with a write of a cluster.
    fn limit_by_write(&mut self, home: Agent, place: (u64, u32)) {
        let (limits, location) =
            (self.limits.entry(home).or_default(), self.locations.entry(place).or_default());
        // A thread that observes the write is also ordered after the reads of older values.
        location.written = self.order.later(location.written, location.read);
        limits.floor = self.order.later(limits.floor, location.written);
        location.written = self.order.later(location.written, limits.own);
    }

    /// Keeps the Fence-SC order consistent with a read that returned a value behind `written`, the newest one
    /// or an older one.
    fn limit_by_read(&mut self, home: Agent, place: (u64, u32), written: FenceId, older: bool) {
        let limits = self.limits.entry(home).or_default();
        limits.floor = self.order.later(limits.floor, written);
        if let Some(location) = self.locations.get_mut(&place) {
            location.read = self.order.later(location.read, limits.own);
            if older {
                // A thread that observes the newest value is ordered after this read.
                location.written = self.order.later(location.written, limits.own);
            }
        }
    }

    /// Called before a strong write, with the value that it replaces. `observes` states that the write also
    /// reads that value.
    pub fn replace(
        &mut self,
        view: &WarpView,
        (lane, strength): (usize, Strength),
        place: (u64, u32),
        (value, observes): (Chunk, bool),
    ) {
        let (agent, epoch, time) = (view.agent(), view.now(), self.tick());
        let behind = self.locations.get(&place).map_or(FenceId::default(), |location| location.written);
        self.limit_by_write(view.home(), place);
        let location = self.locations.entry(place).or_default();
        if let Some(last) = location.replaced.back().filter(|_| observes) {
            let last = last.time;
            location.observe(view, lane, strength, (time, last));
        }
        location.replaced.push_back(Replaced { value, agent, lane, epoch, strength, time, behind });
        if location.replaced.len() > KEPT {
            location.replaced.pop_front();
        }
        self.seen.entry((place.0, (agent, lane))).or_default().time = time;
    }

    /// The value that a strong read returns, and whether it is older than `newest`, the value in memory.
    pub fn read(
        &mut self,
        view: &WarpView,
        (lane, strength): (usize, Strength),
        place: (u64, u32),
        newest: Chunk,
        rng: &mut impl RngCore,
    ) -> (Chunk, bool) {
        let reader = (view.agent(), lane);
        let location = self.locations.entry(place).or_default();
        let mut behind = location.written;
        let mut seen = self.seen.get(&(place.0, reader)).copied().unwrap_or_default();
        let mut value = newest;
        let mut taken = location.replaced.back().map_or(0, |write| write.time);
        if seen.older < OLDER {
            let location = &self.locations[&place];
            for write in location.replaced.iter().rev() {
                let known = write.agent == reader.0
                    || write.time <= seen.time
                    || self.precedes(location, write, view, lane);
                if known || !rng.random_bool(0.5) {
                    break;
                }
                (value, behind) = (write.value, write.behind);
                taken = write.time - 1;
            }
        }
        let older = value != newest;
        seen.older += u32::from(older);
        seen.time = seen.time.max(if older { 0 } else { taken });
        self.seen.insert((place.0, reader), seen);
        self.limit_by_read(view.home(), place, behind, older);
        let now = self.tick();
        if let Some(location) = self.locations.get_mut(&place).filter(|_| !older) {
            location.observe(view, lane, strength, (now, taken));
        }
        (value, older)
    }

    /// Called at a sequentially consistent fence of gpu scope. An early fence comes as early in Fence-SC
    /// order as the accesses so far allow: before fences of other clusters that ran earlier. Then no fence in
    /// front of an observing read orders anything because it happened to run late.
    pub fn fence(&mut self, view: &WarpView, lanes: u32, early: bool) {
        let time = self.tick();
        let limits = self.limits.entry(view.home()).or_default();
        let floor = self.order.later(limits.floor, limits.own);
        limits.own = if early { self.order.place_behind(floor) } else { self.order.place_last() };
        let fence = (time, limits.own);
        for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
            self.fences.entry((view.agent(), lane)).or_default().push(fence);
        }
    }
}
