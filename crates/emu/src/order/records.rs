//! Lists of recorded accesses to one memory location.

use smallvec::SmallVec;

use super::observed::Observed;
use super::shadow::{Access, Conflict, Record, Touch, Unordered, Write};
use super::{Agent, Epoch, FLIGHT, Strength};

/// The records other than the last write of one memory location, sorted by agent. A new record removes from
/// older records of its agent the lanes that it implies, which keeps the list short.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    list: SmallVec<[(Agent, Record); 1]>,
    /// The observations of the strong writes in the list, if there are any.
    observed: Option<Box<Observed>>,
}

impl Records {
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The number of records beyond the inline one, and of the entries for observations.
    pub fn spilled(&self) -> i64 {
        let observed = self.observed.as_ref().map_or(0, |observed| observed.len());
        (self.len().saturating_sub(1) + observed) as i64
    }

    /// Notes a strong read. If it is morally strong with the last write, the read observes that write. A weak
    /// write ends the chain of strong writes before it.
    pub fn observe(&mut self, last: &Write, a: &Access) {
        if self.links(last, a) {
            self.observed.get_or_insert_default().note_read(a);
        }
    }

    /// Whether the access is morally strong with the last strong write.
    fn links(&self, last: &Write, a: &Access) -> bool {
        let Some(beside) = last.beside.filter(|_| a.proxy.is_none()) else { return false };
        if let Some(links) = self.observed.as_ref().and_then(|observed| observed.links(a)) {
            return links;
        }
        // Without asynchronous copies all writes are those of warps.
        if !a.view.actors().asynchronous && beside.is_strong_with(a) {
            return true;
        }
        let links = |(agent, r): &(Agent, Record)| a.view.is_warp(*agent) && r.exempt(*agent, a);
        self.list.iter().filter(|(_, r)| r.wrote).all(links)
    }

    /// Notes a write that stands beside the last weak write. An atomic continues the chain of writes before
    /// it.
    fn note_strong(&mut self, last: &Write, a: &Access) {
        let continues = matches!(a.touch, Touch::Atomic | Touch::Update) && self.links(last, a);
        // The writes before the log are one chain, or all are bulk reductions, which nothing observes.
        let ends_chain = || {
            let all_bulk =
                self.list.iter().filter(|(_, r)| r.wrote).all(|(agent, _)| !a.view.is_warp(*agent));
            last.beside.is_some() && !(a.proxy.is_some() && all_bulk)
        };
        if self.observed.is_some() || !continues && ends_chain() {
            self.observed.get_or_insert_default().note_write(a, continues);
        }
    }

    fn of(&self, agent: Agent) -> std::ops::Range<usize> {
        let start = self.list.partition_point(|(owner, _)| *owner < agent);
        let own = self.list[start..].iter().take_while(|(owner, _)| *owner == agent).count();
        start..start + own
    }

    /// Adds a record that is later than all present ones. The accesses of its agent up to epoch `known`
    /// happened before it.
    pub fn note(&mut self, agent: Agent, new: Record, known: Epoch) {
        let own = self.of(agent);
        let mut place = None;
        let mut idle = 0;
        for at in own.clone() {
            let old = &mut self.list[at].1;
            if old.is_with(&new) {
                old.absorb(&new, known);
                place = Some(at);
            } else {
                old.lanes = old.lanes_beside(&new, known);
                idle += usize::from(old.lanes == 0);
            }
        }
        if place.is_none() && idle > 0 {
            place = own.clone().find(|at| self.list[*at].1.lanes == 0);
            idle -= 1;
            place.into_iter().for_each(|at| self.list[at].1 = new);
        }
        if idle > 0 {
            self.list.retain(|(_, record)| record.lanes != 0);
        }
        if place.is_none() {
            self.list.insert(own.end, (agent, new));
        }
    }

    /// Marks an access of a thread in flight as complete at `epoch`.
    pub fn land(&mut self, (agent, lane): (Agent, usize), epoch: Epoch, touch: Touch) {
        let own = self.of(agent);
        let lanes = 1 << lane;
        let flight = self.list[own].iter_mut().find(|(_, r)| r.epoch == FLIGHT && r.lanes & lanes != 0);
        if let Some((_, flight)) = flight {
            flight.lanes &= !lanes;
            let landed = Record { epoch, lanes, touch, ..*flight };
            self.list.retain(|(_, record)| record.lanes != 0);
            self.note(agent, landed, 0);
        }
    }

    /// The first record that a read races with.
    pub fn race_with_read(&self, a: &Access) -> Option<Conflict> {
        let observed = self.observed.as_deref();
        self.list.iter().filter(|(_, r)| r.wrote).find_map(|entry| Observed::conflict(observed, entry, a))
    }

    /// Calls `found` for the reads that are not ordered before the write `a`.
    pub fn unordered_readers(&self, a: &Access, found: &mut impl FnMut(Unordered)) {
        self.list.iter().filter_map(|(agent, record)| record.unordered_readers(*agent, a)).for_each(found);
    }

    /// Drops the records that the read `a` implies, because its lane already knows them.
    pub fn prune(&mut self, a: &Access) {
        let lane = a.lanes.trailing_zeros() as usize;
        self.list.retain(|(owner, r)| {
            let implied = a.strength == Strength::Weak
                || r.strength >= a.strength && r.width == a.width && a.view.reach(*owner) <= Strength::Cta;
            let told = r.touch != Touch::CopyArrive && a.view.knows_agent(lane, *owner, r.lanes, r.epoch);
            r.wrote || !implied || !told
        });
    }

    /// Applies a write after `last` and the other records. Returns the first conflict that is not forgiven.
    /// Forgiven accesses are kept as records.
    pub fn write(
        &mut self,
        last: &mut Write,
        a: &Access,
        forgiven: &impl Fn(&Conflict) -> bool,
    ) -> Option<Conflict> {
        let mut found = None;
        let mut beside = None;
        if !last.ordered(a) {
            let conflict = last.conflict(a);
            if forgiven(&conflict) { beside = Some(*last) } else { found = Some(conflict) }
        }
        if a.stands_beside() {
            let observed = self.observed.as_deref();
            found =
                found.or_else(|| self.list.iter().find_map(|entry| Observed::conflict(observed, entry, a)));
            if a.touch == Touch::Atomic {
                self.observe(last, a);
            }
            self.note_strong(last, a);
            let new = Record::of_write(a);
            last.add_beside(&new);
            self.note(a.agent(), new, a.view.known_to_all(a.actor));
            return found;
        }
        *last = Write::of(a);
        let observed = self.observed.take();
        self.list.retain(|entry| {
            let Some(conflict) = Observed::conflict(observed.as_deref(), entry, a) else { return false };
            let stays = forgiven(&conflict);
            if stays {
                last.add_beside(&entry.1);
            } else if found.is_none() {
                found = Some(conflict);
            }
            stays
        });
        if let Some(write) = beside {
            let kept = Record::of_weak_write(&write);
            last.add_beside(&kept);
            self.note(write.agent, kept, 0);
        }
        found
    }
}
