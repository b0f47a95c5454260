//! Executes the instructions of clusters (PTX ISA, "Cluster of Cooperative Thread Arrays"): addresses in the
//! shared memory of other CTAs, and the cluster barrier.

use ptx::{ClusterBarrier, MemSem, Op, Space};

use super::Env;
use super::registers::for_lanes;
use super::run::Flow;
use super::units::Visit;
use super::warp::{Split, State, Warp};
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, resolve, window};
use crate::order::Strength;
use crate::report::HazardKind;

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
                | Op::TryCancel { .. }
        );
        if !sent {
            // A relaxed arrival does not release itself. A wait for its phase comes after it.
            let arrival = matches!(inst.op, Op::Mbarrier(m) if m.op.arrives() && m.sem == MemSem::Relaxed);
            let phase = if arrival { self.mbarriers.actor(address) } else { None };
            let (actor, epoch) = phase.unwrap_or((warp.index, warp.view.now()));
            self.visits.note(rank, warp.index, Visit { actor, epoch, lanes: 1 << lane, pc: inst.pc });
        }
        let warps = self.facts.warps_of(rank);
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
        self.rendezvous.withdraw(&mut warp.attendance, lanes);
        if self.facts.actors.ctas > 1 {
            let clock = warp.view.release(lanes);
            self.visits.exit(rank, home, &clock);
        }
        let warps = self.facts.warps_of(rank);
        if self.live[warps].iter().any(|lanes| *lanes != 0) || !self.facts.context.options.checks.races {
            return;
        }
        self.check_flights_of(rank);
        if self.facts.actors.ctas == 1 {
            return;
        }
        for (other, left, pc) in self.visits.unknown_at_exit(rank, home) {
            let threads =
                vec![self.thread(other, left.trailing_zeros() as usize), self.thread(warp.index, 0)];
            self.log.findings.report(HazardKind::Race, self.line(pc), None, || {
                let message = "accesses the shared memory of another CTA, and the access is not ordered before that CTA's exit";
                (threads, None, message.into())
            });
        }
    }

    /// `mapa`: the corresponding address in the CTA with another rank.
    pub(super) fn mapa(&mut self, warp: &mut Warp, inst: &Inst, space: Space, mask: u32) {
        let ranks = warp.registers.get_any(inst.s[1]);
        let base = if space == Space::Generic { window(Space::Shared) } else { 0 };
        let mut addresses = warp.registers.get_any(inst.s[0]);
        for_lanes(mask, |lane| {
            let inside = addresses[lane].wrapping_sub(base) & ((1 << RANK_SHIFT) - 1);
            addresses[lane] = base + (ranks[lane] << RANK_SHIFT | inside);
            if ranks[lane] >= self.facts.ctas.len() as u64 {
                let (rank, ctas) = (ranks[lane], self.facts.ctas.len());
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
        let not_waited = warp.attendance.not_waited() & mask;
        if not_waited != 0 {
            let lane = not_waited.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                "arrives at the cluster barrier again without a wait in between".into()
            });
            return;
        }
        warp.attendance.arrive(mask, self.rendezvous.phase());
        let clock = if relaxed {
            warp.fences.released_to(&mut warp.view, mask, Strength::Cluster)
        } else {
            warp.view.release(mask)
        };
        self.log.counters.cluster_barriers += 1;
        self.rendezvous.arrive(warp.view.home(), clock, mask, inst.line);
        self.complete_cluster_barrier();
    }

    fn wait_for_cluster(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        let absent = mask & !warp.attendance.not_waited();
        if absent != 0 {
            let lane = absent.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                "waits at the cluster barrier without an earlier arrival".into()
            });
            return Flow::Next;
        }
        if warp.attendance.waits(mask, self.rendezvous.phase()) {
            return self.retry(split);
        }
        split.polls = 0;
        warp.attendance.leave(mask);
        warp.view.acquire(mask, warp.live, self.rendezvous.released());
        Flow::Next
    }

    /// Completes the phase of the cluster barrier when all threads that have not exited have arrived.
    pub(super) fn complete_cluster_barrier(&mut self) {
        let expected = self.live_threads();
        self.rendezvous.complete(expected);
    }

    /// The threads of the cluster that have not exited.
    pub(super) fn live_threads(&self) -> u32 {
        self.live.iter().map(|lanes| lanes.count_ones()).sum()
    }
}
