//! Models the memory system from the view of one SM: its load-store unit, its L1, and its share of L2 and
//! DRAM.
//!
//! Each level is a server with a rate. A request waits for earlier requests, then takes its bytes divided by
//! the rate, plus the latency of the level that answers. The active SMs share L2 and DRAM, so a server has
//! the share of one SM.

use super::cost::TICK;
use super::lower::{Cached, Direction};
use super::machine::Gpu;
use super::prediction::Cause;
use emu::trace::CacheFootprint;

/// Bytes of a sector.
const SECTOR: u64 = 32;
/// Backlog of the load-store unit, in clocks, at which its queue is full and no warp can issue to it.
const QUEUE: u64 = 32;

/// The caches' contents at the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    /// An earlier launch used the same buffers: L2 holds as much of them as fits.
    #[default]
    Warm,
    /// L2 holds none of the buffers.
    Cold,
}

/// Clocks for which an access holds the port of a sub-partition (measured: rows "ld.shared.b32 rate",
/// "st.shared.b32 rate" and "shfl rate" at 1, 4 and 16 warps).
const PORT: u64 = 4;
/// Additional clocks of an atomic in shared memory, compared with a load.
const ATOMIC: u64 = 3;

/// A server that serves requests one after another at a fixed rate.
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

    /// Serves `bytes` from `at` on. Returns the tick at which the last byte is served.
    fn serve(&mut self, at: u64, bytes: u64) -> u64 {
        let time = bytes as f64 / self.rate;
        self.busy += time;
        self.free = self.free.max(at) + time.ceil() as u64;
        self.free
    }
}

/// The time and origin of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub tick: u64,
    /// Sub-partition.
    pub port: usize,
    /// Index of the warp among all warps that the SM has run.
    pub warp: usize,
}

/// The units that an access holds.
#[derive(Clone, Copy, Debug)]
struct Hold {
    /// Passes over the banks, or lines looked up. Each holds the unit for one clock, and delays the warp's
    /// next access by `shared_pass` clocks.
    passes: u64,
    /// Clocks for which the port of the sub-partition is held.
    port: u64,
}

/// The result of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Tick at which the data can be used.
    pub done: u64,
    /// The cause of a wait for the data.
    pub cause: Cause,
}

/// The memory system.
pub(super) struct MemorySystem<'a> {
    gpu: &'a Gpu,
    /// Tick at which the load-store unit can take the next access.
    unit_free: u64,
    /// For each sub-partition, the tick at which its port to the unit is free.
    port_free: Vec<u64>,
    /// For each warp, the tick at which its next access can start: the accesses of a warp are served one
    /// after another.
    warp_free: Vec<u64>,
    /// Ticks for which the unit was busy: with shared memory and shuffles, and with the caches.
    pub unit_busy: [u64; 2],
    l2: Server,
    dram: Server,
    /// The connection to other SMs of the cluster.
    remote: Server,
    /// Sectors that L1 keeps for each resident CTA.
    l1_sectors: u64,
    /// Sectors that L2 keeps for each CTA of the device.
    l2_sectors: u64,
    /// Fraction of the sectors new to a CTA that are also new to the device.
    cold: f64,
    owed: f64,
    /// Sectors read or written beyond L1, and those from DRAM.
    pub l2_traffic: u64,
    pub dram_traffic: u64,
    /// The part of `l2_traffic` that is local memory.
    pub local_traffic: u64,
}

