//! The shadow of global memory: the last accesses of every location, in pages that are allocated on demand.

use std::collections::HashMap;

use super::records::Records;
use super::shadow::{Access, Conflict, Record, Touch, Unordered, Write, write_ordered};
use super::{Agent, Epoch, Strength};

/// One granule of global memory.
#[derive(Debug)]
struct Cell {
    write: Write,
    records: Records,
}

impl Default for Cell {
    fn default() -> Cell {
        Cell { write: Write::NEVER, records: Records::default() }
    }
}

const PAGE: u64 = 256;

/// Shadow of global memory, in pages of granules that are allocated at the first access.
#[derive(Debug, Default)]
pub(crate) struct PagedShadow {
    shift: u32,
    pages: Vec<Vec<Cell>>,
    /// For the number of a page, its index in `pages`.
    places: HashMap<u64, usize>,
    /// The number and the index of the page of the last access: most lanes of a warp access one page.
    last: Option<(u64, usize)>,
    /// Number of records beyond the first of each granule.
    records: u64,
    /// Number of records searched, for the instruction budget.
    work: u64,
}

impl PagedShadow {
    pub fn new(granule: u32) -> PagedShadow {
        PagedShadow { shift: granule.trailing_zeros(), ..PagedShadow::default() }
    }

    /// The cost of searching records, in warp instructions.
    pub fn toll(&self) -> u64 {
        self.work / 16
    }

    /// Size in bytes of the records.
    pub fn bytes(&self) -> u64 {
        self.records * size_of::<(Agent, Record)>() as u64
    }

    /// The index of a page in `pages`.
    fn place(&mut self, number: u64) -> usize {
        if let Some((last, place)) = self.last
            && last == number
        {
            return place;
        }
        let next = self.pages.len();
        let place = *self.places.entry(number).or_insert(next);
        if place == next {
            self.pages.push((0..PAGE).map(|_| Cell::default()).collect());
        }
        self.last = Some((number, place));
        place
    }

    /// Calls `act` for each granule of an access.
    fn each(&mut self, address: u64, bytes: u64, mut act: impl FnMut(&mut Cell)) {
        let first = address >> self.shift;
        let last = (address + bytes - 1) >> self.shift;
        let place = self.place(first / PAGE);
        for cell in &mut self.pages[place][(first % PAGE) as usize..=(last % PAGE).max(first % PAGE) as usize]
        {
            let before = cell.records.spilled();
            self.work += cell.records.len() as u64;
            act(cell);
            self.records = self.records.saturating_add_signed(cell.records.spilled() - before);
        }
    }

    pub fn read(&mut self, address: u64, bytes: u64, a: &Access) -> Option<Conflict> {
        let mut found = None;
        self.each(address, bytes, |cell| {
            if !write_ordered(&cell.write, a) {
                found = found.or(Some(cell.write.conflict(a)));
            } else if cell.write.beside_matters(a) {
                found = found.or_else(|| cell.records.race_with_read(a));
            }
            if a.strength > Strength::Weak {
                cell.records.observe(&cell.write, a);
            }
            // The list is pruned when its length has doubled, so that pruning costs no more than the reads
            // themselves.
            if cell.records.len().is_power_of_two() {
                cell.records.prune(a);
            }
            cell.records.note(a.agent(), Record::of_read(a), a.view.known_to_all(a.actor));
        });
        found
    }

    pub fn write(&mut self, address: u64, bytes: u64, a: &Access) -> Option<Conflict> {
        self.write_unless(address, bytes, a, |_| false)
    }

    /// Records a write, ignoring the conflicts that `forgiven` accepts.
    pub fn write_unless(
        &mut self,
        address: u64,
        bytes: u64,
        a: &Access,
        forgiven: impl Fn(&Conflict) -> bool,
    ) -> Option<Conflict> {
        let mut found = None;
        self.each(address, bytes, |cell| {
            let conflict = cell.records.write(&mut cell.write, a, &forgiven);
            found = found.or(conflict);
        });
        found
    }

    /// Calls `found` for the reads that are not ordered before the write `a`.
    pub fn unordered_readers(
        &mut self,
        address: u64,
        bytes: u64,
        a: &Access,
        found: &mut impl FnMut(Unordered),
    ) {
        self.each(address, bytes, |cell| cell.records.unordered_readers(a, found));
    }

    /// Marks the asynchronous read of a thread as complete at `epoch`.
    pub fn land(&mut self, address: u64, bytes: u64, thread: (Agent, usize), epoch: Epoch, touch: Touch) {
        self.each(address, bytes, |cell| cell.records.land(thread, epoch, touch));
    }
}
