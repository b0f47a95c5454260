//! Clusters (PTX ISA, "Cluster of Cooperative Thread Arrays"): the CTAs of a cluster, addresses in the shared
//! memory of other CTAs, and the cluster barrier.

use ptx::{ClusterBarrier, Dim3, MemSem, Op, Space, SpecialReg};
use smallvec::SmallVec;

use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, State, Warp};
use super::{Context, Env};
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, SHARED_BASE, resolve, window};
use crate::order::{Actors, Clock, Epoch, Strength};
use crate::report::HazardKind;

impl Context<'_> {
    /// The number of CTAs of a cluster.
    pub fn ranks(&self) -> u64 {
        self.launch.cluster.count()
    }

    fn clusters(&self) -> [u64; 3] {
        let Dim3(gx, gy, gz) = self.launch.grid;
        let Dim3(cx, cy, cz) = self.launch.cluster;
        [gx / cx, gy / cy, gz / cz].map(u64::from)
    }

    /// Linear index of the CTA with rank `rank` in a cluster.
    pub fn cta(&self, cluster: u64, rank: u64) -> u64 {
        let (at, within) = (split(cluster, self.clusters()), split(rank, extents(self.launch.cluster)));
        let size = extents(self.launch.cluster);
        let [x, y, z] = [0, 1, 2].map(|i| at[i] * size[i] + within[i]);
        let [gx, gy, _] = extents(self.launch.grid);
        x + gx * (y + gy * z)
    }

    /// Linear index of the cluster of a CTA.
    pub fn cluster_of(&self, cta: u64) -> u64 {
        let (at, size) = (split(cta, extents(self.launch.grid)), extents(self.launch.cluster));
        let [x, y, z] = [0, 1, 2].map(|i| at[i] / size[i]);
        let [nx, ny, _] = self.clusters();
        x + nx * (y + ny * z)
    }
}

fn extents(d: Dim3) -> [u64; 3] {
    [d.0, d.1, d.2].map(u64::from)
}

fn split(index: u64, [x, y, _]: [u64; 3]) -> [u64; 3] {
    [index % x, index / x % y, index / x / y]
}

/// The barrier between the CTAs of a cluster.
#[derive(Debug, Default)]
pub(crate) struct ClusterRendezvous {
    /// Number of completed phases.
    phase: u64,
    /// Number of threads that have arrived in this phase and have not exited.
    arrived: u32,
    clock: Option<Clock>,
    /// Accesses that the threads of the last phase released.
    released: Clock,
    line: u32,
}

/// The state of a warp at the cluster barrier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attendance {
    /// Lanes that have arrived and have not waited yet, and the phase in which they arrived.
    lanes: u32,
    phase: u64,
    /// Lanes that arrived in an earlier phase, before other lanes of the warp waited and arrived again.
    before: u32,
}

impl Attendance {
    /// Whether lanes of `live` have not arrived.
    pub fn absent(self, live: u32) -> bool {
        live & !self.lanes != 0
    }

    /// Removes lanes that have waited or that exit.
    fn leave(&mut self, lanes: u32) {
        self.lanes &= !lanes;
        self.before &= !lanes;
    }
}

/// Accesses of lanes of a warp to the shared memory of another CTA.
#[derive(Clone, Copy, Debug)]
struct Visit {
    /// The actor and the epoch that the other CTA must know before it exits.
    actor: usize,
    epoch: Epoch,
    lanes: u32,
    pc: u32,
}

/// Accesses to the shared memory of other CTAs. A CTA must not exit before the accesses to its shared memory
/// (PTX ISA, "mapa"; CUDA C++ Programming Guide, "Distributed Shared Memory").
#[derive(Debug)]
pub(crate) struct Visits {
    /// For each CTA and each warp of the cluster, the last accesses of the warp's lanes to the CTA's shared
    /// memory. A lane has at most one for each actor.
    last: Vec<Vec<SmallVec<[Visit; 1]>>>,
    /// The accesses that the warps of each CTA knew to have happened when they exited.
    exits: Vec<Clock>,
}

