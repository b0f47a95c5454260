//! Finds racing reads on whose values nothing depends. This takes two further runs with the same schedule.
//! The first run collects the racing reads, lane by lane. The second run treats their values like undefined
//! values and follows them until something depends on one.

use std::collections::HashMap;

use super::registers::for_lanes;
use super::warp::Warp;
use super::{Env, Follow};
use crate::decode::Inst;
use crate::order::{Access, Agent, Conflict};
use ptx::Space;

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
    fn add(&mut self, space: Space, address: u64, bytes: u64, agent: Agent, lanes: u32) {
        for block in address >> SHIFT..=(address + bytes - 1) >> SHIFT {
            if self.reads.len() >= MOST {
                self.overflow = true;
                return;
            }
            *self.reads.entry((space == Space::Shared, block, agent)).or_default() |= lanes;
        }
    }

    fn lanes(&self, space: Space, address: u64, bytes: u64, agent: Agent) -> u32 {
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

impl Env<'_> {
    /// Called when a read races with an earlier write.
    #[cold]
    pub(super) fn doubt_read(
        &mut self,
        access: &Access,
        conflict: &Conflict,
        space: Space,
        address: u64,
        bytes: u64,
    ) {
        let agent = access.agent();
        if let Some(doubts) = self.collected.as_mut().filter(|_| conflict.wrote) {
            doubts.add(space, address, bytes, agent, access.lanes);
        }
    }

    /// Called before a write: collects the reads that are not ordered before it.
    #[inline(always)]
    pub(super) fn doubt_readers(
        &mut self,
        access: &Access,
        space: Space,
        offset: u64,
        address: u64,
        bytes: u64,
    ) {
        let Some(mut doubts) = self.collected.take() else { return };
        let mut add = |agent, lanes| doubts.add(space, address, bytes, agent, lanes);
        match space {
            Space::Shared => self.shadow.unordered_readers(offset as usize, bytes as usize, access, &mut add),
            _ => self.order.shadow.unordered_readers(address, bytes, access, &mut add),
        }
        self.collected = Some(doubts);
    }

    /// Called after a load: marks the values that doubtful reads returned, or undefined bytes.
    #[cold]
    pub(super) fn mark_doubted(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        spaces: &[(Space, u32)],
        bytes: u64,
        places: &[u64; 32],
    ) {
        let Some(watch) = inst.watched else { return };
        let agent = warp.view.home() + warp.index as Agent;
        let is_doubted = |space: Space, lane: usize| match self.context.follow {
            Follow::Values(doubts) => doubts.lanes(space, places[lane], bytes, agent) >> lane & 1 == 1,
            Follow::Copies if space == Space::Shared => self.has_undefined_bytes(places[lane], bytes),
            Follow::Copies | Follow::Collect | Follow::Nothing => false,
        };
        let mut doubted = 0;
        for &(space, lanes) in
            spaces.iter().filter(|(space, _)| matches!(space, Space::Shared | Space::Global))
        {
            for_lanes(lanes, |lane| doubted |= u32::from(is_doubted(space, lane)) << lane);
        }
        if doubted != 0 {
            let watch = &self.context.program.watches[watch as usize];
            warp.undefined.doubt(watch, doubted, inst.line);
        }
    }
}
