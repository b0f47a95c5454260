use std::collections::HashMap;

use smallvec::SmallVec;

use super::shadow::{Access, Conflict, Read, Strength, Touch, Write, read_unordered, write_ordered};
use super::{Agent, Epoch, FLIGHT};

/// One granule of global memory.
#[derive(Clone, Debug)]
struct Cell {
    write: Write,
    /// By agent.
    reads: SmallVec<[(Agent, Read); 1]>,
}

const PAGE: u64 = 256;

/// Shadow of global memory, by pages of granules as they are touched.
#[derive(Debug, Default)]
pub(crate) struct PagedShadow {
    shift: u32,
    pages: HashMap<u64, Vec<Cell>>,
    /// Reads kept beyond the first of each granule.
    records: u64,
    /// Reads looked through, for budgets.
    work: u64,
}

impl PagedShadow {
    pub fn new(granule: u32) -> PagedShadow {
        PagedShadow { shift: granule.trailing_zeros(), ..PagedShadow::default() }
    }

    /// What looking through reads has cost, in warp instructions.
    pub fn toll(&self) -> u64 {
        self.work / 16
    }

    /// Bytes of the reads that are kept.
    pub fn bytes(&self) -> u64 {
        self.records * size_of::<(Agent, Read)>() as u64
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
        let mut found = None;
        let (mut records, mut work) = (0, 0);
        for cell in self.cells(address, bytes) {
            if !write_ordered(&cell.write, a) {
                found = found.or(Some(cell.write.conflict(a)));
            } else if cell.write.touch == Touch::Atomic && a.strength == Strength::Weak {
                work += cell.reads.len();
                found = found.or(unordered(&cell.reads, a, true));
            }
            records += note_read(&mut cell.reads, a);
        }
        self.account(records, work);
        found
    }

    pub fn write(&mut self, address: u64, bytes: u64, a: &Access) -> Option<Conflict> {
        let mut found = None;
        let (mut records, mut work) = (0, 0);
        for cell in self.cells(address, bytes) {
            if !write_ordered(&cell.write, a) {
                found = found.or(Some(cell.write.conflict(a)));
            }
            work += cell.reads.len();
            found = found.or_else(|| unordered(&cell.reads, a, false));
            cell.write = Write::of(a);
            if a.touch == Touch::Atomic {
                records += note_read(&mut cell.reads, a);
            } else {
                records -= spilled(&cell.reads);
                cell.reads.clear();
            }
        }
        self.account(records, work);
        found
    }

    /// The asynchronous read of a thread is complete as of `epoch`.
    pub fn land(&mut self, address: u64, bytes: u64, thread: (Agent, usize), epoch: Epoch, touch: Touch) {
        let (agent, lanes) = (thread.0, 1 << thread.1);
        let (mut records, mut work) = (0, 0);
        for cell in self.cells(address, bytes) {
            let start = cell.reads.partition_point(|(owner, _)| *owner < agent);
            let own = cell.reads[start..].iter().take_while(|(owner, _)| *owner == agent).count();
            work += own;
            let before = spilled(&cell.reads);
            let Some(flight) = cell.reads[start..][..own]
                .iter_mut()
                .find(|(_, r)| r.epoch == FLIGHT && r.lanes & lanes != 0)
            else {
                continue;
            };
            flight.1.lanes &= !lanes;
            let landed = Read { epoch, lanes, touch, ..flight.1 };
            // An earlier copy by this thread is ordered before this one by the same waits.
            let older = |r: &Read| r.touch == touch && r.epoch != FLIGHT && r.lanes == lanes;
            for at in (start..start + own).rev() {
                if cell.reads[at].1.lanes == 0 || older(&cell.reads[at].1) {
                    cell.reads.remove(at);
                }
            }
            let at = cell.reads.partition_point(|(owner, _)| *owner <= agent);
            cell.reads.insert(at, (agent, landed));
            records += spilled(&cell.reads) - before;
        }
        self.account(records, work);
    }

    fn account(&mut self, records: i64, work: usize) {
        self.records = self.records.saturating_add_signed(records);
        self.work += work as u64;
    }
}

fn unordered(reads: &[(Agent, Read)], a: &Access, atomics_only: bool) -> Option<Conflict> {
    reads.iter().filter(|(_, r)| !atomics_only || r.touch == Touch::Atomic).find_map(|(agent, r)| {
        let lanes = read_unordered(r, *agent, a);
        (lanes != 0).then(|| r.conflict(*agent, lanes))
    })
}

/// Reads beyond the one that a granule has room for.
fn spilled(reads: &[(Agent, Read)]) -> i64 {
    reads.len().saturating_sub(1) as i64
}

/// Notes a read, and says how many more are kept than before.
fn note_read(reads: &mut SmallVec<[(Agent, Read); 1]>, a: &Access) -> i64 {
    let agent = a.agent();
    let start = reads.partition_point(|(owner, _)| *owner < agent);
    for (_, read) in reads[start..].iter_mut().take_while(|(owner, _)| *owner == agent) {
        if read.absorb(a) {
            return 0;
        }
    }
    let before = spilled(reads);
    // What everyone who reads now already knows of needs no record of its own. Looking for it whenever the list has
    // doubled costs no more than the reads themselves.
    if reads.len().is_power_of_two() {
        let lane = a.lanes.trailing_zeros() as usize;
        reads.retain(|(owner, r)| {
            r.touch == Touch::Atomic || !a.view.knows_agent(lane, *owner, r.lanes, r.epoch)
        });
    }
    let at = reads.partition_point(|(owner, _)| *owner <= agent);
    reads.insert(at, (agent, Read::of(a)));
    spilled(reads) - before
}
