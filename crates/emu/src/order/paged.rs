use std::collections::HashMap;

use smallvec::SmallVec;

use super::shadow::{Access, Conflict, Read, Strength, Touch, Write, read_unordered, write_ordered};
use super::{Agent, Epoch, FLIGHT};

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

    /// The asynchronous read of a thread is complete as of `epoch`.
    pub fn land(&mut self, address: u64, bytes: u64, thread: (Agent, usize), epoch: Epoch, touch: Touch) {
        let (agent, lanes) = (thread.0, 1 << thread.1);
        for cell in self.cells(address, bytes) {
            let Some(flight) = cell
                .reads
                .iter_mut()
                .find(|(owner, r)| *owner == agent && r.epoch == FLIGHT && r.lanes & lanes != 0)
            else {
                continue;
            };
            flight.1.lanes &= !lanes;
            let landed = Read { epoch, lanes, touch, ..flight.1 };
            // An earlier copy by this thread is ordered before this one by the same waits.
            let older = |r: &Read| r.touch == touch && r.epoch != FLIGHT && r.lanes == lanes;
            cell.reads.retain(|(owner, r)| r.lanes != 0 && !(*owner == agent && older(r)));
            cell.reads.push((agent, landed));
        }
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
