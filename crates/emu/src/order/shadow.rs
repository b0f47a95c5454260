//! The records of accesses, and the rules by which accesses race. Records are kept per granule of memory. A
//! granule is as wide as the narrowest access of the kernel to that space. Since accesses are aligned to
//! their width, each covers whole granules.
//!
//! Each granule has its last weak write and further records. A weak access races with every access that is
//! not ordered with it. An access that is ordered after a weak write is therefore ordered after everything
//! before that write, and the older records are dropped. A strong write or a reduction does not order the
//! accesses with which it does not race. It is therefore added as a further record.

use super::{Agent, Epoch, FLIGHT, ProxySpace, Strength, WarpView};

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Plain,
    /// `atom`, which reads and writes.
    Atomic,
    /// `red`, which updates memory without observing its value, or an `atom` whose result is not read.
    Update,
    /// The read and the write of a cp.async.
    Copy,
    /// The read and the write of a cp.async that completes with a phase of an mbarrier. Its own thread must
    /// also have observed that phase.
    CopyArrive,
    /// The reads of a wgmma.
    Wgmma,
    /// The accesses of an instruction of tensor memory.
    Tensor,
    /// The read and the write of a bulk copy, and the write of `st.async`.
    Bulk,
    /// The read and the write of a bulk reduction. Such writes do not race with each other.
    Reduce,
    /// The initialisation and the use of an mbarrier object. Until the object is invalidated, no other access
    /// may touch its memory.
    Mbarrier,
    /// The invalidation of an mbarrier object, which frees its memory.
    MbarrierEnd,
}

/// One access by the participating lanes of one instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access<'a> {
    pub view: &'a WarpView,
    /// The index of the accessing actor in its cluster.
    pub actor: usize,
    /// The time of the access; [`FLIGHT`] while an asynchronous access is in flight.
    pub epoch: Epoch,
    /// The memory, if the asynchronous proxy makes the access. That proxy sees only the generic writes that a
    /// proxy fence ordered.
    pub proxy: Option<ProxySpace>,
    /// The threads that access: one thread, or for ldmatrix all threads that receive a part of the data.
    pub lanes: u32,
    pub pc: u32,
    pub strength: Strength,
    /// Bytes of an element. Elements are aligned, so two accesses to a granule that have equal widths overlap
    /// completely.
    pub width: u8,
    pub touch: Touch,
}

/// The last weak write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    pub(super) epoch: Epoch,
    pub(super) agent: Agent,
    pub(super) pc: u32,
    pub(super) lane: u8,
    pub(super) touch: Touch,
    /// The other writes; `None` when there are none.
    pub(super) beside: Option<Beside>,
}

/// The lowest strength and the width of all writes of a granule except the last weak one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    /// The lowest strength; weak if the widths differ.
    weakest: Strength,
    width: u8,
}

impl Beside {
    /// Whether the access is morally strong with all of these writes, whichever threads made them.
    pub(super) fn is_strong_with(self, a: &Access) -> bool {
        self.weakest.min(a.strength) == Strength::Gpu && self.width == a.width
    }
}

impl Access<'_> {
    pub(crate) fn agent(&self) -> Agent {
        self.view.home() + self.actor as Agent
    }

    /// Index into the clock of this access for the actor `local`: an access of the asynchronous proxy needs
    /// the epoch of the warp's fenced actor.
    #[inline(always)]
    pub(super) fn actor_of(&self, local: usize) -> usize {
        let actors = self.view.actors();
        match self.proxy {
            Some(space) if local < actors.threads() => local + actors.fenced(space),
            _ => local,
        }
    }

    /// Whether the access, as a write, keeps the records of the accesses with which it does not race.
    #[inline(always)]
    pub(super) fn stands_beside(&self) -> bool {
        self.strength > Strength::Weak || self.touch == Touch::Reduce
    }
}

impl Write {
    pub(super) const NEVER: Write =
        Write { epoch: 0, agent: 0, pc: 0, lane: 0, touch: Touch::Plain, beside: None };

