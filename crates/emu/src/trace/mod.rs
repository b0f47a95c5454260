//! The trace of a CTA that the executor records for the time model: for each warp, one [`Event`] for every
//! instruction that it issued, in order. An event does not depend on a machine. For a property that depends
//! on the machine (for example whether a line is still in L1), the event records the fact that determines it
//! (a reuse distance).

mod access;
mod reuse;

pub use access::{CacheFootprint, atomic_passes, fragment_accesses, shared_passes};
use ptx::BarKind;
use reuse::ReuseStack;

/// One instruction issued by one warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of the instruction in its function ([`Statement::Inst`](ptx::Statement::Inst)), plus the number
    /// of instructions of all functions before it in the module.
    pub pc: u32,
    /// The lanes that execute the instruction, after its guard. 0 when the guard was false in all lanes; the
    /// instruction was issued nevertheless.
    pub lanes: u32,
    /// Information that the instruction's text does not contain.
    pub detail: Detail,
}

/// The part of an event that is only known from execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing: arithmetic, branches, and all other instructions whose cost follows from the text alone.
    None,
    /// An access to shared memory, including `ldmatrix` and atomics.
    Shared {
        /// Wavefronts: passes over the banks. Without conflicts, one for up to 128 bytes per warp.
        passes: u16,
    },
    /// An access to global, local or constant memory.
    Cached(CacheFootprint),
    /// `cp.async`: a global read and a shared write.
    Copy {
        /// The footprint of the global read.
        source: CacheFootprint,
        /// Passes over the banks of the shared write.
        passes: u8,
    },
    /// Sets the arrivals of a phase of an mbarrier.
    Expect {
        /// The mbarrier.
        at: MbarrierPlace,
        /// Number of arrivals.
        count: u32,
    },
    /// Arrives at an mbarrier, announces bytes, or does both.
    Arrive {
        /// The mbarrier.
        at: MbarrierPlace,
        /// Number of arrivals, at most 255.
        count: u8,
        /// Bytes announced.
        bytes: u32,
    },
    /// Tests whether the phase with this parity has completed.
    Wait {
        /// The mbarrier.
        at: MbarrierPlace,
        /// The parity.
        parity: bool,
        /// Whether the phase has completed.
        done: bool,
    },
    /// A bulk copy, or stores that complete like a bulk copy.
    Bulk {
        /// The mbarrier that counts the bytes, if there is one.
        at: MbarrierPlace,
        /// Number of CTAs that receive the bytes.
        copies: u8,
        /// Bytes that are fetched.
        bytes: u32,
    },
    /// A CTA barrier.
    Barrier {
        /// Index of the barrier, 0 to 15.
        id: u8,
        /// Whether the warp waits or only arrives.
        kind: BarKind,
        /// Threads that the barrier waits for.
        threads: u16,
    },
}

/// The position of an mbarrier in shared memory, in units of 8 bytes. For an mbarrier in another CTA of the
/// cluster, the position in that CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MbarrierPlace(u16);

impl MbarrierPlace {
    /// No mbarrier: threads wait for the copy by its group.
    pub const NONE: MbarrierPlace = MbarrierPlace(u16::MAX);

    /// The position for an address in the window of shared memory.
    pub fn new(address: u64) -> MbarrierPlace {
        MbarrierPlace((address as u32 >> 3) as u16)
    }
}

/// The events of one CTA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CtaTrace {
    /// Linear index in the grid: x + y·grid.x + z·grid.x·grid.y.
    pub cta: u64,
    /// The events of each warp.
    pub warps: Vec<Vec<Event>>,
    /// Number of events, over all warps, that were not kept because the limit was reached.
    pub dropped: u64,
}

impl CtaTrace {
    /// Instructions issued, including those that were not kept.
    pub fn issues(&self) -> u64 {
        self.warps.iter().map(|w| w.len() as u64).sum::<u64>() + self.dropped
    }
}

/// The CTAs of a grid to record: at most `count`, evenly spaced, including the first and the last one. A
/// kernel whose work depends on its position (a causal mask) is thus sampled over its whole range.
pub fn sample_ctas(grid: u64, count: u64) -> Vec<u64> {
    let count = count.min(grid);
    match count {
        0 => Vec::new(),
        1 => vec![grid / 2],
        _ => {
            let spread = |i: u64| (u128::from(i) * u128::from(grid - 1) / u128::from(count - 1)) as u64;
            (0..count).map(spread).collect()
        }
    }
}

