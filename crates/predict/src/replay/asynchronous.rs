//! Models the asynchronous units of sm_90a: warpgroup products, bulk copies, and the mbarriers and cluster
//! barriers that order them.
//!
//! One CTA of a cluster represents the others: data that it sends to another CTA is treated as if that CTA
//! had sent the same data here.

use std::collections::HashMap;

use super::{Action, At, Effect, NOW, Pipe, Ready, Sm, Step};
use crate::cost::TICK;
use crate::lower::Direction;
use crate::prediction::Cause;
use emu::trace::{Detail, Event, MbarrierPlace};

/// Groups of asynchronous work of a warp: the completion times of the open group and of the closed groups,
/// oldest first.
#[derive(Default)]
pub(super) struct Groups {
    open: u64,
    closed: Vec<u64>,
}

impl Groups {
    pub(super) fn add(&mut self, done: u64) {
        self.open = self.open.max(done);
    }

    pub(super) fn commit(&mut self) {
        self.closed.push(std::mem::take(&mut self.open));
    }

    /// The tick at which at most `allowed` closed groups are left.
    pub(super) fn wait(&mut self, allowed: u32) -> u64 {
        let due = self.closed.len().saturating_sub(allowed as usize);
        self.closed.drain(..due).max().unwrap_or(0)
    }
}

/// The state of an mbarrier.
#[derive(Default)]
struct Mbarrier {
    expected: i64,
    pending: i64,
    bytes: i64,
    /// Parity of the current phase.
    odd: bool,
    /// The time of the latest arrival of this phase, and the completion time of the last phase.
    latest: u64,
    completed: u64,
    /// The waiting warps, and the parity that each waits for.
    waiting: Vec<(usize, bool)>,
}

/// Asynchronous state of a CTA.
#[derive(Default)]
pub(super) struct Units {
    mbarriers: HashMap<MbarrierPlace, Mbarrier>,
    cluster: ClusterBarrier,
}

#[derive(Default)]
struct ClusterBarrier {
    arrived: u32,
    phase: u32,
    completed: u64,
    waiting: Vec<usize>,
}

/// An arrival at an mbarrier.
#[derive(Default)]
struct Arrival {
    count: u32,
    announced: u32,
    landed: u64,
    at: u64,
}

impl Arrival {
    fn of_bytes(landed: u64, at: u64) -> Arrival {
        Arrival { landed, at, ..Arrival::default() }
    }
}

