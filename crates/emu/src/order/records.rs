//! Lists of recorded accesses to one memory location.

use smallvec::SmallVec;

use super::shadow::{Access, Conflict, Record, Strength, Touch, Write};
use super::{Agent, Epoch, FLIGHT};

/// The records other than the last write of one memory location, sorted by agent. A new record removes from
/// older records of its agent the lanes that it implies, which keeps the list short.
#[derive(Clone, Debug, Default)]
pub(super) struct Records(SmallVec<[(Agent, Record); 1]>);

impl Records {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The number of records beyond the inline one.
    pub fn spilled(&self) -> i64 {
        self.len().saturating_sub(1) as i64
    }

    fn of(&self, agent: Agent) -> std::ops::Range<usize> {
        let start = self.0.partition_point(|(owner, _)| *owner < agent);
        let own = self.0[start..].iter().take_while(|(owner, _)| *owner == agent).count();
        start..start + own
    }

    /// Adds a record that is later than all present ones. The accesses of its agent up to epoch `known`
    /// happened before it.
    pub fn note(&mut self, agent: Agent, new: Record, known: Epoch) {
        let own = self.of(agent);
        let mut place = None;
        let mut idle = 0;
        for at in own.clone() {
            let old = &mut self.0[at].1;
            if old.is_with(&new) {
                old.absorb(&new, known);
                place = Some(at);
            } else {
                old.lanes = old.lanes_beside(&new, known);
                idle += usize::from(old.lanes == 0);
            }
        }
        if place.is_none() && idle > 0 {
            place = own.clone().find(|at| self.0[*at].1.lanes == 0);
            idle -= 1;
            place.into_iter().for_each(|at| self.0[at].1 = new);
        }
        if idle > 0 {
            self.0.retain(|(_, record)| record.lanes != 0);
        }
        if place.is_none() {
            self.0.insert(own.end, (agent, new));
        }
    }

    /// Marks an access of a thread in flight as complete at `epoch`.
    pub fn land(&mut self, (agent, lane): (Agent, usize), epoch: Epoch, touch: Touch) {
        let own = self.of(agent);
        let lanes = 1 << lane;
        let flight = self.0[own].iter_mut().find(|(_, r)| r.epoch == FLIGHT && r.lanes & lanes != 0);
        if let Some((_, flight)) = flight {
            flight.lanes &= !lanes;
            let landed = Record { epoch, lanes, touch, ..*flight };
            self.0.retain(|(_, record)| record.lanes != 0);
            self.note(agent, landed, 0);
        }
    }

    /// The first record that a read races with.
    pub fn race_with_read(&self, a: &Access) -> Option<Conflict> {
        self.0.iter().filter(|(_, r)| r.wrote).find_map(|(agent, r)| r.conflict(*agent, a))
    }

    /// Calls `found` for the reads that are not ordered before the write `a`.
    pub fn unordered_readers(&self, a: &Access, found: &mut impl FnMut(Agent, u32)) {
        for (agent, record) in &self.0 {
            let lanes = record.unordered_readers(*agent, a);
            if lanes != 0 {
                found(*agent, lanes);
            }
        }
    }

    /// Drops the records that the read `a` implies, because its lane already knows them.
    pub fn prune(&mut self, a: &Access) {
        let lane = a.lanes.trailing_zeros() as usize;
        self.0.retain(|(owner, r)| {
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
            found = found.or_else(|| self.0.iter().find_map(|(agent, r)| r.conflict(*agent, a)));
            let new = Record::of_write(a);
            last.add_beside(&new);
            self.note(a.agent(), new, a.view.known_to_all(a.actor));
            return found;
        }
        *last = Write::of(a);
        self.0.retain(|(agent, record)| {
            let Some(conflict) = record.conflict(*agent, a) else { return false };
            let stays = forgiven(&conflict);
            if stays {
                last.add_beside(record);
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
