use std::collections::HashMap;
use std::ops::Range;

use super::shadow::{Access, Conflict, Read, Strength, Touch, Verdict, Write, read_unordered, write_ordered};
use super::{Actors, Agent, Epoch, FLIGHT};

/// Bytes of a block: what the accesses that matter for speed, cp.async and ldmatrix, move per lane.
const BLOCK: usize = 16;

/// Cells of one size.
#[derive(Debug)]
struct Level {
    slots: usize,
    writes: Vec<Write>,
    /// One per slot for each cell.
    reads: Vec<Read>,
    /// Reads that neither fit a slot nor are implied by what is there: lanes of a warp that synchronised apart, and actors
    /// that have none.
    extra: HashMap<usize, Vec<(usize, Read)>>,
}

/// Shadow of a cluster's shared memory: the last write, and the last reads of each warp, of every 16-byte block; of every
/// granule of it, once a narrower access has been there.
#[derive(Debug)]
pub(crate) struct DenseShadow {
    /// log2 of the granule's bytes.
    shift: u32,
    blocks: Level,
    granules: Level,
    split: Vec<bool>,
}

impl DenseShadow {
    pub fn new(bytes: usize, granule: u32, actors: Actors) -> DenseShadow {
        let blocks = bytes.div_ceil(BLOCK);
        let per_block = BLOCK / granule as usize;
        DenseShadow {
            shift: granule.trailing_zeros(),
            blocks: Level::new(blocks, actors.slots()),
            granules: Level::new(if per_block == 1 { 0 } else { blocks * per_block }, actors.slots()),
            split: vec![false; blocks],
        }
    }

    #[inline(always)]
    pub fn read(&mut self, offset: usize, bytes: usize, a: &Access) -> Verdict {
        let (cells, level, _) = self.locate(offset, bytes);
        let mut verdict = Verdict::Fine;
        for cell in cells {
            match level.read(cell, a) {
                Verdict::Fine => {}
                found => verdict = found,
            }
        }
        verdict
    }

    /// `None` where everything is ordered; else the first conflict and the offset of its cell.
    #[inline(always)]
    pub fn write(&mut self, offset: usize, bytes: usize, a: &Access) -> Option<(Conflict, usize)> {
        let (cells, level, shift) = self.locate(offset, bytes);
        let mut found = None;
        for cell in cells {
            if let Some(conflict) = level.write(cell, a) {
                found = found.or(Some((conflict, cell << shift)));
            }
        }
        found
    }

    /// The asynchronous write of a thread is complete as of `epoch`.
    pub fn land(&mut self, offset: usize, bytes: usize, thread: (Agent, usize), epoch: Epoch, touch: Touch) {
        let (cells, level, _) = self.locate(offset, bytes);
        for write in &mut level.writes[cells] {
            if write.epoch == FLIGHT && (write.agent, usize::from(write.lane)) == thread {
                (write.epoch, write.touch) = (epoch, touch);
            }
        }
    }

    /// Whether all of a range was written by somebody.
    pub fn is_written(&mut self, offset: usize, bytes: usize) -> bool {
        let (cells, level, _) = self.locate(offset, bytes);
        level.writes[cells].iter().all(|w| w.epoch != 0)
    }

    /// The cells of an aligned access, their level, and log2 of their bytes.
    #[inline(always)]
    fn locate(&mut self, offset: usize, bytes: usize) -> (Range<usize>, &mut Level, u32) {
        let blocks = offset / BLOCK..(offset + bytes).div_ceil(BLOCK);
        let whole = bytes >= BLOCK && !self.split[blocks.clone()].iter().any(|split| *split);
        if whole || self.granules.writes.is_empty() {
            return (blocks, &mut self.blocks, BLOCK.trailing_zeros());
        }
        for block in blocks {
            if !self.split[block] {
                self.split(block);
            }
        }
        (offset >> self.shift..((offset + bytes - 1) >> self.shift) + 1, &mut self.granules, self.shift)
    }

    /// Gives each granule of a block what is known of the block.
    #[cold]
    fn split(&mut self, block: usize) {
        self.split[block] = true;
        let (slots, per_block) = (self.blocks.slots, BLOCK >> self.shift);
        for granule in block * per_block..(block + 1) * per_block {
            self.granules.writes[granule] = self.blocks.writes[block];
            let reads = &self.blocks.reads[block * slots..][..slots];
            self.granules.reads[granule * slots..][..slots].copy_from_slice(reads);
            if let Some(extra) = self.blocks.extra.get(&block) {
                self.granules.extra.insert(granule, extra.clone());
            }
        }
    }
}

impl Level {
    fn new(cells: usize, slots: usize) -> Level {
        Level {
            slots,
            writes: vec![Write::NEVER; cells],
            reads: vec![Read::NEVER; cells * slots],
            extra: HashMap::new(),
        }
    }

    #[inline(always)]
    fn read(&mut self, cell: usize, a: &Access) -> Verdict {
        let write = &self.writes[cell];
        let mut verdict = Verdict::Fine;
        if write.epoch == 0 {
            verdict = Verdict::Uninitialised;
        } else if write.epoch > a.view.known_to_all(write.actor(a)) && !write_ordered(write, a) {
            verdict = Verdict::Conflict(write.conflict(a));
        } else if write.touch == Touch::Atomic
            && a.strength == Strength::Weak
            && let Some(conflict) = self.unordered_reads(cell, a, true)
        {
            verdict = Verdict::Conflict(conflict);
        }
        self.note_read(cell, a);
        verdict
    }

    #[inline(always)]
    fn write(&mut self, cell: usize, a: &Access) -> Option<Conflict> {
        let write = &self.writes[cell];
        let ordered = write.epoch <= a.view.known_to_all(write.actor(a)) || write_ordered(write, a);
        let found = if ordered { self.unordered_reads(cell, a, false) } else { Some(write.conflict(a)) };
        self.writes[cell] = Write::of(a);
        if a.touch == Touch::Atomic {
            self.note_read(cell, a);
        }
        found
    }

    #[inline(always)]
    fn note_read(&mut self, cell: usize, a: &Access) {
        if a.actor >= self.slots {
            return self.note_extra(cell, a);
        }
        let slot = &mut self.reads[cell * self.slots + a.actor];
        let old = *slot;
        if !slot.absorb(a) {
            *slot = Read::of(a);
            self.extra.entry(cell).or_default().push((a.actor, old));
        }
    }

    /// A read by an actor that has no slot: its last one of each lane stands for those before.
    fn note_extra(&mut self, cell: usize, a: &Access) {
        let list = self.extra.entry(cell).or_default();
        list.retain(|(actor, read)| *actor != a.actor || read.lanes != a.lanes);
        list.push((a.actor, Read::of(a)));
    }

    #[inline(always)]
    fn unordered_reads(&self, cell: usize, a: &Access, atomics_only: bool) -> Option<Conflict> {
        let home = a.view.home();
        let unordered = |actor: usize, read: &Read| {
            if read.epoch <= a.view.known_to_all(actor) || atomics_only && read.touch != Touch::Atomic {
                return None;
            }
            let agent = home + actor as Agent;
            let lanes = read_unordered(read, agent, a);
            (lanes != 0).then(|| read.conflict(agent, lanes))
        };
        let slots = &self.reads[cell * self.slots..][..self.slots];
        let found = slots.iter().enumerate().find_map(|(actor, read)| unordered(actor, read));
        if found.is_some() || self.extra.is_empty() {
            return found;
        }
        self.extra.get(&cell)?.iter().find_map(|(actor, read)| unordered(*actor, read))
    }
}
