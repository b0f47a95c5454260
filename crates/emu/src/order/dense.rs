//! The shadow of shared memory: the last accesses of every location, in dense arrays.

use super::records::Records;
use super::shadow::{Access, Conflict, Record, Touch, Unordered, Verdict, Write};
use super::{Actors, Agent, Epoch, FLIGHT, Strength};

/// Bytes of a block: the width of a cp.async or ldmatrix access, the accesses that matter for speed.
const BLOCK: usize = 16;

/// The cells of one size.
#[derive(Debug)]
struct Level {
    writes: Vec<Write>,
    /// For each actor that has a slot, its last reads of each cell, up to the last cell when it read: most
    /// actors read nothing, and others read neighbouring cells one after the other.
    reads: Vec<Vec<Record>>,
    /// For each cell, one plus the index of its entry in `records`; 0 if it has none.
    beside: Vec<u32>,
    /// Accesses that have no slot and are not implied by other records: writes other than the last one, reads
    /// of lanes that synchronised separately from their warp, and reads of actors without a slot.
    records: Vec<Records>,
    /// Number of records searched, for the instruction budget.
    work: u64,
}

/// Shadow of a cluster's shared memory: the last write and the last reads of each warp. It is kept for every
/// block of 16 bytes, and for every granule of a block after a narrower access to the block.
#[derive(Debug)]
pub(crate) struct DenseShadow {
    /// log2 of the granule's bytes.
    shift: u32,
    blocks: Level,
    /// The granules of split blocks, in the order of the splits.
    granules: Level,
    /// For each block, one plus the position of its granules; 0 if the block is not split.
    split: Vec<u32>,
}

impl DenseShadow {
    pub fn new(bytes: usize, granule: u32, actors: Actors) -> DenseShadow {
        let blocks = bytes.div_ceil(BLOCK);
        DenseShadow {
            shift: granule.trailing_zeros(),
            blocks: Level::new(blocks, actors.slots()),
            granules: Level::new(0, actors.slots()),
            split: vec![0; blocks],
        }
    }

    /// The maximum size in bytes, reached when all blocks are split.
    pub fn most_bytes(bytes: usize, granule: u32, actors: Actors) -> u64 {
        let cell = size_of::<Write>() + size_of::<u32>() + actors.slots() * size_of::<Record>();
        let blocks = bytes.div_ceil(BLOCK);
        let granules = if granule as usize == BLOCK { 0 } else { BLOCK / granule as usize };
        (blocks * (1 + granules)) as u64 * cell as u64
    }

    /// The cost of searching records, in warp instructions.
    pub fn toll(&self) -> u64 {
        (self.blocks.work + self.granules.work) / 16
    }

    #[inline(always)]
    pub fn read(&mut self, offset: usize, bytes: usize, a: &Access) -> Verdict {
        let mut verdict = Verdict::Fine;
        self.each(offset, bytes, |level, cell, _| {
            match level.judge_read(cell, a) {
                Verdict::Fine => {}
                found => verdict = found,
            }
            level.observe(cell, a);
            level.note_read(cell, a);
        });
        verdict
    }

    /// Reads blocks, all by the same access, where nothing more than the last read is to be changed. Returns
    /// the rows that are left to [`DenseShadow::read`].
    #[inline(always)]
    pub fn read_blocks(&mut self, offsets: &[u32; 32], rows: u32, a: &Access) -> u32 {
        if a.actor >= self.blocks.reads.len() {
            return rows;
        }
        let (new, known) = (Record::of_read(a), a.view.known_to_all(a.actor));
        let (reads, writes) = self.blocks.reads_of(a.actor);
        let mut left = 0;
        for (row, &offset) in offsets.iter().enumerate().filter(|(row, _)| rows >> row & 1 == 1) {
            let block = offset as usize / BLOCK;
            let plain = self.split[block] == 0 && writes[block].is_simply_before(a);
            if !plain || !reads[block].absorb(&new, known) {
                left |= 1 << row;
            }
        }
        left
    }

    /// Records a read. Its order after the last write is checked elsewhere.
    pub fn note_read(&mut self, offset: usize, bytes: usize, a: &Access) {
        self.each(offset, bytes, |level, cell, _| level.note_read(cell, a));
    }

