//! Observation order at one memory location (PTX ISA, "Observation Order" and "Causality Order"). A strong
//! read observes the write whose value it returns, and the writes before that one in a chain of atomics. What
//! follows the read in base causality order comes after each write that it observes, with or without fences:
//! the last CTA may reset a ticket that all CTAs drew. What the writing threads did before these writes is
//! not ordered by that.

use std::collections::HashSet;
use std::hash::Hash;

use super::shadow::{Access, Conflict, Record, Write, write_ordered};
use super::{Agent, Epoch, Strength};

/// The length at which a list is first searched for entries that later ones replace.
const ENOUGH: usize = 64;

/// A thread at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Moment {
    agent: Agent,
    epoch: Epoch,
    lane: u8,
}

/// A strong write.
#[derive(Clone, Copy, Debug)]
struct Entry {
    by: Moment,
    strength: Strength,
    width: u8,
    /// The position in the order of the writes, from 1 on.
    at: u32,
}

/// A read, and the positions of the first and the last write that it observes. Position 0 stands for all
/// writes before the log.
#[derive(Clone, Copy, Debug)]
struct Observer {
    by: Moment,
    from: u32,
    until: u32,
}

/// The observations of a location since its last weak write. Most locations with strong writes are never
/// observed, so the log of writes begins late: at the first observation, or at the first write that does not
/// continue the chain of the writes before it.
#[derive(Clone, Debug, Default)]
pub(super) struct Observed {
    log: Latest<Entry>,
    observers: Latest<Observer>,
    /// The position of the last write, and of the first write of its chain.
    last: u32,
    chain: u32,
}

impl Moment {
    fn of(a: &Access) -> Moment {
        Moment { agent: a.agent(), epoch: a.epoch, lane: a.lanes.trailing_zeros() as u8 }
    }

    fn is_of(self, write: &Write) -> bool {
        (self.agent, self.epoch, self.lane) == (write.agent, write.epoch, write.lane)
    }

    /// Whether this moment precedes an access in base causality order.
    fn precedes(self, a: &Access) -> bool {
        let Moment { agent, epoch, lane } = self;
        write_ordered(&Write { agent, epoch, lane, ..Write::NEVER }, a)
    }
}

impl Observed {
    /// The number of entries, for the limit of memory.
    pub fn len(&self) -> usize {
        self.log.entries.len() + self.observers.entries.len()
    }

    /// Whether the access is morally strong with the last write. `None` if that write precedes the log.
    pub fn links(&self, a: &Access) -> Option<bool> {
        let Entry { by, strength, width, .. } = self.log.entries.last()?;
        let reach = a.view.reach(by.agent);
        Some(a.view.is_warp(by.agent) && width == &a.width && a.strength.min(*strength) >= reach)
    }

    /// Notes a strong write. `continues` states that the write is an atomic that continues the chain.
    pub fn note_write(&mut self, a: &Access, continues: bool) {
        self.last = self.last.saturating_add(1);
        if !continues {
            self.chain = self.last;
        }
        let Access { strength, width, .. } = *a;
        self.log.push(Entry { by: Moment::of(a), strength, width, at: self.last }, |entry| entry.by);
    }

    /// Notes a strong read that observes the last write.
    pub fn note_read(&mut self, a: &Access) {
        let new = Observer { by: Moment::of(a), from: self.chain, until: self.last };
        self.observers.push(new, |observer| (observer.by, observer.from));
    }

    /// The conflict of a record of `agent` with the access, given the observations of the location.
    pub fn conflict(
        observed: Option<&Observed>,
        (agent, record): &(Agent, Record),
        a: &Access,
    ) -> Option<Conflict> {
        record.conflict(*agent, a, |write| observed.is_some_and(|o| o.precedes(write, a)))
    }

    /// Whether an observation of a write precedes the access in base causality order.
    fn precedes(&self, write: &Write, a: &Access) -> bool {
        self.observers
            .entries
            .iter()
            .rev()
            .any(|observer| self.covers(observer, write) && observer.by.precedes(a))
    }

    fn covers(&self, observer: &Observer, write: &Write) -> bool {
        let log = &self.log.entries;
        let (before, behind) = log.split_at(log.partition_point(|entry| entry.at <= observer.until));
        let is_of = |entry: &Entry| entry.by.is_of(write);
        // A thread may have written several times at one moment. All its writes must be observed.
        !behind.iter().any(is_of)
            && (observer.from == 0
                || before.iter().rev().find(|e| is_of(e)).is_some_and(|e| e.at >= observer.from))
    }
}

/// A list of which only the latest entry of each key matters.
#[derive(Clone, Debug)]
struct Latest<T> {
    entries: Vec<T>,
    /// The length at which the list is next searched for entries that later ones replace.
    full: usize,
}

impl<T> Default for Latest<T> {
    fn default() -> Latest<T> {
        Latest { entries: Vec::new(), full: ENOUGH }
    }
}

impl<T: Copy> Latest<T> {
    fn push<K: Hash + Eq>(&mut self, new: T, key: impl Fn(&T) -> K) {
        match self.entries.last_mut() {
            Some(last) if key(last) == key(&new) => *last = new,
            _ => self.entries.push(new),
        }
        if self.entries.len() >= self.full {
            let mut known = HashSet::new();
            let kept = self.entries.iter().rev().filter(|entry| known.insert(key(entry)));
            self.entries = kept.copied().collect();
            self.entries.reverse();
            self.full = ENOUGH.max(2 * self.entries.len());
        }
    }
}