    pub(super) fn of(a: &Access) -> Write {
        Write {
            epoch: a.epoch,
            agent: a.agent(),
            pc: a.pc,
            lane: a.lanes.trailing_zeros() as u8,
            touch: a.touch,
            beside: None,
        }
    }

    /// The conflict of this write with an access that is not ordered after it.
    pub(super) fn conflict(&self, a: &Access) -> Conflict {
        let generic = Access { proxy: None, ..*a };
        Conflict {
            agent: self.agent,
            lane: u32::from(self.lane),
            pc: self.pc,
            wrote: true,
            touch: self.touch,
            in_flight: self.epoch == FLIGHT,
            epoch: self.epoch,
            unfenced: a.proxy.is_some() && write_ordered(self, &generic),
        }
    }

    /// Index into `a`'s clock: `a` happens after this write if that entry is at least the write's epoch.
    #[inline(always)]
    fn actor(&self, a: &Access) -> usize {
        a.actor_of(self.agent.wrapping_sub(a.view.home()) as usize)
    }

    /// Whether the write happened before the access, or does not race with it.
    #[inline(always)]
    pub(super) fn ordered(&self, a: &Access) -> bool {
        self.epoch <= a.view.known_to_all(self.actor(a)) && self.touch != Touch::Mbarrier
            || write_ordered(self, a)
    }

    /// Whether this is the only write, and every lane of the accessing warp knows that it happened before.
    #[inline(always)]
    pub(super) fn is_simply_before(&self, a: &Access) -> bool {
        self.epoch != 0
            && self.epoch <= a.view.known_to_all(self.actor(a))
            && self.touch != Touch::Mbarrier
            && self.beside.is_none()
    }

    pub(super) fn is_never(&self) -> bool {
        self.epoch == 0 && self.beside.is_none()
    }

    /// Whether a read may race with the other writes.
    #[inline(always)]
    pub(super) fn beside_matters(&self, a: &Access) -> bool {
        self.beside.is_some_and(|Beside { weakest, width }| {
            a.proxy.is_some() || weakest.min(a.strength) < Strength::Gpu || width != a.width
        })
    }

    /// Records that another write is kept in addition to this one.
    pub(super) fn add_beside(&mut self, new: &Record) {
        let weakest = match self.beside {
            None => new.strength,
            Some(Beside { weakest, width }) if width == new.width => weakest.min(new.strength),
            Some(_) => Strength::Weak,
        };
        self.beside = Some(Beside { weakest, width: new.width });
    }
}

/// Accesses by lanes of one actor in one epoch: reads, or writes other than the last one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) epoch: Epoch,
    pub(super) lanes: u32,
    pub(super) pc: u32,
    pub(super) strength: Strength,
    pub(super) width: u8,
    pub(super) touch: Touch,
    pub(super) wrote: bool,
}

impl Record {
    pub(super) const NEVER: Record = Record {
        epoch: 0,
        lanes: 0,
        pc: 0,
        strength: Strength::Weak,
        width: 0,
        touch: Touch::Plain,
        wrote: false,
    };

    pub(super) fn of_read(a: &Access) -> Record {
        let Access { epoch, lanes, pc, strength, width, touch, .. } = *a;
        Record { epoch, lanes, pc, strength, width, touch, wrote: false }
    }

    pub(super) fn of_write(a: &Access) -> Record {
        let lanes = a.lanes & a.lanes.wrapping_neg();
        Record { lanes, wrote: true, ..Record::of_read(a) }
    }

    pub(super) fn of_weak_write(w: &Write) -> Record {
        let Write { epoch, lane, pc, touch, .. } = *w;
        Record { epoch, lanes: 1 << lane, pc, touch, wrote: true, ..Record::NEVER }
    }

    fn as_write(&self, agent: Agent, lane: usize) -> Write {
        let Record { epoch, pc, touch, .. } = *self;
        Write { epoch, agent, pc, lane: lane as u8, touch, beside: None }
    }

