//! The memory system as one SM sees it: its load-store unit, its L1, and its share of L2 and DRAM.
//!
//! Each level is a server with a rate: a request waits for those before it, then takes its bytes over the rate, then the
//! latency of the level that answers. L2 and DRAM are shared by the SMs at work, so a server has one SM's share.

use super::cost::TICK;
use super::lower::{Cached, Direction};
use super::machine::Gpu;
use super::prediction::Cause;
use crate::trace::CacheFootprint;

/// Bytes of a sector.
const SECTOR: u64 = 32;
/// Backlog of the load-store unit, in clocks, beyond which a warp cannot issue to it: its queue is full.
const QUEUE: u64 = 32;

/// State of the data buffers before the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    /// Launched before on the same buffers: what fits in L2 is there.
    #[default]
    Warm,
    /// L2 holds nothing of them.
    Cold,
}

/// Clocks that the port of a sub-partition is held by an access (rows "ld.shared.b32 rate", "st.shared.b32 rate" and "shfl
/// rate" at 1, 4 and 16 warps).
const PORT: u64 = 4;
/// Clocks that an atomic in shared memory takes beyond a load.
const ATOMIC: u64 = 3;

/// Something that serves requests one after another at a fixed rate.
#[derive(Clone, Copy, Debug)]
struct Server {
    free: u64,
    /// Bytes per tick.
    rate: f64,
    busy: f64,
}

impl Server {
    fn new(bytes_per_clock: f64) -> Server {
        Server { free: 0, rate: bytes_per_clock / TICK as f64, busy: 0.0 }
    }

    /// Serves `bytes` from `at` on; returns when the last of them is through.
    fn serve(&mut self, at: u64, bytes: u64) -> u64 {
        let time = bytes as f64 / self.rate;
        self.busy += time;
        self.free = self.free.max(at) + time.ceil() as u64;
        self.free
    }
}

/// When and from where a request comes.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub tick: u64,
    /// Sub-partition.
    pub port: usize,
    /// Warp, over all that the SM ever ran.
    pub warp: usize,
}

/// What an access holds, in clocks.
#[derive(Clone, Copy, Debug)]
struct Hold {
    /// The unit, and at `pass` clocks each the warp's place in it: passes over the banks or lines looked up.
    passes: u64,
    /// The port of the sub-partition.
    port: u64,
}

/// What a request met.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Tick at which its data can be used.
    pub done: u64,
    /// What one would wait for.
    pub cause: Cause,
}

/// The memory system.
pub(super) struct MemorySystem<'a> {
    gpu: &'a Gpu,
    /// Tick at which the load-store unit can take the next access.
    unit_free: u64,
    /// The same for the port of each sub-partition to it.
    port_free: Vec<u64>,
    /// The same for each warp: its accesses pass one after another.
    warp_free: Vec<u64>,
    /// Ticks that it was busy with shared memory and exchanges, and with the caches.
    pub unit_busy: [u64; 2],
    l2: Server,
    dram: Server,
    /// Sectors that L1 keeps for each resident CTA.
    l1_sectors: u64,
    /// Sectors that L2 keeps for each CTA of the device.
    l2_sectors: u64,
    /// Part of the sectors new to a CTA that are new to the device.
    cold: f64,
    owed: f64,
    /// Sectors read or written beyond L1 and from DRAM.
    pub l2_traffic: u64,
    pub dram_traffic: u64,
    /// Of those beyond L1, local memory's.
    pub local_traffic: u64,
}

/// How the SM and the device are filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Residency {
    /// SMs with work.
    pub active_sms: u32,
    /// CTAs on an SM at a time.
    pub ctas: u32,
    /// Shared memory of as many CTAs as fit an SM, bytes: what the driver sets aside before it knows how many come.
    pub shared: u64,
    /// Part of the sectors new to a CTA that come from DRAM.
    pub cold: f64,
}