/// Records the CTAs of a cluster, usually of one CTA. The executor calls one method for each instruction that
/// a warp issues. Warps are counted over the cluster.
#[derive(Debug)]
pub struct Recorder {
    traces: Vec<CtaTrace>,
    /// Warps of a CTA.
    warps: usize,
    /// Number of events that may still be recorded.
    room: u64,
    /// One reuse stack per CTA, because the CTAs of a cluster need not share an SM.
    reuse: Vec<ReuseStack>,
    /// The details noted so far for the current instruction.
    noted: Option<Detail>,
}

/// Addresses of the 32 lanes. Addresses of lanes that do not participate are not read.
pub type LaneAddresses = [u64; 32];

/// One of the machine instructions of a PTX instruction.
#[derive(Clone, Copy, Debug)]
pub struct AccessPart<'a> {
    /// Lanes that give an address.
    pub lanes: u32,
    /// The addresses of these lanes.
    pub addresses: &'a LaneAddresses,
    /// Bytes per lane.
    pub bytes: u32,
}

impl Recorder {
    /// Default limit of events per CTA: 64 MB.
    pub const DEFAULT_LIMIT: u64 = 4 << 20;

    /// A recorder for the CTA with linear index `cta` and `warps` warps. It keeps at most `limit` events.
    pub fn new(cta: u64, warps: usize, limit: u64) -> Recorder {
        Recorder::of_cluster(&[cta], warps, limit)
    }

    /// A recorder for the CTAs of a cluster, which share the limit.
    pub fn of_cluster(ctas: &[u64], warps: usize, limit: u64) -> Recorder {
        let trace = |cta: &u64| CtaTrace { cta: *cta, warps: vec![Vec::new(); warps], dropped: 0 };
        let reuse = ctas.iter().map(|_| ReuseStack::default()).collect();
        Recorder { traces: ctas.iter().map(trace).collect(), warps, room: limit, reuse, noted: None }
    }

    /// Records an instruction with the details noted for it. Most instructions access no memory and are not
    /// barriers, and have none.
    pub fn issue(&mut self, warp: usize, pc: u32, lanes: u32) {
        let detail = self.noted.take().unwrap_or(Detail::None);
        self.push(warp, Event { pc, lanes, detail });
    }

    /// Notes a detail of the next issued instruction. The counts of lanes add up. If lanes use several
    /// mbarriers, only the first one is recorded.
    pub fn note(&mut self, part: Detail) {
        self.noted = Some(match (self.noted, part) {
            (
                Some(Detail::Arrive { at, count, bytes }),
                Detail::Arrive { count: more, bytes: further, .. },
            ) => {
                Detail::Arrive { at, count: count.saturating_add(more), bytes: bytes.saturating_add(further) }
            }
            (Some(Detail::Bulk { at, bytes, copies }), Detail::Bulk { bytes: more, .. }) => {
                Detail::Bulk { at, bytes: bytes.saturating_add(more), copies }
            }
            _ => part,
        });
    }

    /// A shared-memory access of `bytes` per lane. For `ldmatrix` and `stmatrix`: 16 bytes for each lane
    /// whose address is used (8 per matrix).
    pub fn shared(&mut self, warp: usize, pc: u32, lanes: u32, addresses: &LaneAddresses, bytes: u32) {
        let passes = shared_passes(lanes, addresses, bytes) as u16;
        self.push(warp, Event { pc, lanes, detail: Detail::Shared { passes } });
    }

    /// `atom` or `red` on shared memory.
    pub fn shared_atomic(&mut self, warp: usize, pc: u32, lanes: u32, addresses: &LaneAddresses, bytes: u32) {
        let passes = atomic_passes(lanes, addresses, bytes) as u16;
        self.push(warp, Event { pc, lanes, detail: Detail::Shared { passes } });
    }

    /// An access of `bytes` per lane to global or constant memory, including atomics.
    pub fn global(&mut self, warp: usize, pc: u32, lanes: u32, addresses: &LaneAddresses, bytes: u32) {
        let footprint = CacheFootprint::of(lanes, addresses, bytes, self.reuse(warp));
        self.push(warp, Event { pc, lanes, detail: Detail::Cached(footprint) });
    }