    /// Whether this and the access are morally strong: both scopes include the other thread, and the accesses
    /// overlap completely.
    pub(super) fn exempt(&self, agent: Agent, a: &Access) -> bool {
        self.strength.min(a.strength) >= a.view.reach(agent) && self.width == a.width
    }

    fn read_conflict(&self, agent: Agent, lanes: u32) -> Conflict {
        Conflict {
            agent,
            lane: lanes.trailing_zeros(),
            pc: self.pc,
            wrote: false,
            touch: self.touch,
            in_flight: self.epoch == FLIGHT,
            epoch: self.epoch,
            unfenced: false,
        }
    }

    /// Merges a later record of the same actor, whose epochs up to `known` happened before it. Returns
    /// `false` when both records must be kept.
    #[inline(always)]
    pub(super) fn absorb(&mut self, new: &Record, known: Epoch) -> bool {
        if self.is_with(new) {
            self.lanes |= new.lanes;
            self.pc = new.pc;
            return true;
        }
        let absorbed = self.epoch == 0 || self.lanes_beside(new, known) == 0;
        if absorbed {
            *self = *new;
        }
        absorbed
    }

    /// Whether two records differ only in their lanes.
    #[inline(always)]
    pub(super) fn is_with(&self, new: &Record) -> bool {
        (self.epoch, self.touch, self.strength, self.width, self.wrote)
            == (new.epoch, new.touch, new.strength, new.width, new.wrote)
    }

    /// The lanes of this record that a later record of the same actor does not imply. A later record implies
    /// this one if it comes after it and is exempt from no more conflicts.
    #[inline(always)]
    pub(super) fn lanes_beside(&self, new: &Record, known: Epoch) -> u32 {
        let mixed = new.strength > Strength::Weak && self.width != new.width;
        if self.strength < new.strength || mixed || self.wrote && !new.wrote {
            self.lanes
        } else if self.epoch <= known {
            0
        } else if self.touch == new.touch && self.epoch <= new.epoch {
            self.lanes & !new.lanes
        } else {
            self.lanes
        }
    }

    /// The conflict of this record with the present access. A recorded write conflicts with every access, a
    /// recorded read with a write. `observed` says whether an observation of a strong write orders that write
    /// before the access.
    pub(super) fn conflict(
        &self,
        agent: Agent,
        a: &Access,
        observed: impl Fn(&Write) -> bool,
    ) -> Option<Conflict> {
        if self.wrote {
            let fenced = a.proxy.and_then(|space| a.view.actors().fenced_agent(agent, space));
            if fenced.is_none() && self.epoch != FLIGHT && self.exempt(agent, a) {
                return None;
            }
            let mut writes = each_lane(self.lanes).map(|lane| self.as_write(agent, lane));
            let ordered = |w: &Write| write_ordered(w, a) || self.strength > Strength::Weak && observed(w);
            let conflict = writes.find(|w| !ordered(w))?.conflict(a);
            let unfenced = conflict.unfenced || self.epoch != FLIGHT && self.exempt(agent, a);
            return Some(Conflict { unfenced, ..conflict });
        }
        let lanes = read_unordered(self, agent, a, self.epoch);
        let generic = Access { proxy: None, ..*a };
        let unfenced = a.proxy.is_some() && read_unordered(self, agent, &generic, self.epoch) == 0;
        (lanes != 0).then(|| Conflict { unfenced, ..self.read_conflict(agent, lanes) })
    }
}

/// The earlier access that is not ordered with the present one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub agent: Agent,
    pub lane: u32,
    pub pc: u32,
    pub wrote: bool,
    pub touch: Touch,
    pub in_flight: bool,
    pub epoch: Epoch,
    /// The accesses are ordered, but not for the asynchronous proxy.
    pub unfenced: bool,
}