    /// Records a write. Returns the first conflict and the offset of its cell, or `None` when every earlier
    /// access is ordered.
    #[inline(always)]
    pub fn write(&mut self, offset: usize, bytes: usize, a: &Access) -> Option<(Conflict, usize)> {
        self.write_unless(offset, bytes, a, |_| false)
    }

    /// Like [`DenseShadow::write`], but ignores the conflicts that `forgiven` accepts.
    #[inline(always)]
    pub fn write_unless(
        &mut self,
        offset: usize,
        bytes: usize,
        a: &Access,
        forgiven: impl Fn(&Conflict) -> bool,
    ) -> Option<(Conflict, usize)> {
        let mut found = None;
        self.each(offset, bytes, |level, cell, at| {
            if let Some(conflict) = level.write(cell, a, &forgiven) {
                found = found.or(Some((conflict, at)));
            }
        });
        found
    }

    /// Calls `found` for the reads that are not ordered before the write `a`.
    pub fn unordered_readers(
        &mut self,
        offset: usize,
        bytes: usize,
        a: &Access,
        found: &mut impl FnMut(Unordered),
    ) {
        self.each(offset, bytes, |level, cell, _| {
            for (actor, read) in level.last_reads(cell) {
                let agent = a.view.home() + actor as Agent;
                read.unordered_readers(agent, a).into_iter().for_each(&mut *found);
            }
            if level.beside[cell] != 0 {
                level.records_of(cell).unordered_readers(a, found);
            }
        });
    }

    /// Marks the asynchronous write of a thread as complete at `epoch`.
    pub fn land(&mut self, offset: usize, bytes: usize, thread: (Agent, usize), epoch: Epoch, touch: Touch) {
        self.each(offset, bytes, |level, cell, _| {
            let write = &mut level.writes[cell];
            if write.epoch == FLIGHT && (write.agent, usize::from(write.lane)) == thread {
                (write.epoch, write.touch) = (epoch, touch);
            }
            if write.beside.is_some() {
                level.records_of(cell).land(thread, epoch, touch);
            }
        });
    }

    /// Whether every byte of a range was written by any thread.
    pub fn is_written(&mut self, offset: usize, bytes: usize) -> bool {
        let mut written = true;
        self.each(offset, bytes, |level, cell, _| written &= !level.writes[cell].is_never());
        written
    }

    /// Calls `act` for each cell of an aligned access, with the cell's level, its index there and its offset.
    #[inline(always)]
    fn each(&mut self, offset: usize, bytes: usize, mut act: impl FnMut(&mut Level, usize, usize)) {
        let per_block = BLOCK >> self.shift;
        for block in offset / BLOCK..(offset + bytes).div_ceil(BLOCK) {
            if per_block == 1 || bytes >= BLOCK && self.split[block] == 0 {
                act(&mut self.blocks, block, block * BLOCK);
                continue;
            }
            if self.split[block] == 0 {
                self.split(block);
            }
            let granules = (self.split[block] as usize - 1) * per_block;
            let first = offset.saturating_sub(block * BLOCK) >> self.shift;
            let end = (((offset + bytes - block * BLOCK).min(BLOCK) - 1) >> self.shift) + 1;
            for granule in first..end {
                act(&mut self.granules, granules + granule, block * BLOCK + (granule << self.shift));
            }
        }
    }

    /// Splits a block: each granule gets a copy of the state of the block.
    #[cold]
    fn split(&mut self, block: usize) {
        for _ in 0..BLOCK >> self.shift {
            self.granules.copy_of(&self.blocks, block);
        }
        self.split[block] = (self.granules.writes.len() >> (BLOCK.trailing_zeros() - self.shift)) as u32;
    }
}

impl Level {
    fn new(cells: usize, slots: usize) -> Level {
        Level {
            writes: vec![Write::NEVER; cells],
            reads: vec![Vec::new(); slots],
            beside: vec![0; cells],
            records: Vec::new(),
            work: 0,
        }
    }

    /// Appends a cell with the state of a cell of another level.
    fn copy_of(&mut self, other: &Level, cell: usize) {
        let at = self.writes.len();
        self.writes.push(other.writes[cell]);
        for (actor, read) in other.last_reads(cell).filter(|(_, read)| read.epoch != 0) {
            self.reads_of(actor).0[at] = *read;
        }
        let records = other.beside[cell].checked_sub(1).map(|at| other.records[at as usize].clone());
        self.records.extend(records.clone());
        self.beside.push(records.map_or(0, |_| self.records.len() as u32));
    }