impl Visits {
    pub fn new(actors: Actors) -> Visits {
        let ctas = if actors.ctas > 1 { actors.ctas } else { 0 };
        Visits {
            last: vec![vec![SmallVec::new(); actors.threads()]; ctas],
            exits: vec![Clock::new(actors.total()); ctas],
        }
    }

    /// Records the access of a lane of a warp to the shared memory of the CTA of rank `rank`. Whatever comes
    /// after the lane's new access comes after its earlier ones.
    fn note(&mut self, rank: usize, warp: usize, new: Visit) {
        let last = &mut self.last[rank][warp];
        let together = |v: &Visit| (v.actor, v.epoch, v.pc) == (new.actor, new.epoch, new.pc);
        let place = last.iter().position(together);
        if place.is_some() && last.len() == 1 {
            last[0].lanes |= new.lanes;
            return;
        }
        last.iter_mut().filter(|v| v.actor == new.actor).for_each(|v| v.lanes &= !new.lanes);
        match place {
            Some(at) => last[at].lanes |= new.lanes,
            None => last.push(new),
        }
        last.retain(|v| v.lanes != 0);
    }
}

impl Env<'_> {
    /// Records that a warp accesses the shared memory of another CTA.
    pub(super) fn visit(&mut self, warp: &Warp, inst: &Inst, lane: usize, rank: usize, address: u64) {
        // The write of an asynchronous store is ordered by its mbarrier, not by the thread that issued it.
        let sent = matches!(
            inst.op,
            Op::StAsync(_)
                | Op::RedAsync(_)
                | Op::CpAsyncBulk(_)
                | Op::CpReduceAsyncBulk(_)
                | Op::CpAsyncBulkTensor(_)
        );
        if !sent {
            // A relaxed arrival does not release itself. A wait for its phase comes after it.
            let arrival = matches!(inst.op, Op::Mbarrier(m) if m.op.arrives() && m.sem == MemSem::Relaxed);
            let phase = if arrival { self.mbarriers.actor(address) } else { None };
            let (actor, epoch) = phase.unwrap_or((warp.index, warp.view.now()));
            self.visits.note(rank, warp.index, Visit { actor, epoch, lanes: 1 << lane, pc: inst.pc });
        }
        let warps = rank * self.actors.warps..(rank + 1) * self.actors.warps;
        if self.live[warps].iter().all(|lanes| *lanes == 0) {
            self.report(HazardKind::Race, inst, warp.index, lane, Some((Space::Shared, address)), || {
                format!("accesses the shared memory of the CTA of rank {rank}, which has exited")
            });
        }
    }

    /// Handles the exit of lanes. When the last lanes of a CTA exit, all accesses of other CTAs to its shared
    /// memory must have happened before.
    pub(super) fn leave_cluster(&mut self, warp: &mut Warp, lanes: u32) {
        let (rank, home) = (self.rank(warp), warp.view.home());
        self.withdraw(warp, lanes);
        if self.actors.ctas > 1 {
            let clock = warp.view.release(lanes);
            self.visits.exits[rank].join(home, &clock);
        }
        let warps = rank * self.actors.warps..(rank + 1) * self.actors.warps;
        if self.live[warps].iter().any(|lanes| *lanes != 0) || !self.context.options.checks.races {
            return;
        }
        self.check_flights_of(rank);
        if self.actors.ctas == 1 {
            return;
        }
        for other in 0..self.actors.threads() {
            for Visit { actor, epoch, lanes, pc } in std::mem::take(&mut self.visits.last[rank][other]) {
                let left = self.visits.exits[rank].unknown(home, home + actor as u32, lanes, epoch);
                if left == 0 {
                    continue;
                }
                let threads =
                    vec![self.thread(other, left.trailing_zeros() as usize), self.thread(warp.index, 0)];
                self.findings.report(HazardKind::Race, self.line(pc), None, || {
                    let message =
                        "accesses the shared memory of another CTA, and the access is not ordered before that CTA's exit";
                    (threads, None, message.into())
                });
            }
        }
    }

    /// The rank of a warp's CTA.
    pub(super) fn rank(&self, warp: &Warp) -> usize {
        warp.index / self.actors.warps
    }

    /// The address that belongs to an offset in the shared memory of the whole cluster.
    pub(super) fn shared_address(&self, offset: usize) -> u64 {
        let (rank, inside) = ((offset / self.span) as u64, (offset % self.span) as u64);
        (rank << RANK_SHIFT) + SHARED_BASE + inside
    }

    pub(super) fn special(&self, special: SpecialReg, warp: usize, lane: usize) -> u64 {
        use SpecialReg as S;
        let Dim3(bx, by, bz) = self.context.launch.block;
        let [cx, cy, cz] = extents(self.context.launch.cluster);
        let [gx, gy, gz] = extents(self.context.launch.grid);
        let rank = (warp / self.actors.warps) as u64;
        let (warp, cta) = (warp % self.actors.warps, self.ctas[rank as usize]);
        let thread = (32 * warp + lane) as u32;
        let below = (1u64 << lane) - 1;
        let (at, within) = (split(cta, [gx, gy, gz]), split(rank, [cx, cy, cz]));
        let value = match special {
            S::TidX => thread % bx,
            S::TidY => thread / bx % by,
            S::TidZ => thread / bx / by,
            S::NtidX => bx,
            S::NtidY => by,
            S::NtidZ => bz,
            S::CtaidX => at[0] as u32,
            S::CtaidY => at[1] as u32,
            S::CtaidZ => at[2] as u32,
            S::NctaidX => gx as u32,
            S::NctaidY => gy as u32,
            S::NctaidZ => gz as u32,
            S::ClusteridX => (at[0] / cx) as u32,
            S::ClusteridY => (at[1] / cy) as u32,
            S::ClusteridZ => (at[2] / cz) as u32,
            S::NclusteridX => (gx / cx) as u32,
            S::NclusteridY => (gy / cy) as u32,
            S::NclusteridZ => (gz / cz) as u32,
            S::ClusterCtaidX => within[0] as u32,
            S::ClusterCtaidY => within[1] as u32,
            S::ClusterCtaidZ => within[2] as u32,
            S::ClusterNctaidX => cx as u32,
            S::ClusterNctaidY => cy as u32,
            S::ClusterNctaidZ => cz as u32,
            S::ClusterCtarank => rank as u32,
            S::ClusterNctarank => self.ctas.len() as u32,
            S::Envreg1 => (self.context.program.workspace >> 32) as u32,
            S::Envreg2 => self.context.program.workspace as u32,
            S::IsExplicitCluster => u32::from(self.ctas.len() > 1),
            S::LaneId => lane as u32,
            S::WarpId => warp as u32,
            S::NwarpId => self.actors.warps as u32,
            S::LanemaskEq => 1 << lane,
            S::LanemaskLt => below as u32,
            S::LanemaskLe => (below << 1 | 1) as u32,
            S::LanemaskGt => !((below << 1 | 1) as u32),
            S::LanemaskGe => !(below as u32),
            S::DynamicSmemSize => self.context.launch.dynamic_shared,
            S::TotalSmemSize | S::AggrSmemSize => self.context.program.layout.shared_bytes,
            S::NsmId => 132,
            S::SmId => (cta % 132) as u32,
            _ => 0,
        };
        u64::from(value)
    }

    /// `mapa`: the corresponding address in the CTA with another rank.
    pub(super) fn mapa(&mut self, warp: &mut Warp, inst: &Inst, space: Space, mask: u32) {
        let ranks = warp.registers.get_any(inst.s[1]);
        let base = if space == Space::Generic { window(Space::Shared) } else { 0 };
        let mut addresses = warp.registers.get_any(inst.s[0]);
        for_lanes(mask, |lane| {
            let inside = addresses[lane].wrapping_sub(base) & ((1 << RANK_SHIFT) - 1);
            addresses[lane] = base + (ranks[lane] << RANK_SHIFT | inside);
            if ranks[lane] >= self.ctas.len() as u64 {
                let (rank, ctas) = (ranks[lane], self.ctas.len());
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                    format!("an address in the CTA of rank {rank}: the cluster has {ctas} CTAs")
                });
            }
        });
        warp.registers.set_any(inst.d[0], mask, &addresses);
    }

    pub(super) fn getctarank(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let rank = |a: u64| resolve(a).1 >> RANK_SHIFT & 0xff;
        let ranks = warp.registers.get_any(inst.s[0]).map(rank);
        warp.registers.set_any(inst.d[0], mask, &ranks);
    }

    pub(super) fn cluster_barrier(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        mask: u32,
    ) -> Flow {
        let Op::BarrierCluster(kind) = inst.op else { return Flow::Next };
        let aligned = matches!(
            kind,
            ClusterBarrier::Arrive { aligned: true, .. } | ClusterBarrier::Wait { aligned: true }
        );
        if aligned && mask != warp.live && !split.forced {
            return Flow::Wait(State::Lanes(!0));
        }
        split.forced = false;
        match kind {
            ClusterBarrier::Arrive { relaxed, .. } => {
                self.arrive_at_cluster(warp, inst, relaxed, mask);
                Flow::Next
            }
            ClusterBarrier::Wait { .. } => self.wait_for_cluster(warp, split, inst, mask),
        }
    }

    fn arrive_at_cluster(&mut self, warp: &mut Warp, inst: &Inst, relaxed: bool, mask: u32) {
        let Attendance { lanes, phase, before } = warp.attendance;
        let not_waited = (lanes | before) & mask;
        if not_waited != 0 {
            let lane = not_waited.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                "arrives at the cluster barrier again without a wait in between".into()
            });
            return;
        }
        let current = self.rendezvous.phase;
        warp.attendance = if phase == current {
            Attendance { lanes: lanes | mask, ..warp.attendance }
        } else {
            Attendance { lanes: mask, phase: current, before: before | lanes }
        };
        let clock = if relaxed {
            self.released_by_fences(warp, mask, Strength::Cluster)
        } else {
            warp.view.release(mask)
        };
        self.counters.cluster_barriers += 1;
        let rendezvous = &mut self.rendezvous;
        rendezvous.line = inst.line;
        rendezvous.arrived += mask.count_ones();
        match &mut rendezvous.clock {
            Some(known) => known.join(warp.view.home(), &clock),
            None => rendezvous.clock = Some(clock),
        }
        self.complete_cluster_barrier();
    }

    /// Removes exiting lanes from the lanes that have arrived, because the barrier does not wait for exited
    /// lanes. The accesses that these lanes released on arrival stay released.
    fn withdraw(&mut self, warp: &mut Warp, lanes: u32) {
        if warp.attendance.phase == self.rendezvous.phase {
            self.rendezvous.arrived -= (warp.attendance.lanes & lanes).count_ones();
        }
        warp.attendance.leave(lanes);
    }

    /// Completes the phase when all threads that have not exited have arrived.
    pub(super) fn complete_cluster_barrier(&mut self) {
        let expected: u32 = self.live.iter().map(|lanes| lanes.count_ones()).sum();
        let rendezvous = &mut self.rendezvous;
        if rendezvous.arrived > 0 && rendezvous.arrived >= expected {
            rendezvous.phase += 1;
            rendezvous.arrived = 0;
            rendezvous.released = rendezvous.clock.take().unwrap_or_default();
        }
    }

    fn wait_for_cluster(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        let Attendance { lanes, phase, before } = warp.attendance;
        let absent = mask & !(lanes | before);
        if absent != 0 {
            let lane = absent.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                "waits at the cluster barrier without an earlier arrival".into()
            });
            return Flow::Next;
        }
        if mask & lanes != 0 && self.rendezvous.phase == phase {
            return self.retry(split);
        }
        split.polls = 0;
        warp.attendance.leave(mask);
        warp.view.acquire(mask, warp.live, &self.rendezvous.released);
        Flow::Next
    }

    /// Describes the wait for the report of a deadlock.
    pub(super) fn describe_cluster_wait(&self) -> String {
        let expected: u32 = self.live.iter().map(|lanes| lanes.count_ones()).sum();
        let (arrived, line) = (self.rendezvous.arrived, self.rendezvous.line);
        format!(
            "for the cluster barrier, where {arrived} of {expected} threads have arrived, the last at line {line}"
        )
    }
}