/// The result of checking an access.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    Fine,
    /// A read of memory that was never written.
    Uninitialised,
    Conflict(Conflict),
}

/// Whether the write happened before the access of every lane, or is a reduction as the access is.
#[inline(always)]
pub(super) fn write_ordered(w: &Write, a: &Access) -> bool {
    if w.epoch == 0 || w.touch == Touch::Reduce && a.touch == Touch::Reduce {
        return true;
    }
    if w.touch == Touch::Mbarrier && !matches!(a.touch, Touch::Mbarrier | Touch::MbarrierEnd) {
        return false;
    }
    // Most accesses are known from a synchronisation of all lanes.
    let told = |agent| {
        a.view.all_were_told(agent, 1 << w.lane, w.epoch)
            || each_lane(a.lanes).all(|lane| a.view.was_told(lane, agent, 1 << w.lane, w.epoch))
    };
    if w.touch == Touch::CopyArrive && a.proxy.is_none() {
        return told(w.agent);
    }
    if let Some(space) = a.proxy
        && let Some(fenced) = a.view.actors().fenced_agent(w.agent, space)
    {
        return told(fenced);
    }
    let local = w.agent.wrapping_sub(a.view.home()) as usize;
    if local < a.view.actors().threads() && a.lanes.is_power_of_two() {
        return a.view.knows(a.lanes.trailing_zeros() as usize, local, 1 << w.lane, w.epoch);
    }
    a.view.all_were_told(w.agent, 1 << w.lane, w.epoch)
        || each_lane(a.lanes).all(|lane| a.view.knows_agent(lane, w.agent, 1 << w.lane, w.epoch))
}

fn each_lane(mut lanes: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (lanes != 0).then(|| {
            let lane = lanes.trailing_zeros() as usize;
            lanes &= lanes - 1;
            lane
        })
    })
}

impl Record {
    /// The lanes of a recorded read that is not ordered before the present write.
    pub(super) fn unordered_readers(&self, agent: Agent, a: &Access) -> Option<Unordered> {
        let lanes = if self.wrote { 0 } else { read_unordered(self, agent, a, self.epoch) };
        // Reads of these lanes in earlier epochs have no record any more. They are unordered from one epoch
        // on.
        let first = |lanes: u32| {
            let (mut known, mut unknown) = (0, self.epoch);
            while unknown - known > 1 {
                let middle = known + (unknown - known) / 2;
                match read_unordered(self, agent, a, middle) & lanes {
                    0 => known = middle,
                    _ => unknown = middle,
                }
            }
            unknown
        };
        (lanes != 0).then(|| Unordered { agent, lanes, from: first(lanes) })
    }
}

/// Reads that did not happen before a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unordered {
    pub agent: Agent,
    pub lanes: u32,
    /// The first epoch of the agent in which a read of these lanes is not ordered.
    pub from: Epoch,
}

/// The lanes whose read in an epoch did not happen before the present write. A write of the asynchronous
/// proxy needs a proxy fence after a thread's read: on an H200, a TMA copy overtook an `ldmatrix` whose warp
/// had already arrived on the mbarrier for which the copy waited.
fn read_unordered(r: &Record, agent: Agent, a: &Access, epoch: Epoch) -> u32 {
    if r.epoch == 0 || r.exempt(agent, a) {
        return 0;
    }
    let lane = a.lanes.trailing_zeros() as usize;
    let fenced = a.proxy.and_then(|space| a.view.actors().fenced_agent(agent, space));
    let knows = |lanes: u32| match (fenced, r.touch) {
        (Some(fenced), _) => a.view.was_told(lane, fenced, lanes, epoch),
        (None, Touch::CopyArrive) => a.view.was_told(lane, agent, lanes, epoch),
        (None, _) => a.view.knows_agent(lane, agent, lanes, epoch),
    };
    if knows(r.lanes) {
        return 0;
    }
    each_lane(r.lanes).filter(|l| !knows(1 << l)).fold(0, |set, l| set | 1 << l)
}