impl<'a> MemorySystem<'a> {
    pub(super) fn new(gpu: &'a Gpu, residency: Residency) -> MemorySystem<'a> {
        let m = &gpu.memory;
        let (sms, ctas) = (u64::from(residency.active_sms.max(1)), u64::from(residency.ctas.max(1)));
        let l1 = m.l1_beside(residency.shared);
        MemorySystem {
            gpu,
            unit_free: 0,
            port_free: vec![0; gpu.schedulers as usize],
            warp_free: Vec::new(),
            unit_busy: [0; 2],
            l2: Server::new(gpu.l2_bytes_per_clock(residency.active_sms)),
            dram: Server::new(gpu.dram_bytes_per_clock() / sms as f64),
            l1_sectors: l1 / SECTOR / ctas,
            l2_sectors: m.l2_bytes / SECTOR / (ctas * sms),
            cold: residency.cold,
            owed: 0.0,
            l2_traffic: 0,
            dram_traffic: 0,
            local_traffic: 0,
        }
    }

    /// From when on the queue to the load-store unit has room for a warp of a sub-partition.
    pub(super) fn admits(&self, port: usize, warp: usize) -> u64 {
        let own = self.warp_free.get(warp).copied().unwrap_or(0);
        self.unit_free.max(self.port_free[port]).max(own).saturating_sub(QUEUE * TICK)
    }

    /// Takes the load-store unit; returns when its turn begins. The unit makes a pass a clock, but for one warp only one in
    /// `shared_pass` clocks: several warps, also of one sub-partition, are served in turns.
    fn occupy(&mut self, at: At, hold: Hold, kind: usize) -> u64 {
        if self.warp_free.len() <= at.warp {
            self.warp_free.resize(at.warp + 1, 0);
        }
        let start = at.tick.max(self.unit_free).max(self.port_free[at.port]).max(self.warp_free[at.warp]);
        self.unit_free = start + hold.passes * TICK;
        self.port_free[at.port] = start + hold.port * TICK;
        self.warp_free[at.warp] = start + hold.passes * TICK * u64::from(self.gpu.latency.shared_pass);
        self.unit_busy[kind] += hold.passes * TICK;
        start
    }

    /// Clocks in which the load-store units take the addresses of a warp.
    fn addressing(&self) -> u64 {
        u64::from(32 / self.gpu.memory.lsu_lanes.max(1)).max(1)
    }

    /// When everything asked for is through.
    pub(super) fn drained(&self) -> u64 {
        self.unit_free.max(self.l2.free).max(self.dram.free)
    }

    /// Fractions of the time up to `end` that L2's and DRAM's share was in use.
    pub(super) fn bandwidth_use(&self, end: u64) -> (f64, f64) {
        let end = end.max(1) as f64;
        (self.l2.busy / end, self.dram.busy / end)
    }

    /// A shuffle.
    pub(super) fn exchange(&mut self, at: At, latency: u32) -> Answer {
        let start = self.occupy(at, Hold { passes: 1, port: PORT }, 0);
        Answer { done: start + u64::from(latency) * TICK, cause: Cause::Exchange }
    }

    /// An access to shared memory of so many passes.
    pub(super) fn shared(&mut self, at: At, passes: u64, direction: Direction) -> Answer {
        let passes = passes.max(1);
        let hold = Hold { passes: passes.max(self.addressing()), port: PORT };
        let start = self.occupy(at, hold, 0);
        let latency = &self.gpu.latency;
        // An atomic is computed where the data is (row "atom.shared.add chain").
        let base = u64::from(latency.shared) + if direction == Direction::Atomic { ATOMIC } else { 0 };
        let extra = (passes - 1) * u64::from(latency.shared_pass) + (start - at.tick) / TICK;
        let cause = if extra > base { Cause::SharedBandwidth } else { Cause::SharedLatency };
        Answer { done: start + (base + (passes - 1) * u64::from(latency.shared_pass)) * TICK, cause }
    }

    /// An access through the caches.
    pub(super) fn cached(&mut self, at: At, f: &CacheFootprint, direction: Direction, how: Cached) -> Answer {
        let (lines, sectors) = (u64::from(f.lines.max(1)), u64::from(f.sectors.max(1)));
        // One tag look-up and 128 bytes a clock.
        let passes = lines.max(sectors.div_ceil(4)).max(self.addressing());
        let start = self.occupy(at, Hold { passes, port: PORT }, 1);
        let tags = (lines - 1) * u64::from(self.gpu.latency.shared_pass) * TICK;
        let missing = self.misses(f, direction, how);
        if missing.l2 == 0 {
            return Answer { done: start + u64::from(self.gpu.latency.l1) * TICK + tags, cause: Cause::L1 };
        }
        if how == Cached::Local {
            self.local_traffic += missing.l2;
        }
        self.beyond(start, tags, missing)
    }

    /// What L2 and DRAM answer to a request that leaves the SM at `start`.
    fn beyond(&mut self, start: u64, tags: u64, missing: Missing) -> Answer {
        let latency = &self.gpu.latency;
        self.l2_traffic += missing.l2;
        let through = self.l2.serve(start, missing.l2 * SECTOR);
        let mut done = through.max(start + tags) + u64::from(latency.l2) * TICK;
        let mut cause =
            if through - start > u64::from(latency.l2) * TICK { Cause::L2Bandwidth } else { Cause::L2 };
        if missing.dram > 0 {
            self.dram_traffic += missing.dram;
            let through = self.dram.serve(start, missing.dram * SECTOR);
            let wait = u64::from(latency.dram) * TICK;
            cause = if through - start > wait { Cause::DramBandwidth } else { Cause::Dram };
            done = done.max(through + wait);
        }
        Answer { done, cause }
    }

    /// The global read and the shared write of `cp.async`. What passes L1 takes nothing of its banks on the way out; what comes
    /// back is written to shared memory, a pass a clock.
    pub(super) fn copy(&mut self, at: At, source: &CacheFootprint, passes: u64) -> Answer {
        let passes = passes.max(self.addressing());
        let start = self.occupy(at, Hold { passes, port: PORT }, 1);
        let missing = self.misses(source, Direction::Load, Cached::L2);
        let read = self.beyond(start, 0, missing);
        Answer { done: read.done + passes * TICK, cause: Cause::AsyncCopy }
    }

    fn misses(&mut self, f: &CacheFootprint, direction: Direction, how: Cached) -> Missing {
        let (sectors, fresh) = (u64::from(f.sectors.max(1)), u64::from(f.fresh));
        let old = sectors.saturating_sub(fresh);
        let far = |keeps: u64| if f.reuse < 63 && 1u64 << f.reuse > keeps { old } else { 0 };
        let again = far(self.l2_sectors);
        match (how, direction) {
            // Local memory is written before it is read, and written back only when it is evicted.
            (Cached::Local, _) => Missing { l2: far(self.l1_sectors), dram: again },
            // Stores go through to L2; what is new to it pushes as much out to DRAM.
            (_, Direction::Store) => Missing { l2: sectors, dram: again + self.cold_sectors(fresh) },
            (_, Direction::Atomic) => Missing { l2: sectors, dram: self.cold_sectors(fresh) },
            (Cached::L2, Direction::Load) => Missing { l2: sectors, dram: again + self.cold_sectors(fresh) },
            (Cached::L1, Direction::Load) => {
                Missing { l2: fresh + far(self.l1_sectors), dram: again + self.cold_sectors(fresh) }
            }
        }
    }

    /// How many of these sectors, new to the CTA, no other CTA has brought to L2 yet: the part `cold`, carried over.
    fn cold_sectors(&mut self, fresh: u64) -> u64 {
        self.owed += fresh as f64 * self.cold;
        let whole = self.owed.floor();
        self.owed -= whole;
        whole as u64
    }
}

/// Sectors that an access does not find in L1, and in L2.
#[derive(Clone, Copy)]
struct Missing {
    l2: u64,
    dram: u64,
}
