//! The last accesses of every granule of memory. A granule is the narrowest access of the kernel to that space: since
//! accesses are aligned to their width, each then covers whole granules.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::{Agent, Epoch, FLIGHT, WarpView};

/// How far an access is strong: two strong accesses whose scopes include each other do not race (PTX ISA, "Morally
/// Strong Operations").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strength {
    Weak,
    Cta,
    Cluster,
    Gpu,
}

/// What kind of access made a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Plain,
    Atomic,
    /// The write of a cp.async.
    Copy,
    /// The same, complete with the phase of an mbarrier: its own thread must have seen that, too.
    CopyArrive,
}

/// One access, by the lanes of one instruction that take part in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access<'a> {
    pub view: &'a WarpView,
    /// Index of the warp in its CTA.
    pub warp: usize,
    /// The threads that access: one, or all that get a part of what ldmatrix reads.
    pub lanes: u32,
    pub pc: u32,
    pub strength: Strength,
    pub touch: Touch,
}

/// A write.
#[derive(Clone, Copy, Debug)]
struct Write {
    epoch: Epoch,
    agent: Agent,
    pc: u32,
    lane: u8,
    strength: Strength,
    touch: Touch,
}

impl Write {
    const NEVER: Write =
        Write { epoch: 0, agent: 0, pc: 0, lane: 0, strength: Strength::Weak, touch: Touch::Plain };

    fn of(a: &Access) -> Write {
        Write {
            epoch: if a.touch == Touch::Copy { FLIGHT } else { a.view.now() },
            agent: a.view.agent(),
            pc: a.pc,
            lane: a.lanes.trailing_zeros() as u8,
            strength: a.strength,
            touch: a.touch,
        }
    }

    fn conflict(&self) -> Conflict {
        Conflict {
            agent: self.agent,
            lane: u32::from(self.lane),
            pc: self.pc,
            wrote: true,
            touch: self.touch,
            in_flight: self.epoch == FLIGHT,
            epoch: self.epoch,
        }
    }
}

/// Reads by lanes of one warp in one epoch.
#[derive(Clone, Copy, Debug)]
struct Read {
    epoch: Epoch,
    lanes: u32,
    pc: u32,
    strength: Strength,
    touch: Touch,
}

impl Read {
    const NEVER: Read = Read { epoch: 0, lanes: 0, pc: 0, strength: Strength::Weak, touch: Touch::Plain };

    fn of(a: &Access) -> Read {
        Read { epoch: a.view.now(), lanes: a.lanes, pc: a.pc, strength: a.strength, touch: a.touch }
    }

    fn conflict(&self, agent: Agent, lanes: u32) -> Conflict {
        Conflict {
            agent,
            lane: lanes.trailing_zeros(),
            pc: self.pc,
            wrote: false,
            touch: self.touch,
            in_flight: false,
            epoch: self.epoch,
        }
    }

    /// Adds a read of the same warp. `false` when this one stays relevant beside the new one.
    fn absorb(&mut self, a: &Access) -> bool {
        let new = Read::of(a);
        if self.epoch == new.epoch && self.touch == new.touch {
            self.lanes |= new.lanes;
            self.pc = new.pc;
            self.strength = self.strength.min(new.strength);
            return true;
        }
        if self.epoch == 0
            || a.view.subsumes_own(self.epoch)
            || self.lanes == new.lanes && self.touch == new.touch
        {
            *self = new;
            return true;
        }
        false
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
}

/// What became of an access.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    Fine,
    /// A read of what was never written.
    Uninitialised,
    Conflict(Conflict),
}

fn exempt(a: Strength, b: Strength, same_cta: bool) -> bool {
    let weaker = a.min(b);
    weaker == Strength::Gpu || same_cta && weaker != Strength::Weak
}