/// The load of the SM and the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Residency {
    /// Number of SMs that have work.
    pub active_sms: u32,
    /// Number of CTAs on an SM at the same time.
    pub ctas: u32,
    /// Shared memory in bytes of the largest number of CTAs that fit on an SM. The driver reserves it before
    /// it knows how many CTAs the SM gets.
    pub shared: u64,
    /// Fraction of the sectors new to a CTA that come from DRAM.
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
            remote: Server::new(f64::from(gpu.units.map_or(1, |u| u.cluster_bandwidth))),
            l1_sectors: l1 / SECTOR / ctas,
            l2_sectors: m.l2_bytes / SECTOR / (ctas * sms),
            cold: residency.cold,
            owed: 0.0,
            l2_traffic: 0,
            dram_traffic: 0,
            local_traffic: 0,
        }
    }

    /// The tick from which the queue of the load-store unit has room for a warp of a sub-partition.
    pub(super) fn admits(&self, port: usize, warp: usize) -> u64 {
        let own = self.warp_free.get(warp).copied().unwrap_or(0);
        self.unit_free.max(self.port_free[port]).max(own).saturating_sub(QUEUE * TICK)
    }

    /// Occupies the load-store unit and returns the tick at which the access starts. The unit makes one pass
    /// per clock, but a single warp gets only one pass in `shared_pass` clocks. Several warps, also of one
    /// sub-partition, are served in turns.
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

    /// Clocks in which the load-store units process the addresses of a warp.
    fn addressing(&self) -> u64 {
        u64::from(32 / self.gpu.memory.lsu_lanes.max(1)).max(1)
    }

    /// The tick at which all requests are served.
    pub(super) fn drained(&self) -> u64 {
        self.unit_free.max(self.l2.free).max(self.dram.free)
    }

    /// Fractions of the time up to `end` for which the shares of L2 and DRAM were in use.
    pub(super) fn bandwidth_use(&self, end: u64) -> (f64, f64) {
        let end = end.max(1) as f64;
        (self.l2.busy / end, self.dram.busy / end)
    }

    pub(super) fn exchange(&mut self, at: At, latency: u32) -> Answer {
        let start = self.occupy(at, Hold { passes: 1, port: PORT }, 0);
        Answer { done: start + u64::from(latency) * TICK, cause: Cause::Exchange }
    }

    /// An access to shared memory that takes `passes` passes.
    pub(super) fn shared(&mut self, at: At, passes: u64, direction: Direction) -> Answer {
        let passes = passes.max(1);
        let hold = Hold { passes: passes.max(self.addressing()), port: PORT };
        let start = self.occupy(at, hold, 0);
        let latency = &self.gpu.latency;
        // An atomic is computed in the memory unit (row "atom.shared.add chain").
        let base = u64::from(latency.shared) + if direction == Direction::Atomic { ATOMIC } else { 0 };
        let extra = (passes - 1) * u64::from(latency.shared_pass) + (start - at.tick) / TICK;
        let cause = if extra > base { Cause::SharedBandwidth } else { Cause::SharedLatency };
        Answer { done: start + (base + (passes - 1) * u64::from(latency.shared_pass)) * TICK, cause }
    }

    /// An access through the caches.
    pub(super) fn cached(&mut self, at: At, f: &CacheFootprint, direction: Direction, how: Cached) -> Answer {
        let (lines, sectors) = (u64::from(f.lines.max(1)), u64::from(f.sectors.max(1)));
        // One tag look-up and 128 bytes per clock.
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

    /// The answer of L2 and DRAM to a request that leaves the SM at `start`.
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

    /// The global read and the shared write of `cp.async`. A request that bypasses L1 does not use its banks
    /// on the way to L2. The returned data is written to shared memory, one pass per clock.
    pub(super) fn copy(&mut self, at: At, source: &CacheFootprint, passes: u64) -> Answer {
        let passes = passes.max(self.addressing());
        let start = self.occupy(at, Hold { passes, port: PORT }, 1);
        let missing = self.misses(source, Direction::Load, Cached::L2);
        let read = self.beyond(start, 0, missing);
        Answer { done: read.done + passes * TICK, cause: Cause::AsyncCopy }
    }

    /// A bulk copy between global and shared memory. Returns the tick at which the last byte has arrived.
    pub(super) fn bulk(&mut self, tick: u64, bytes: u32) -> u64 {
        let sectors = u64::from(bytes).div_ceil(SECTOR);
        let latency = u64::from(self.gpu.units.map_or(self.gpu.latency.l2, |u| u.bulk_latency)) * TICK;
        self.l2_traffic += sectors;
        let through = self.l2.serve(tick, sectors * SECTOR);
        let missing = self.cold_sectors(sectors);
        let from_dram = if missing > 0 {
            self.dram_traffic += missing;
            let further = u64::from(self.gpu.latency.dram.saturating_sub(self.gpu.latency.l2)) * TICK;
            self.dram.serve(tick, missing * SECTOR) + further
        } else {
            0
        };
        through.max(from_dram) + latency
    }

    /// A transfer to another SM of the cluster. Returns the tick at which the bytes have arrived.
    pub(super) fn cluster_store(&mut self, tick: u64, bytes: u32) -> u64 {
        let latency = u64::from(self.gpu.units.map_or(0, |u| u.cluster_latency)) * TICK;
        self.remote.serve(tick, u64::from(bytes)) + latency
    }

    fn misses(&mut self, f: &CacheFootprint, direction: Direction, how: Cached) -> Missing {
        let (sectors, fresh) = (u64::from(f.sectors.max(1)), u64::from(f.fresh));
        let old = sectors.saturating_sub(fresh);
        let far = |keeps: u64| if f.reuse < 63 && 1u64 << f.reuse > keeps { old } else { 0 };
        let again = far(self.l2_sectors);
        match (how, direction) {
            // Local memory is written before it is read, and written back only on eviction.
            (Cached::Local, _) => Missing { l2: far(self.l1_sectors), dram: again },
            // Stores go through to L2. Data new to L2 evicts the same amount to DRAM.
            (_, Direction::Store) => Missing { l2: sectors, dram: again + self.cold_sectors(fresh) },
            (_, Direction::Atomic) => Missing { l2: sectors, dram: self.cold_sectors(fresh) },
            (Cached::L2, Direction::Load) => Missing { l2: sectors, dram: again + self.cold_sectors(fresh) },
            (Cached::L1, Direction::Load) => {
                Missing { l2: fresh + far(self.l1_sectors), dram: again + self.cold_sectors(fresh) }
            }
        }
    }

    /// The number of sectors new to the CTA that no other CTA has loaded into L2 yet: the fraction `cold`,
    /// with the remainder carried over.
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
