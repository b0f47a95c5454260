//! Finds racing reads on whose values nothing depends. This takes two further runs with the same schedule.
//! The first run collects the racing reads, lane by lane. The second run treats their values like undefined
//! values and follows them until something depends on one.

use std::collections::HashMap;

use ptx::Space;

use crate::order::{Agent, Epoch, Unordered};

/// log2 of the bytes that one entry covers. A coarser entry only marks more reads as doubtful.
const SHIFT: u32 = 2;

/// Maximum number of entries. If it is exceeded, no read counts as unused.
const MOST: usize = 1 << 20;

/// The lanes that read a location while another thread wrote it, by location and warp, and the first epoch of
/// the warp in which they did. Reads before that epoch are ordered before the write.
#[derive(Clone, Debug, Default)]
pub(crate) struct Doubts {
    reads: HashMap<(bool, u64, Agent), (u32, Epoch)>,
    pub overflow: bool,
}

impl Doubts {
    pub fn add(&mut self, space: Space, address: u64, bytes: u64, readers: Unordered) {
        for block in address >> SHIFT..=(address + bytes - 1) >> SHIFT {
            if self.reads.len() >= MOST {
                self.overflow = true;
                return;
            }
            self.join((space == Space::Shared, block, readers.agent), (readers.lanes, readers.from));
        }
    }

    fn join(&mut self, key: (bool, u64, Agent), (lanes, from): (u32, Epoch)) {
        let known = self.reads.entry(key).or_insert((0, from));
        *known = (known.0 | lanes, known.1.min(from));
    }

    /// The lanes of a warp whose read in its present epoch is doubtful.
    pub fn lanes(&self, space: Space, address: u64, bytes: u64, (agent, now): (Agent, Epoch)) -> u32 {
        let blocks = address >> SHIFT..=(address + bytes - 1) >> SHIFT;
        let found = blocks.filter_map(|block| self.reads.get(&(space == Space::Shared, block, agent)));
        found.filter(|(_, from)| *from <= now).fold(0, |all, (lanes, _)| all | lanes)
    }

    pub fn merge(&mut self, other: Doubts) {
        self.overflow |= other.overflow;
        for (key, readers) in other.reads {
            self.join(key, readers);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }
}