/// Whether the write happened before what each lane of the access does, or does not race with it.
#[inline(always)]
fn write_ordered(w: &Write, a: &Access, local: usize, local_warps: usize) -> bool {
    if w.epoch == 0 {
        return true;
    }
    if w.touch == Touch::CopyArrive {
        return each_lane(a.lanes).all(|lane| a.view.was_told(lane, w.agent, 1 << w.lane, w.epoch));
    }
    if local < local_warps && a.lanes.is_power_of_two() {
        if a.view.knows(a.lanes.trailing_zeros() as usize, local, 1 << w.lane, w.epoch) {
            return true;
        }
    } else if each_lane(a.lanes).all(|lane| a.view.knows_agent(lane, w.agent, 1 << w.lane, w.epoch)) {
        return true;
    }
    w.epoch != FLIGHT && exempt(w.strength, a.strength, local < local_warps)
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

/// The lanes of a read that a present write is not ordered after.
fn read_unordered(r: &Read, agent: Agent, a: &Access, same_cta: bool) -> u32 {
    if r.epoch == 0 || exempt(r.strength, a.strength, same_cta) {
        return 0;
    }
    let lane = a.lanes.trailing_zeros() as usize;
    if a.view.knows_agent(lane, agent, r.lanes, r.epoch) {
        return 0;
    }
    each_lane(r.lanes)
        .filter(|l| !a.view.knows_agent(lane, agent, 1 << l, r.epoch))
        .fold(0, |set, l| set | 1 << l)
}

/// Shadow of a CTA's shared memory: a write, and a read per warp, for each granule.
#[derive(Debug)]
pub(crate) struct DenseShadow {
    warps: usize,
    shift: u32,
    writes: Vec<Write>,
    reads: Vec<Read>,
    /// Reads that neither fit a warp's slot nor are implied by what is there: lanes of a warp that synchronised apart.
    extra: HashMap<usize, Vec<(usize, Read)>>,
}

impl DenseShadow {
    pub fn new(bytes: usize, granule: u32, warps: usize) -> DenseShadow {
        let granules = bytes.div_ceil(granule as usize);
        DenseShadow {
            warps,
            shift: granule.trailing_zeros(),
            writes: vec![Write::NEVER; granules],
            reads: vec![Read::NEVER; granules * warps],
            extra: HashMap::new(),
        }
    }

    #[inline(always)]
    fn granules(&self, offset: usize, bytes: usize) -> std::ops::Range<usize> {
        offset >> self.shift..((offset + bytes - 1) >> self.shift) + 1
    }

    #[inline(always)]
    pub fn read(&mut self, offset: usize, bytes: usize, a: &Access) -> Verdict {
        let mut verdict = Verdict::Fine;
        for g in self.granules(offset, bytes) {
            let w = &self.writes[g];
            let local = (w.agent - a.view.home()) as usize;
            if w.epoch == 0 {
                verdict = Verdict::Uninitialised;
            } else if w.epoch > a.view.known_to_all(local) && !write_ordered(w, a, local, self.warps) {
                verdict = Verdict::Conflict(w.conflict());
            } else if w.touch == Touch::Atomic
                && a.strength == Strength::Weak
                && let Some(c) = self.unordered_reads(g, a, true)
            {
                verdict = Verdict::Conflict(c);
            }
            let slot = &mut self.reads[g * self.warps + a.warp];
            let old = *slot;
            if !slot.absorb(a) {
                *slot = Read::of(a);
                self.extra.entry(g).or_default().push((a.warp, old));
            }
        }
        verdict
    }

    /// `None` where everything is ordered; else the first conflict and the offset of its granule.
    #[inline(always)]
    pub fn write(&mut self, offset: usize, bytes: usize, a: &Access) -> Option<(Conflict, usize)> {
        let mut found = None;
        for g in self.granules(offset, bytes) {
            let w = &self.writes[g];
            let local = (w.agent.wrapping_sub(a.view.home())) as usize;
            if w.epoch != 0 && w.epoch > a.view.known_to_all(local) && !write_ordered(w, a, local, self.warps)
            {
                found = found.or(Some((w.conflict(), g << self.shift)));
            }
            if let Some(c) = self.unordered_reads(g, a, false) {
                found = found.or(Some((c, g << self.shift)));
            }
            self.writes[g] = Write::of(a);
            if a.touch == Touch::Atomic {
                let slot = &mut self.reads[g * self.warps + a.warp];
                let old = *slot;
                if !slot.absorb(a) {
                    *slot = Read::of(a);
                    self.extra.entry(g).or_default().push((a.warp, old));
                }
            }
        }
        found
    }

    #[inline(always)]
    fn unordered_reads(&self, g: usize, a: &Access, atomics_only: bool) -> Option<Conflict> {
        let home = a.view.home();
        for (warp, r) in self.reads[g * self.warps..][..self.warps].iter().enumerate() {
            if r.epoch <= a.view.known_to_all(warp) || atomics_only && r.touch != Touch::Atomic {
                continue;
            }
            let lanes = read_unordered(r, home + warp as Agent, a, true);
            if lanes != 0 {
                return Some(r.conflict(home + warp as Agent, lanes));
            }
        }
        if self.extra.is_empty() {
            return None;
        }
        self.extra.get(&g)?.iter().find_map(|(warp, r)| {
            let agent = home + *warp as Agent;
            let lanes =
                if atomics_only && r.touch != Touch::Atomic { 0 } else { read_unordered(r, agent, a, true) };
            (lanes != 0).then(|| r.conflict(agent, lanes))
        })
    }

    /// The asynchronous write of a thread is complete as of `epoch`.
    pub fn land(
        &mut self,
        offset: usize,
        bytes: usize,
        agent: Agent,
        lane: usize,
        epoch: Epoch,
        touch: Touch,
    ) {
        for g in self.granules(offset, bytes) {
            let w = &mut self.writes[g];
            if w.epoch == FLIGHT && w.agent == agent && usize::from(w.lane) == lane {
                (w.epoch, w.touch) = (epoch, touch);
            }
        }
    }

    /// Whether all of a range was written by somebody.
    pub fn is_written(&self, offset: usize, bytes: usize) -> bool {
        self.granules(offset, bytes).all(|g| self.writes[g].epoch != 0)
    }
}

/// One granule of global memory.
#[derive(Clone, Debug)]
struct Cell {
    write: Write,
    reads: SmallVec<[(Agent, Read); 1]>,
}

const PAGE: u64 = 256;

/// Shadow of global memory, by pages of granules as they are touched.
#[derive(Debug, Default)]
pub(crate) struct PagedShadow {
    warps: usize,
    shift: u32,
    pages: HashMap<u64, Vec<Cell>>,
}

impl PagedShadow {
    pub fn new(granule: u32, warps: usize) -> PagedShadow {
        PagedShadow { warps, shift: granule.trailing_zeros(), pages: HashMap::new() }
    }

    fn cells(&mut self, address: u64, bytes: u64) -> impl Iterator<Item = &mut Cell> {
        let first = address >> self.shift;
        let last = (address + bytes - 1) >> self.shift;
        let page = self
            .pages
            .entry(first / PAGE)
            .or_insert_with(|| vec![Cell { write: Write::NEVER, reads: SmallVec::new() }; PAGE as usize]);
        page[(first % PAGE) as usize..=(last % PAGE).max(first % PAGE) as usize].iter_mut()
    }

    pub fn read(&mut self, address: u64, bytes: u64, a: &Access) -> Option<Conflict> {
        let (mut found, warps) = (None, self.warps);
        for cell in self.cells(address, bytes) {
            let local = cell.write.agent.wrapping_sub(a.view.home()) as usize;
            if !write_ordered(&cell.write, a, local, warps) {
                found = found.or(Some(cell.write.conflict()));
            } else if cell.write.touch == Touch::Atomic && a.strength == Strength::Weak {
                found = found.or(unordered(&cell.reads, a, warps, true));
            }
            note_read(&mut cell.reads, a);
        }
        found
    }

    pub fn write(&mut self, address: u64, bytes: u64, a: &Access) -> Option<Conflict> {
        let (mut found, warps) = (None, self.warps);
        for cell in self.cells(address, bytes) {
            let local = cell.write.agent.wrapping_sub(a.view.home()) as usize;
            if !write_ordered(&cell.write, a, local, warps) {
                found = found.or(Some(cell.write.conflict()));
            }
            found = found.or_else(|| unordered(&cell.reads, a, warps, false));
            cell.write = Write::of(a);
            if a.touch == Touch::Atomic {
                note_read(&mut cell.reads, a);
            } else {
                cell.reads.clear();
            }
        }
        found
    }
}

fn unordered(reads: &[(Agent, Read)], a: &Access, warps: usize, atomics_only: bool) -> Option<Conflict> {
    reads.iter().filter(|(_, r)| !atomics_only || r.touch == Touch::Atomic).find_map(|(agent, r)| {
        let same_cta = (agent.wrapping_sub(a.view.home()) as usize) < warps;
        let lanes = read_unordered(r, *agent, a, same_cta);
        (lanes != 0).then(|| r.conflict(*agent, lanes))
    })
}

fn note_read(reads: &mut SmallVec<[(Agent, Read); 1]>, a: &Access) {
    let agent = a.view.agent();
    for (_, read) in reads.iter_mut().filter(|(owner, _)| *owner == agent) {
        if read.absorb(a) {
            return;
        }
    }
    // What everyone who reads now already knows of needs no record of its own.
    let lane = a.lanes.trailing_zeros() as usize;
    reads
        .retain(|(owner, r)| r.touch == Touch::Atomic || !a.view.knows_agent(lane, *owner, r.lanes, r.epoch));
    reads.push((agent, Read::of(a)));
}