    /// The accesses of a `wmma.load` or `wmma.store` to shared memory, as one event with the sum of their
    /// wavefronts.
    pub fn shared_parts<'a>(
        &mut self,
        warp: usize,
        pc: u32,
        lanes: u32,
        parts: impl Iterator<Item = AccessPart<'a>>,
    ) {
        let passes = parts.map(|p| shared_passes(p.lanes, p.addresses, p.bytes)).sum::<u32>() as u16;
        self.push(warp, Event { pc, lanes, detail: Detail::Shared { passes } });
    }

    /// Like [`Recorder::shared_parts`], for global memory.
    pub fn global_parts<'a>(
        &mut self,
        warp: usize,
        pc: u32,
        lanes: u32,
        parts: impl Iterator<Item = AccessPart<'a>>,
    ) {
        let stack = self.reuse(warp);
        let footprints = parts.map(|p| CacheFootprint::of(p.lanes, p.addresses, p.bytes, stack));
        let footprint = footprints.fold(CacheFootprint::default(), CacheFootprint::and);
        self.push(warp, Event { pc, lanes, detail: Detail::Cached(footprint) });
    }

    /// An access to local memory. `offsets` are each thread's own, counted from 0. The hardware interleaves
    /// the threads of a warp word by word, so that lanes with equal offsets share lines.
    pub fn local(&mut self, warp: usize, pc: u32, lanes: u32, offsets: &LaneAddresses, bytes: u32) {
        let footprint = CacheFootprint::of_local(warp, lanes, offsets, bytes, self.reuse(warp));
        self.push(warp, Event { pc, lanes, detail: Detail::Cached(footprint) });
    }

    /// `cp.async` of `bytes` per lane.
    pub fn copy(
        &mut self,
        warp: usize,
        pc: u32,
        lanes: u32,
        destination: &LaneAddresses,
        source: &LaneAddresses,
        bytes: u32,
    ) {
        let source = CacheFootprint::of(lanes, source, bytes, self.reuse(warp));
        let passes = shared_passes(lanes, destination, bytes).min(255) as u8;
        self.push(warp, Event { pc, lanes, detail: Detail::Copy { source, passes } });
    }

    /// A CTA barrier for `threads` threads.
    pub fn barrier(&mut self, warp: usize, pc: u32, lanes: u32, id: u8, kind: BarKind, threads: u16) {
        self.push(warp, Event { pc, lanes, detail: Detail::Barrier { id, kind, threads } });
    }

    /// The trace.
    pub fn finish(self) -> CtaTrace {
        self.finish_all().into_iter().next().unwrap_or_default()
    }

    /// The traces of the CTAs of the cluster.
    pub fn finish_all(self) -> Vec<CtaTrace> {
        self.traces
    }

    fn reuse(&mut self, warp: usize) -> &mut ReuseStack {
        let last = self.reuse.len() - 1;
        &mut self.reuse[(warp / self.warps).min(last)]
    }

    fn push(&mut self, warp: usize, event: Event) {
        let Some(trace) = self.traces.get_mut(warp / self.warps) else { return };
        match self.room {
            0 => trace.dropped += 1,
            _ => {
                self.room -= 1;
                trace.warps[warp % self.warps].push(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_takes_sixteen_bytes() {
        assert_eq!(size_of::<Event>(), 16);
    }

    #[test]
    fn samples_span_the_grid() {
        assert_eq!(sample_ctas(100, 4), [0, 33, 66, 99]);
        assert_eq!(sample_ctas(2, 4), [0, 1]);
        assert_eq!(sample_ctas(9, 1), [4]);
        assert!(sample_ctas(0, 4).is_empty());
        assert_eq!(sample_ctas(u64::MAX, 3), [0, u64::MAX / 2, u64::MAX - 1]);
    }

    /// The bytes that lanes announce together may exceed the range of the counter.
    #[test]
    fn parts_of_an_instruction_add_up_to_what_a_number_holds() {
        let mut recorder = Recorder::new(0, 1, 2);
        let at = MbarrierPlace::NONE;
        (0..2).for_each(|_| recorder.note(Detail::Arrive { at, count: 1, bytes: 1 << 31 }));
        recorder.issue(0, 0, !0);
        (0..2).for_each(|_| recorder.note(Detail::Bulk { at, bytes: 1 << 31, copies: 1 }));
        recorder.issue(0, 1, !0);
        let trace = recorder.finish();
        assert!(matches!(trace.warps[0][0].detail, Detail::Arrive { count: 2, bytes: u32::MAX, .. }));
        assert!(matches!(trace.warps[0][1].detail, Detail::Bulk { bytes: u32::MAX, .. }));
    }

    #[test]
    fn the_limit_drops_and_counts() {
        let mut recorder = Recorder::new(0, 1, 2);
        (0..5).for_each(|pc| recorder.issue(0, pc, !0));
        let trace = recorder.finish();
        assert_eq!((trace.warps[0].len(), trace.dropped, trace.issues()), (2, 3, 5));
    }
}