    /// The last reads of a cell, with the actor of each.
    #[inline(always)]
    fn last_reads(&self, cell: usize) -> impl Iterator<Item = (usize, &Record)> {
        self.reads.iter().enumerate().filter_map(move |(actor, reads)| Some((actor, reads.get(cell)?)))
    }

    /// The last reads of each cell by an actor that has a slot, and the writes.
    #[inline(always)]
    fn reads_of(&mut self, actor: usize) -> (&mut [Record], &[Write]) {
        let (reads, cells) = (&mut self.reads[actor], self.writes.len());
        if reads.len() < cells {
            reads.resize(cells, Record::NEVER);
        }
        (reads, &self.writes)
    }

    fn records_of(&mut self, cell: usize) -> &mut Records {
        if self.beside[cell] == 0 {
            self.records.push(Records::default());
            self.beside[cell] = self.records.len() as u32;
        }
        let records = &mut self.records[self.beside[cell] as usize - 1];
        self.work += records.len() as u64;
        records
    }

    #[inline(always)]
    fn judge_read(&mut self, cell: usize, a: &Access) -> Verdict {
        let write = &self.writes[cell];
        if write.is_never() {
            return Verdict::Uninitialised;
        }
        if !write.ordered(a) {
            return Verdict::Conflict(write.conflict(a));
        }
        if write.beside_matters(a)
            && let Some(conflict) = self.records_of(cell).race_with_read(a)
        {
            return Verdict::Conflict(conflict);
        }
        Verdict::Fine
    }

    #[inline(always)]
    fn write(&mut self, cell: usize, a: &Access, forgiven: &impl Fn(&Conflict) -> bool) -> Option<Conflict> {
        let read = self.unordered_read(cell, a);
        if self.beside[cell] == 0 && !a.stands_beside() && self.writes[cell].ordered(a) {
            self.writes[cell] = Write::of(a);
            return read;
        }
        let mut last = self.writes[cell];
        let found = self.records_of(cell).write(&mut last, a, forgiven);
        self.writes[cell] = last;
        found.or(read)
    }

    #[inline(always)]
    fn observe(&mut self, cell: usize, a: &Access) {
        if a.strength > Strength::Weak && self.writes[cell].beside.is_some() {
            let last = self.writes[cell];
            self.records_of(cell).observe(&last, a);
        }
    }

    #[inline(always)]
    fn note_read(&mut self, cell: usize, a: &Access) {
        let new = Record::of_read(a);
        let known = a.view.known_to_all(a.actor);
        if a.actor >= self.reads.len() {
            return self.records_of(cell).note(a.agent(), new, known);
        }
        let slot = &mut self.reads_of(a.actor).0[cell];
        let old = *slot;
        if !slot.absorb(&new, known) {
            *slot = new;
            let left = Record { lanes: old.lanes_beside(&new, known), ..old };
            self.records_of(cell).note(a.agent(), left, 0);
        }
    }

    #[inline(always)]
    fn unordered_read(&self, cell: usize, a: &Access) -> Option<Conflict> {
        self.last_reads(cell).find_map(|(actor, read)| {
            if read.epoch <= a.view.known_to_all(a.actor_of(actor)) {
                return None;
            }
            read.conflict(a.view.home() + actor as Agent, a, |_| false)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kinds, WarpView};
    use super::*;

    /// Two lanes read a word in turns, each after its own fence. A strong store of another warp comes between
    /// the reads.
    #[test]
    fn few_records_stand_for_many_reads() {
        let actors = Actors::new(1, 2, Kinds::default());
        let mut views = [0, 1].map(|warp| WarpView::new(0, warp, actors, !0));
        let mut shadow = DenseShadow::new(BLOCK, 4, actors);
        for round in 0..1000 {
            let lanes = 1 << (round % 2);
            views[0].release(lanes);
            let [reader, writer] = [0, 1].map(|actor| Access {
                view: &views[actor],
                actor,
                epoch: views[actor].now(),
                proxy: None,
                lanes,
                pc: 0,
                strength: Strength::Gpu,
                width: 4,
                touch: Touch::Plain,
            });
            shadow.read(0, 4, &reader);
            assert!(shadow.write(0, 4, &writer).is_none());
        }
        assert!(shadow.granules.records.iter().all(|records| records.len() < 5));
        assert!((1..1000).contains(&shadow.toll()));
    }
}