impl Sm<'_> {
    /// Executes the part of a step that an asynchronous unit performs, or a wait for such a unit.
    pub(super) fn perform_beside(&mut self, id: usize, step: &Step, event: &Event, from: At) -> Effect {
        match step.action {
            Action::Mbarrier => {
                let waits = matches!(event.detail, Detail::Wait { .. });
                let direction = if waits { Direction::Load } else { Direction::Atomic };
                let done = self.memory.shared(from, 1, direction).done;
                self.mbarrier(id, event.detail, done)
            }
            Action::Bulk | Action::ToCluster => self.bulk(id, step.action, event.detail, from.tick),
            Action::BulkCommit => {
                self.warps[id].stores.commit();
                Effect::Result(NOW)
            }
            Action::BulkWait(allowed) => {
                let warp = &mut self.warps[id];
                let at = warp.stores.wait(allowed).max(warp.from.at);
                Effect::Wait(Ready { at, cause: Cause::AsyncCopy, ..NOW })
            }
            Action::Wgmma { from_registers } => self.product(id, step, from.tick, from_registers),
            Action::WgmmaCommit => {
                let warp = &mut self.warps[id];
                warp.products.commit();
                warp.batch = None;
                Effect::Result(NOW)
            }
            Action::WgmmaWait(allowed) => self.wait_products(id, allowed),
            Action::ClusterArrive => {
                self.cluster_arrive(id, event.lanes.count_ones(), from.tick);
                Effect::Result(NOW)
            }
            Action::ClusterWait => self.cluster_wait(id),
            _ => Effect::Result(NOW),
        }
    }

    /// A bulk copy or a store to the cluster. Waiting warps are signalled when its last byte has arrived.
    fn bulk(&mut self, id: usize, action: Action, copy: Detail, at: u64) -> Effect {
        let Detail::Bulk { at: place, bytes, copies } = copy else { return Effect::Result(NOW) };
        let done = match action {
            Action::Bulk => self.memory.bulk(at, bytes),
            _ => self.memory.cluster_store(at, bytes),
        };
        let landed = u64::from(bytes) * u64::from(copies);
        match place {
            MbarrierPlace::NONE => self.warps[id].stores.add(done),
            _ => self.arrive(self.warps[id].slot, place, &Arrival::of_bytes(landed, done)),
        }
        Effect::Result(NOW)
    }

    /// A warp's part of a product, which queues for the tensor core of its sub-partition. Products of one
    /// group run one after another, and no product of another warp runs between them. A product with A in
    /// registers blocks the warp until A is read.
    fn product(&mut self, id: usize, step: &Step, at: u64, from_registers: bool) -> Effect {
        let rest = if self.warps[id].batch.is_none() { self.rest_of_group(id) } else { 0 };
        let warp = &mut self.warps[id];
        let pipe = &mut self.schedulers[warp.scheduler].pipes[Pipe::Tensor as usize];
        let start = at.max(warp.batch.unwrap_or(*pipe));
        let end = start + u64::from(step.cost.busy);
        *pipe = (end + rest).max(*pipe);
        warp.batch = Some(end);
        warp.products.add(end);
        self.outcome.pipes[Pipe::Tensor as usize] += u64::from(step.cost.busy);
        self.outcome.dense = true;
        let read = if from_registers { start } else { at };
        Effect::Wait(Ready { at: read.max(at + TICK), cause: Cause::TensorPipe, ..NOW })
    }

    /// Ticks of the products that the warp issues from here to the end of their group, within the block.
    fn rest_of_group(&self, id: usize) -> u64 {
        let warp = &self.warps[id];
        let run = self.planned[warp.planned].runs[warp.index][warp.run];
        let steps = &self.layouts[run.layout as usize].steps[warp.step..];
        let group = steps.iter().take_while(|s| s.action != Action::WgmmaCommit);
        group.filter(|s| matches!(s.action, Action::Wgmma { .. })).map(|s| u64::from(s.cost.busy)).sum()
    }

    fn wait_products(&mut self, id: usize, allowed: u32) -> Effect {
        let latency = u64::from(self.gpu.units.map_or(0, |u| u.wgmma_latency)) * TICK;
        let warp = &mut self.warps[id];
        let done = warp.products.wait(allowed);
        let at = if done == 0 { warp.from.at } else { warp.from.at.max(done + latency) };
        Effect::Wait(Ready { at, cause: Cause::TensorPipe, ..NOW })
    }

    /// Applies an operation on an mbarrier, which shared memory has performed by `at`.
    fn mbarrier(&mut self, id: usize, operation: Detail, at: u64) -> Effect {
        let slot = self.warps[id].slot;
        let result = Effect::Result(Ready { at, cause: Cause::SharedLatency, ..NOW });
        let Some(cta) = self.ctas[slot].as_mut() else { return result };
        match operation {
            Detail::Expect { at: place, count } => {
                let count = i64::from(count);
                let object = Mbarrier { expected: count, pending: count, ..Mbarrier::default() };
                cta.units.mbarriers.insert(place, object);
                result
            }
            Detail::Arrive { at: place, count, bytes } => {
                let arrival = Arrival { count: count.into(), announced: bytes, landed: 0, at };
                self.arrive(slot, place, &arrival);
                result
            }
            Detail::Wait { at: place, parity, .. } => {
                let object = cta.units.mbarriers.entry(place).or_default();
                if object.odd != parity {
                    let at = at.max(object.completed + u64::from(self.gpu.latency.shared) * TICK);
                    return Effect::Wait(Ready { at, cause: Cause::Mbarrier, ..NOW });
                }
                object.waiting.push((id, parity));
                self.suspend(id);
                Effect::Barrier
            }
            _ => result,
        }
    }

    /// Counts an arrival. If it completes the phase, the warps that wait for the phase continue.
    fn arrive(&mut self, slot: usize, place: MbarrierPlace, arrival: &Arrival) {
        let Some(cta) = self.ctas[slot].as_mut() else { return };
        let object = cta.units.mbarriers.entry(place).or_default();
        object.pending -= i64::from(arrival.count);
        object.bytes += i64::from(arrival.announced) - arrival.landed as i64;
        object.latest = object.latest.max(arrival.at);
        if object.pending > 0 || object.bytes != 0 {
            return;
        }
        object.completed = std::mem::take(&mut object.latest);
        object.pending = object.expected;
        object.odd = !object.odd;
        let (odd, completed) = (object.odd, object.completed);
        let (due, rest) = std::mem::take(&mut object.waiting).into_iter().partition(|w| w.1 != odd);
        object.waiting = rest;
        let at = completed + u64::from(self.gpu.latency.shared) * TICK;
        self.go_on(due, Ready { at, cause: Cause::Mbarrier, ..NOW });
    }

    fn go_on(&mut self, warps: Vec<(usize, bool)>, from: Ready) {
        for (id, _) in warps {
            self.warps[id].from = from;
            self.resume(id);
        }
    }

    fn cluster_arrive(&mut self, id: usize, lanes: u32, at: u64) {
        let slot = self.warps[id].slot;
        let Some(cta) = self.ctas[slot].as_mut() else { return };
        self.warps[id].cluster_phase = cta.units.cluster.phase;
        cta.units.cluster.arrived += lanes;
        self.complete_cluster(slot, at);
    }

    /// Completes the phase of the cluster barrier if all remaining threads of the CTA have arrived.
    pub(super) fn complete_cluster(&mut self, slot: usize, at: u64) {
        let latency = u64::from(self.gpu.units.map_or(0, |u| u.cluster_latency)) * TICK;
        let Some(cta) = self.ctas[slot].as_mut() else { return };
        let barrier = &mut cta.units.cluster;
        if barrier.arrived == 0 || barrier.arrived < cta.live_threads {
            return;
        }
        barrier.arrived = 0;
        barrier.phase += 1;
        barrier.completed = at + latency;
        let completed = barrier.completed;
        let due = std::mem::take(&mut barrier.waiting).into_iter().map(|id| (id, false)).collect();
        self.go_on(due, Ready { at: completed, cause: Cause::Cluster, ..NOW });
    }

    fn cluster_wait(&mut self, id: usize) -> Effect {
        let warp = &self.warps[id];
        let (slot, own) = (warp.slot, warp.cluster_phase);
        let now = warp.from.at;
        let Some(cta) = self.ctas[slot].as_mut() else { return Effect::Barrier };
        let barrier = &mut cta.units.cluster;
        if barrier.phase > own {
            let at = now.max(barrier.completed);
            return Effect::Wait(Ready { at, cause: Cause::Cluster, ..NOW });
        }
        barrier.waiting.push(id);
        self.suspend(id);
        Effect::Barrier
    }

    /// Continues every warp that waits for an mbarrier or the cluster barrier in this CTA. Returns whether
    /// there was one. This is needed if the trace was cut, or if the CTAs of the cluster differ.
    pub(super) fn release_asynchronous(&mut self, slot: usize) -> bool {
        let Some(cta) = self.ctas[slot].as_mut() else { return false };
        let mut due: Vec<(usize, bool)> = Vec::new();
        for object in cta.units.mbarriers.values_mut() {
            if !object.waiting.is_empty() {
                object.odd = !object.odd;
                (object.pending, object.bytes) = (object.expected, 0);
                due.append(&mut object.waiting);
            }
        }
        due.extend(std::mem::take(&mut cta.units.cluster.waiting).into_iter().map(|id| (id, false)));
        due.sort_unstable();
        let Some(at) = due.iter().map(|(id, _)| self.warps[*id].since).max() else { return false };
        self.go_on(due, Ready { at, cause: Cause::Mbarrier, ..NOW });
        true
    }
}
