//! Reports of two accesses that are not ordered.

use super::Env;
use crate::decode::Inst;
use crate::memory::RANK_SHIFT;
use crate::order::{Actor, Agent, Conflict, Touch};
use crate::report::{HazardKind, ThreadId};
use ptx::Space;

impl Env<'_> {
    /// The thread that a finding names for an agent.
    pub(super) fn thread_of(&self, agent: Agent, lane: u32) -> ThreadId {
        let total = self.facts.actors.total() as u32;
        let cluster = u64::from(agent / total);
        let warp = match self.facts.actors.name(agent) {
            Actor::Warp(warp) | Actor::Wgmma(warp) | Actor::Bulk(warp) | Actor::Tensor(warp) => warp,
            Actor::Mbarrier(_) => self.copies.sender((agent % total) as usize).unwrap_or(0),
        };
        let warps = self.facts.actors.warps;
        let cta = self.facts.context.cta(cluster, (warp / warps) as u64);
        ThreadId { cta, warp: (warp % warps) as u32, lane }
    }

    /// Whether the warps that issued an asynchronous read have not yet waited for it.
    fn reads_still(&self, c: &Conflict) -> bool {
        match (c.touch, self.facts.actors.name(c.agent)) {
            (Touch::Wgmma, Actor::Wgmma(warp)) => c.epoch > self.products.waited(warp),
            _ => false,
        }
    }

    /// Reports an access that is not ordered with an earlier one.
    pub(super) fn report_conflict(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        writes: bool,
        conflict: &Conflict,
        place: (Space, u64),
    ) {
        let copied =
            matches!(conflict.touch, Touch::Copy | Touch::CopyArrive | Touch::Bulk) && conflict.wrote;
        let source = matches!(conflict.touch, Touch::Copy | Touch::CopyArrive) && !conflict.wrote;
        let same_warpgroup = self.thread_of(conflict.agent, 0).cta == self.thread(warp, 0).cta
            && matches!(self.facts.actors.name(conflict.agent), Actor::Wgmma(w) if self.facts.actors.warpgroup(w) == self.facts.actors.warpgroup(warp));
        let kind = if conflict.unfenced {
            HazardKind::MissingProxyFence
        } else if (copied || source) && (conflict.in_flight || conflict.wrote && !writes)
            || conflict.touch == Touch::Wgmma && same_warpgroup
            || conflict.touch == Touch::Tensor
            || conflict.touch == Touch::Bulk
                && self.facts.actors.name(conflict.agent) == Actor::Bulk(warp)
                && conflict.lane == lane as u32
        {
            HazardKind::AsyncNotWaited
        } else {
            HazardKind::Race
        };
        let threads = vec![self.thread(warp, lane), self.thread_of(conflict.agent, conflict.lane)];
        let other_line = Some(self.line(conflict.pc));
        let message =
            describe(conflict, writes, self.facts.actors.name(conflict.agent), self.reads_still(conflict));
        let mut findings = std::mem::take(&mut self.log.findings);
        findings.report(kind, inst.line, other_line, || {
            (threads, Some(self.facts.place(place.0, place.1)), message)
        });
        self.log.findings = findings;
        debug_assert!(place.0 != Space::Shared || place.1 >> RANK_SHIFT < 16);
    }
}

fn describe(c: &Conflict, writes: bool, actor: Actor, still: bool) -> String {
    let verb = if writes { "writes" } else { "reads" };
    if c.unfenced {
        let earlier = if c.wrote { "wrote" } else { "read" };
        return format!(
            "the asynchronous proxy {verb} memory that a thread {earlier}, without a fence.proxy.async in \
             between"
        );
    }
    let copies = matches!(c.touch, Touch::Copy | Touch::CopyArrive);
    match (c.touch, c.in_flight, c.wrote) {
        (Touch::Mbarrier, _, true) => {
            format!("{verb} the memory of an mbarrier: before mbarrier.inval, only mbarrier instructions may")
        }
        (Touch::Mbarrier, _, false) => {
            format!("{verb} an mbarrier that another thread arrives at or waits for, without ordering")
        }
        (Touch::Bulk | Touch::Reduce, true, true) => {
            format!("{verb} memory that a bulk copy is still writing: no thread has waited on its mbarrier")
        }
        (Touch::Bulk | Touch::Reduce, _, true) => format!(
            "{verb} memory that a bulk copy wrote, but has not seen the phase of its mbarrier complete"
        ),
        (Touch::Bulk, _, false) if matches!(actor, Actor::Mbarrier(_)) => {
            format!(
                "{verb} memory that a bulk copy reads, but has not seen the phase of its mbarrier complete"
            )
        }
        (Touch::Bulk, _, false) => {
            format!("{verb} memory that a bulk copy reads: no cp.async.bulk.wait_group covers it")
        }
        (Touch::Wgmma, ..) if still => {
            format!("{verb} memory that a wgmma in flight reads: no wgmma.wait_group covers it")
        }
        (Touch::Tensor, ..) => format!(
            "{verb} memory that a tcgen05.mma or tcgen05.cp reads: no wait on the mbarrier of a tcgen05.commit \
             covers it"
        ),
        (Touch::Wgmma, ..) => format!("{verb} memory that a wgmma reads, without ordering"),
        (_, true, true) if copies => {
            format!("{verb} memory that an asynchronous copy is still writing: no wait_group covers it")
        }
        (_, true, false) if copies => {
            format!("{verb} memory that an asynchronous copy is still reading: no wait_group covers it")
        }
        (_, false, true) if copies && !writes => {
            "reads memory that another thread's asynchronous copy wrote: that thread waited for the copy, \
             but no barrier orders the read after the wait"
                .into()
        }
        (_, false, false) if copies => {
            format!("{verb} memory that an asynchronous copy reads, without ordering")
        }
        (_, _, true) => format!("{verb} memory that another thread wrote, without ordering"),
        (_, _, false) => format!("{verb} memory that another thread reads, without ordering"),
    }
}
