//! Finds racing reads on whose values nothing depends. This takes two further runs with the same schedule.
//! The first run collects the racing reads, lane by lane. The second run treats their values like undefined
//! values and follows them until something depends on one.

use std::collections::HashMap;

use ptx::Space;

use crate::order::Agent;

/// log2 of the bytes that one entry covers. A coarser entry only marks more reads as doubtful.
const SHIFT: u32 = 2;

/// Maximum number of entries. If it is exceeded, no read counts as unused.
const MOST: usize = 1 << 20;

/// The lanes that read a location while another thread wrote it, by location and warp.
#[derive(Clone, Debug, Default)]
pub(crate) struct Doubts {
    reads: HashMap<(bool, u64, Agent), u32>,
    pub overflow: bool,
}

impl Doubts {
    pub fn add(&mut self, space: Space, address: u64, bytes: u64, agent: Agent, lanes: u32) {
        for block in address >> SHIFT..=(address + bytes - 1) >> SHIFT {
            if self.reads.len() >= MOST {
                self.overflow = true;
                return;
            }
            *self.reads.entry((space == Space::Shared, block, agent)).or_default() |= lanes;
        }
    }

    pub fn lanes(&self, space: Space, address: u64, bytes: u64, agent: Agent) -> u32 {
        let blocks = address >> SHIFT..=(address + bytes - 1) >> SHIFT;
        let found = blocks.filter_map(|block| self.reads.get(&(space == Space::Shared, block, agent)));
        found.fold(0, |all, lanes| all | lanes)
    }

    pub fn merge(&mut self, other: Doubts) {
        self.overflow |= other.overflow;
        for (key, lanes) in other.reads {
            *self.reads.entry(key).or_default() |= lanes;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }
}
