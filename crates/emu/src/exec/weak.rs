//! Weak behaviours of strong accesses (PTX ISA, "Memory Consistency Model"). A relaxed or volatile read may
//! return an older value than the newest one; only coherence and happens-before limit which values are
//! possible. With [`Options::weak`](crate::Options::weak), reads of global memory return older values at
//! random.
//!
//! Each strong write keeps the value that it replaced. A read may return that value unless the write happened
//! before the read, the reading warp made the write, or the thread has already seen the write. A fence.sc of
//! the writer after the write and a later fence.sc of the reader also order the write before the read.

use std::collections::{HashMap, VecDeque};

use rand::Rng;

use super::Env;
use super::access::Site;
use super::warp::Warp;
use crate::memory::Chunk;
use crate::order::{Agent, Epoch, Strength};
use crate::report::HazardKind;
use ptx::Space;

/// Number of replaced values that are kept for each location.
const KEPT: usize = 4;

/// How often a thread may read an older value at one location. The limit ensures that a loop which waits for
/// the newest value ends.
const OLDER: u32 = 3;

/// A strong write, and the value that it replaced.
#[derive(Clone, Copy, Debug)]
struct Replaced {
    value: Chunk,
    agent: Agent,
    lane: usize,
    epoch: Epoch,
    time: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The time of the newest write that the thread has seen at this location.
    time: u64,
    older: u32,
}

type Thread = (Agent, usize);

/// The strong writes to global memory, in the order of their execution.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeakMemory {
    time: u64,
    /// Keyed by address and size in bytes.
    writes: HashMap<(u64, u32), VecDeque<Replaced>>,
    seen: HashMap<(u64, Thread), Seen>,
    /// The times of each thread's sequentially consistent fences.
    fences: HashMap<Thread, Vec<u64>>,
}

impl WeakMemory {
    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// Whether sequentially consistent fences order a write before the present read.
    fn fenced(&self, write: &Replaced, reader: Thread) -> bool {
        let Some(last) = self.fences.get(&reader).and_then(|times| times.last()) else { return false };
        let of_writer = self.fences.get(&(write.agent, write.lane)).into_iter().flatten();
        of_writer.into_iter().any(|time| (write.time..*last).contains(time))
    }
}

impl Env<'_> {
    fn is_weak(&self, site: &Site) -> bool {
        self.context.options.weak
            && site.space == Space::Global
            && site.strength != Strength::Weak
            && matches!(site.bytes, 4 | 8)
    }

    /// Called before a strong write of global memory, with the value that it replaces.
    pub(super) fn note_replaced(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        value: Chunk,
    ) {
        if !self.is_weak(site) {
            return;
        }
        let weak = &mut self.order.weak;
        let (agent, epoch, time) = (warp.view.agent(), warp.view.now(), weak.tick());
        let writes = weak.writes.entry((address, site.bytes)).or_default();
        writes.push_back(Replaced { value, agent, lane, epoch, time });
        if writes.len() > KEPT {
            writes.pop_front();
        }
        weak.seen.entry((address, (agent, lane))).or_default().time = time;
    }

    /// The value that a strong read of global memory returns. `newest` is the value in memory.
    pub(super) fn weak_value(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        newest: Chunk,
    ) -> Chunk {
        if !self.is_weak(site) {
            return newest;
        }
        let reader = (warp.view.agent(), lane);
        let weak = &self.order.weak;
        let Some(writes) = weak.writes.get(&(address, site.bytes)) else { return newest };
        let mut seen = weak.seen.get(&(address, reader)).copied().unwrap_or_default();
        let mut value = newest;
        let mut taken = writes.back().map_or(0, |write| write.time);
        if seen.older < OLDER {
            for write in writes.iter().rev() {
                let known = write.agent == reader.0
                    || write.time <= seen.time
                    || warp.view.knows_agent(lane, write.agent, 1 << write.lane, write.epoch)
                    || weak.fenced(write, reader);
                if known || !self.rng.random_bool(0.5) {
                    break;
                }
                value = write.value;
                taken = write.time - 1;
            }
        }
        let older = value != newest;
        seen.older += u32::from(older);
        seen.time = seen.time.max(if older { 0 } else { taken });
        self.order.weak.seen.insert((address, reader), seen);
        if older {
            let place = Some((Space::Global, address));
            self.report(HazardKind::WeakOrder, site.inst, warp.index, lane, place, || {
                "a relaxed or volatile read may return an older value: no release and acquire order the write before it"
                    .into()
            });
        }
        value
    }

    /// Called at a sequentially consistent fence of gpu scope.
    pub(super) fn note_fence(&mut self, warp: &Warp, lanes: u32) {
        if !self.context.options.weak {
            return;
        }
        let agent = warp.view.agent();
        let time = self.order.weak.tick();
        for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
            self.order.weak.fences.entry((agent, lane)).or_default().push(time);
        }
    }
}
