//! The replay: simulates how one SM issues the scheduled runs of its CTAs.
//!
//! Each warp issues in order. An instruction issues when its registers are ready (scoreboard), its scheduler
//! has a free slot and its pipe is free. A warp whose load-store queue is full waits. A scheduler issues the
//! warp that can issue first; among several, the one that has waited longest. The wait before each issue is
//! charged to the last of these conditions to be met.

mod asynchronous;

use asynchronous::{Groups, Units};
use ptx::BarKind;

use super::cost::{PIPES, Pipe, TICK};
use super::lower::Action;
use super::machine::Gpu;
use super::memory::{At, MemorySystem, Residency};
use super::plan::Planned;
use super::prediction::Cause;
use super::schedule::{ScheduledRun, Step};
use emu::trace::{CacheFootprint, Detail, Event};

/// The result of the replay.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Tick of the last issue or result.
    pub end: u64,
    /// Warp ticks by [`Cause`].
    pub waits: Vec<u64>,
    /// Warp ticks by instruction: from the previous issue of the warp to the end of the instruction's own
    /// issue.
    pub stalls: Vec<u64>,
    /// Issue slots used.
    pub slots: u64,
    /// PTX instructions replayed.
    pub events: u64,
    /// Ticks for which pipes were busy, summed over the sub-partitions.
    pub pipes: [u64; PIPES],
    /// Ticks for which the load-store unit was busy with shared memory, and with the caches.
    pub unit: [u64; 2],
    /// Used fraction of the shares of L2 and DRAM, 0 to 1.
    pub bandwidth: (f64, f64),
    /// Sectors beyond L1, and sectors from DRAM.
    pub l2_sectors: u64,
    pub dram_sectors: u64,
    /// The part of `l2_sectors` that is local memory.
    pub local_sectors: u64,
    /// Operations of active lanes on the ordinary pipes, and on the tensor cores.
    pub flops: u64,
    pub tensor_flops: u64,
    /// Whether the kernel has warpgroup products, which reach the dense peak.
    pub dense: bool,
}

/// Replays `queue` (indices into `planned`) with `slots` CTAs at a time. It stops after `budget` events;
/// [`Outcome::events`] holds the number replayed.
pub(super) fn replay(
    gpu: &Gpu,
    layouts: &[ScheduledRun],
    registers: usize,
    planned: &[Planned],
    queue: &[usize],
    residency: Residency,
    budget: u64,
) -> Outcome {
    let mut sm = Sm::new(gpu, layouts, registers, planned, residency);
    sm.outcome.waits = vec![0; Cause::ALL.len()];
    sm.queue = queue.iter().rev().copied().collect();
    for slot in 0..(residency.ctas as usize).min(queue.len()) {
        sm.start_cta(slot, 0);
    }
    sm.run(budget);
    sm.finish()
}

/// The tick at which a register can be read, and the cause of waiting for it.
#[derive(Clone, Copy)]
struct Ready {
    at: u64,
    cause: Cause,
    /// The pipe that produces the value. An instruction on another pipe reads the value a clock later.
    pipe: Pipe,
    /// Ticks by which the value is available earlier as data: a predicate that a selection reads, not a
    /// guard.
    early: u64,
    /// The instruction that is waited for, which is charged with the wait; [`NO_PC`]: none.
    pc: u32,
}

const NO_PC: u32 = u32::MAX;
const NOW: Ready = Ready { at: 0, cause: Cause::Arithmetic, pipe: Pipe::None, early: 0, pc: NO_PC };

struct Warp {
    slot: usize,
    planned: usize,
    index: usize,
    scheduler: usize,
    run: usize,
    step: usize,
    /// The earliest tick at which the next instruction can issue by the warp's own conditions, and the cause
    /// of the wait.
    from: Ready,
    /// End of the last issue. Waits are counted from here.
    since: u64,
    /// The resources that the next instruction needs.
    next: Next,
    /// Sequence number of the last issue. The warp with the lowest number has waited longest.
    turn: u64,
    registers: Vec<Ready>,
    /// Completion times of the open cp.async group, and of the closed groups, oldest first.
    open_group: u64,
    groups: Vec<u64>,
    /// Groups of bulk stores, and of warpgroup products.
    stores: Groups,
    products: Groups,
    /// End of the last product of the open group.
    batch: Option<u64>,
    /// Phase of the cluster barrier in which the warp arrived.
    cluster_phase: u32,
    threads: u32,
}

/// The conditions of a warp's next instruction.
#[derive(Clone, Copy)]
struct Next {
    /// Registers and all other conditions within the warp.
    alone: Ready,
    pipe: Pipe,
    special: bool,
}

const NEXT: Next = Next { alone: NOW, pipe: Pipe::None, special: false };

#[derive(Default)]
struct BarrierState {
    arrived: u32,
    waiting: Vec<usize>,
}

struct Cta {
    live_warps: u32,
    live_threads: u32,
    barriers: Vec<BarrierState>,
    units: Units,
    warps: Vec<usize>,
}

/// A sub-partition.
#[derive(Clone, Default)]
struct Scheduler {
    /// Warps that do not wait for another warp.
    runnable: Vec<usize>,
    /// The tick and the warp of the next issue; `None` when they must be recomputed.
    choice: Option<(u64, usize)>,
    free: u64,
    pipes: [u64; PIPES],
}

struct Sm<'a> {
    gpu: &'a Gpu,
    layouts: &'a [ScheduledRun],
    planned: &'a [Planned<'a>],
    memory: MemorySystem<'a>,
    register_count: usize,
    queue: Vec<usize>,
    warps: Vec<Warp>,
    ctas: Vec<Option<Cta>>,
    schedulers: Vec<Scheduler>,
    turns: u64,
    /// Slots whose CTA has ended, and the tick at which it ended.
    vacant: Vec<(usize, u64)>,
    /// Register arrays of warps that have ended, for reuse.
    spare: Vec<Vec<Ready>>,
    outcome: Outcome,
}

impl<'a> Sm<'a> {
    fn new(
        gpu: &'a Gpu,
        layouts: &'a [ScheduledRun],
        register_count: usize,
        planned: &'a [Planned<'a>],
        residency: Residency,
    ) -> Sm<'a> {
        Sm {
            gpu,
            layouts,
            planned,
            memory: MemorySystem::new(gpu, residency),
            register_count,
            queue: Vec::new(),
            warps: Vec::new(),
            ctas: Vec::new(),
            schedulers: vec![Scheduler::default(); gpu.schedulers as usize],
            turns: 0,
            vacant: Vec::new(),
            spare: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    fn start_cta(&mut self, slot: usize, at: u64) {
        let Some(planned) = self.queue.pop() else { return };
        let count = self.planned[planned].runs.len();
        let mut cta = Cta {
            live_warps: 0,
            live_threads: 0,
            barriers: Vec::new(),
            units: Units::default(),
            warps: Vec::new(),
        };
        cta.barriers.resize_with(16, BarrierState::default);
        for index in 0..count {
            let threads = self.planned[planned].threads[index];
            let mut registers = self.spare.pop().unwrap_or_default();
            registers.clear();
            registers.resize(self.register_count, NOW);
            let id = self.warps.len();
            cta.live_warps += 1;
            cta.live_threads += threads;
            cta.warps.push(id);
            self.warps.push(Warp {
                slot,
                planned,
                index,
                scheduler: (slot * count + index) % self.schedulers.len(),
                run: 0,
                step: 0,
                from: Ready { at, cause: Cause::Branch, ..NOW },
                since: at,
                next: NEXT,
                turn: 0,
                registers,
                open_group: 0,
                groups: Vec::new(),
                stores: Groups::default(),
                products: Groups::default(),
                batch: None,
                cluster_phase: 0,
                threads,
            });
        }
        if self.ctas.len() <= slot {
            self.ctas.resize_with(slot + 1, || None);
        }
        let started = cta.warps.clone();
        self.ctas[slot] = Some(cta);
        started.into_iter().for_each(|id| self.resume(id));
    }

    fn run(&mut self, budget: u64) {
        while self.outcome.events < budget {
            while let Some((slot, at)) = self.vacant.pop() {
                self.start_cta(slot, at);
            }
            let choices = (0..self.schedulers.len()).filter_map(|s| Some((self.choose(s)?, s)));
            match choices.min() {
                Some(((at, warp), scheduler)) => self.issue(scheduler, warp, at),
                // Only warps at barriers remain, because the trace was cut before the other warps arrived.
                None if !self.release_stranded() && self.vacant.is_empty() => break,
                None => {}
            }
        }
    }

    /// The warp of a scheduler that can issue first, and the tick.
    fn choose(&mut self, scheduler: usize) -> Option<(u64, usize)> {
        let s = &mut self.schedulers[scheduler];
        if s.choice.is_none() {
            let first = s.runnable.iter().map(|id| {
                let warp = &self.warps[*id];
                (s.earliest(&warp.next).at, warp.turn, *id)
            });
            s.choice = first.min().map(|(at, _, id)| (at, id));
        }
        s.choice
    }

    /// Adds a warp to the runnable warps of its scheduler. A warp without further instructions exits.
    fn resume(&mut self, id: usize) {
        if self.prepare(id) {
            let scheduler = &mut self.schedulers[self.warps[id].scheduler];
            scheduler.runnable.push(id);
            scheduler.choice = None;
        } else {
            self.exit(id);
        }
    }

    /// Removes a warp from its scheduler.
    fn suspend(&mut self, id: usize) {
        let scheduler = &mut self.schedulers[self.warps[id].scheduler];
        scheduler.runnable.retain(|other| *other != id);
        scheduler.choice = None;
    }

    /// Finds the next instruction of a warp that needs an issue slot, and its conditions. Returns false when
    /// there is none.
    fn prepare(&mut self, id: usize) -> bool {
        loop {
            let warp = &self.warps[id];
            let Some(run) = self.planned[warp.planned].runs[warp.index].get(warp.run) else { return false };
            let layout = &self.layouts[run.layout as usize];
            let Some(step) = layout.steps.get(warp.step) else {
                let warp = &mut self.warps[id];
                warp.run += 1;
                warp.step = 0;
                continue;
            };
            if step.cost.slots == 0 {
                self.pass_through(id, layout, step);
                continue;
            }
            let operands = latest(&warp.registers, &layout.registers, step);
            let alone = if operands.at > warp.from.at { operands } else { warp.from };
            self.warps[id].next = Next { alone, pipe: step.cost.pipe, special: step.cost.mufu > 0 };
            return true;
        }
    }

    /// Handles an instruction that ptxas removes: its result is ready when its sources are.
    fn pass_through(&mut self, id: usize, layout: &ScheduledRun, step: &Step) {
        let warp = &mut self.warps[id];
        let ready = latest(&warp.registers, &layout.registers, step);
        for r in &layout.registers[step.writes.start as usize..step.writes.end as usize] {
            warp.registers[*r as usize] = ready;
        }
        warp.step += 1;
        self.outcome.events += 1;
    }

    /// Charges the time since the last issue: first the time until the warp itself was ready, then the rest.
    fn charge(&mut self, id: usize, at: u64, [alone, units]: [Ready; 2]) {
        let since = self.warps[id].since;
        let ready = alone.at.clamp(since, at.max(since));
        self.outcome.waits[alone.cause as usize] += ready - since;
        self.outcome.waits[units.cause as usize] += at.max(since) - ready;
    }

    fn issue(&mut self, scheduler: usize, id: usize, at: u64) {
        let warp = &self.warps[id];
        let planned = &self.planned[warp.planned];
        let run = planned.runs[warp.index][warp.run];
        let layout = &self.layouts[run.layout as usize];
        let step = &layout.steps[warp.step];
        let event = &planned.warps[warp.index][(run.event + step.event) as usize];
        let next = warp.next;
        let units = self.schedulers[scheduler].earliest(&next);
        let (since, pc) = (warp.since, event.pc);
        self.charge(id, at, [next.alone, units]);
        self.take_units(scheduler, step, at);
        self.count(step, event);
        let issued = at + u64::from(step.cost.slots) * TICK;
        self.outcome.waits[Cause::Issue as usize] += issued - at;
        let ready = next.alone.at.clamp(since, issued.max(since));
        let source = if next.alone.pc == NO_PC { pc } else { next.alone.pc };
        self.stall(source, ready - since);
        self.stall(pc, issued.saturating_sub(ready));
        self.outcome.end = self.outcome.end.max(issued);
        self.turns += 1;
        let warp = &mut self.warps[id];
        warp.step += 1;
        warp.since = issued;
        warp.turn = self.turns;
        warp.from = Ready { at: issued, cause: Cause::NotSelected, pc, ..NOW };
        match self.perform(id, step, event, at) {
            Effect::Result(ready) => {
                let ready = Ready { pc, ..ready };
                let queue = self.memory.admits(scheduler, id);
                let warp = &mut self.warps[id];
                for r in &layout.registers[step.writes.start as usize..step.writes.end as usize] {
                    warp.registers[*r as usize] = ready;
                }
                if queue > issued && uses_unit(step.action) {
                    let shared =
                        matches!(step.action, Action::Shared(_) | Action::Exchange | Action::Mbarrier);
                    let cause = if shared { Cause::SharedBandwidth } else { Cause::L1 };
                    warp.from = Ready { at: queue, cause, pc, ..NOW };
                }
            }
            Effect::Wait(from) => self.warps[id].from = Ready { pc, ..from },
            // Barriers determine which warps continue.
            Effect::Barrier => return,
        }
        if !self.prepare(id) {
            self.suspend(id);
            self.exit(id);
        }
    }

    /// Charges an instruction with ticks of a warp's time.
    fn stall(&mut self, pc: u32, ticks: u64) {
        let pc = pc as usize;
        if self.outcome.stalls.len() <= pc {
            self.outcome.stalls.resize(pc + 1, 0);
        }
        self.outcome.stalls[pc] += ticks;
    }

    /// Occupies the issue slot and the pipes of a step.
    fn take_units(&mut self, scheduler: usize, step: &Step, at: u64) {
        let (cost, s) = (&step.cost, &mut self.schedulers[scheduler]);
        s.choice = None;
        s.free = at + u64::from(cost.slots) * TICK;
        if cost.pipe != Pipe::None {
            s.pipes[cost.pipe as usize] = at + u64::from(cost.busy);
            self.outcome.pipes[cost.pipe as usize] += u64::from(cost.busy);
        }
        if cost.mufu > 0 {
            s.pipes[Pipe::Mufu as usize] = at + u64::from(cost.mufu);
            self.outcome.pipes[Pipe::Mufu as usize] += u64::from(cost.mufu);
        }
    }

    fn count(&mut self, step: &Step, event: &Event) {
        let lanes = u64::from(event.lanes.count_ones());
        self.outcome.slots += u64::from(step.cost.slots);
        self.outcome.events += 1;
        let flops = u64::from(step.cost.flops);
        match step.cost.pipe {
            _ if matches!(step.action, Action::Wgmma { .. }) => self.outcome.tensor_flops += 32 * flops,
            Pipe::Tensor => self.outcome.tensor_flops += 32 * flops,
            _ => self.outcome.flops += lanes * flops,
        }
    }

    /// Effects of a step besides occupying its slot and pipe.
    fn perform(&mut self, id: usize, step: &Step, event: &Event, at: u64) -> Effect {
        let after = |clocks: u32, cause| Ready { at: at + u64::from(clocks) * TICK, cause, ..NOW };
        let from = At { tick: at, port: self.warps[id].scheduler, warp: id };
        let answer = |a: super::memory::Answer| Effect::Result(Ready { at: a.done, cause: a.cause, ..NOW });
        match step.action {
            Action::Arithmetic => Effect::Result(Ready {
                pipe: step.cost.pipe,
                early: u64::from(step.cost.early) * TICK,
                ..after(step.cost.latency, latency_cause(step))
            }),
            Action::Exchange => answer(self.memory.exchange(from, step.cost.latency)),
            Action::Shared(direction) => answer(self.memory.shared(from, passes(event), direction)),
            Action::Cached(direction, how) => match event.detail {
                // A generic access that went to shared memory.
                Detail::Shared { passes } => answer(self.memory.shared(from, u64::from(passes), direction)),
                _ if event.lanes == 0 => Effect::Result(NOW),
                _ => answer(self.memory.cached(from, &footprint(event), direction, how)),
            },
            Action::Copy => {
                if event.lanes != 0 {
                    let copied = self.memory.copy(from, &footprint(event), passes(event));
                    let warp = &mut self.warps[id];
                    warp.open_group = warp.open_group.max(copied.done);
                }
                Effect::Result(NOW)
            }
            Action::Commit => {
                let warp = &mut self.warps[id];
                warp.groups.push(std::mem::take(&mut warp.open_group));
                Effect::Result(NOW)
            }
            Action::WaitGroups(allowed) => {
                let warp = &mut self.warps[id];
                let done = warp.groups.len().saturating_sub(allowed as usize);
                let last = warp.groups.drain(..done).max().unwrap_or(0);
                Effect::Wait(Ready { at: last.max(warp.from.at), cause: Cause::AsyncCopy, ..NOW })
            }
            Action::Fence => Effect::Wait(after(self.gpu.latency.alu, Cause::Arithmetic)),
            Action::Branch => Effect::Wait(after(self.gpu.latency.branch, Cause::Branch)),
            Action::Barrier(kind) => self.barrier(id, kind, event, at),
            _ => self.perform_beside(id, step, event, from),
        }
    }

    fn barrier(&mut self, id: usize, kind: BarKind, event: &Event, at: u64) -> Effect {
        let (number, threads) = match event.detail {
            Detail::Barrier { id, threads, .. } => (usize::from(id) % 16, u32::from(threads)),
            _ => (0, u32::MAX),
        };
        let slot = self.warps[id].slot;
        let Some(cta) = self.ctas[slot].as_mut() else { return Effect::Result(NOW) };
        let barrier = &mut cta.barriers[number];
        barrier.arrived += event.lanes.count_ones();
        let full = barrier.arrived >= threads.min(cta.live_threads);
        let waits = kind != BarKind::Arrive;
        if waits {
            barrier.waiting.push(id);
            self.suspend(id);
        }
        if full {
            self.release(slot, number, at);
        }
        if waits { Effect::Barrier } else { Effect::Result(NOW) }
    }

    /// Continues the warps that wait at a barrier.
    fn release(&mut self, slot: usize, number: usize, at: u64) {
        let Some(cta) = self.ctas[slot].as_mut() else { return };
        let state = std::mem::take(&mut cta.barriers[number]);
        let clocks = self.gpu.latency.barrier + self.gpu.latency.barrier_warp * state.arrived.div_ceil(32);
        for id in state.waiting {
            let from = Ready { at: at + u64::from(clocks) * TICK, cause: Cause::Barrier, ..NOW };
            // The barrier at which the warp waits is the instruction that it issued last.
            self.warps[id].from = Ready { pc: self.warps[id].from.pc, ..from };
            self.resume(id);
        }
    }

    /// Releases every barrier at which a warp waits. Returns whether there was one.
    fn release_stranded(&mut self) -> bool {
        let mut found = false;
        for slot in 0..self.ctas.len() {
            for number in 0..16 {
                let waiting = self.ctas[slot].as_ref().map(|c| &c.barriers[number].waiting);
                if let Some(last) = waiting.and_then(|w| w.iter().map(|id| self.warps[*id].since).max()) {
                    found = true;
                    self.release(slot, number, last);
                }
            }
            found |= self.release_asynchronous(slot);
        }
        found
    }

    fn exit(&mut self, id: usize) {
        let last = self.warps[id].from;
        self.charge(id, last.at, [last, NOW]);
        let warp = &mut self.warps[id];
        let (slot, threads) = (warp.slot, warp.threads);
        let done = last.at.max(warp.since);
        self.spare.push(std::mem::take(&mut warp.registers));
        self.outcome.end = self.outcome.end.max(done);
        let Some(cta) = self.ctas[slot].as_mut() else { return };
        cta.live_warps -= 1;
        cta.live_threads -= threads.min(cta.live_threads);
        if cta.live_warps == 0 {
            self.ctas[slot] = None;
            self.vacant.push((slot, done));
            return;
        }
        // Barriers do not wait for exited warps.
        let live = cta.live_threads;
        let complete: Vec<usize> = (0..16)
            .filter(|n| !cta.barriers[*n].waiting.is_empty() && cta.barriers[*n].arrived >= live)
            .collect();
        complete.into_iter().for_each(|number| self.release(slot, number, done));
        self.complete_cluster(slot, done);
    }

    fn finish(mut self) -> Outcome {
        self.outcome.end = self.outcome.end.max(self.memory.drained());
        self.outcome.unit = self.memory.unit_busy;
        self.outcome.bandwidth = self.memory.bandwidth_use(self.outcome.end);
        self.outcome.l2_sectors = self.memory.l2_traffic;
        self.outcome.dram_sectors = self.memory.dram_traffic;
        self.outcome.local_sectors = self.memory.local_traffic;
        self.outcome
    }
}

impl Scheduler {
    /// The tick at which an instruction can issue here, and the unit that determines it.
    fn earliest(&self, next: &Next) -> Ready {
        let mut ready = Ready { at: next.alone.at, cause: Cause::NotSelected, ..NOW };
        let mut wait_for = |free: u64, cause: Cause| {
            if free > ready.at {
                ready = Ready { at: free, cause, ..NOW };
            }
        };
        wait_for(self.free, Cause::NotSelected);
        wait_for(self.pipes[next.pipe as usize], pipe_cause(next.pipe));
        if next.special {
            wait_for(self.pipes[Pipe::Mufu as usize], Cause::Mufu);
        }
        ready
    }
}

/// Whether an action uses the load-store unit.
fn uses_unit(action: Action) -> bool {
    use Action as A;
    matches!(action, A::Shared(_) | A::Exchange | A::Cached(..) | A::Copy | A::Mbarrier)
}

enum Effect {
    /// The warp continues; its result is ready then.
    Result(Ready),
    /// The warp cannot issue before then.
    Wait(Ready),
    /// The warp waited for other warps, and may already continue.
    Barrier,
}

/// The tick at which all sources of a step can be read.
fn latest(registers: &[Ready], names: &[u32], step: &Step) -> Ready {
    let mut latest = NOW;
    for r in &names[step.reads.start as usize..step.reads.end as usize] {
        let ready = seen_by(step, registers[*r as usize]);
        if ready.at > latest.at {
            latest = ready;
        }
    }
    latest
}

/// A value as a step can read it. From the f32 or the integer pipe to another pipe or unit, it takes a clock
/// more than within the pipe. Source: the row "iadd lop3 chain" and ptxas's stall counts.
fn seen_by(step: &Step, value: Ready) -> Ready {
    let leaves = matches!(value.pipe, Pipe::Fma | Pipe::Alu) && step.cost.pipe != value.pipe;
    let across = if leaves && step.cost.slots > 0 && value.early == 0 { TICK } else { 0 };
    let early = if step.selects { value.early } else { 0 };
    Ready { at: (value.at + across).saturating_sub(early), ..value }
}

fn passes(event: &Event) -> u64 {
    match event.detail {
        Detail::Shared { passes } => u64::from(passes),
        Detail::Copy { passes, .. } => u64::from(passes),
        _ => 1,
    }
}

fn footprint(event: &Event) -> CacheFootprint {
    match event.detail {
        Detail::Cached(f) => f,
        Detail::Copy { source, .. } => source,
        _ => CacheFootprint { sectors: 1, lines: 1, fresh: 0, reuse: 0 },
    }
}

fn pipe_cause(pipe: Pipe) -> Cause {
    match pipe {
        Pipe::None => Cause::NotSelected,
        Pipe::Fma => Cause::FmaPipe,
        Pipe::Alu => Cause::AluPipe,
        Pipe::Half => Cause::HalfPipe,
        Pipe::Double => Cause::DoublePipe,
        Pipe::Mufu => Cause::Mufu,
        Pipe::Tensor => Cause::TensorPipe,
    }
}

fn latency_cause(step: &Step) -> Cause {
    match step.cost.pipe {
        Pipe::Tensor => Cause::TensorLatency,
        _ if step.cost.mufu > 0 || step.cost.pipe == Pipe::Mufu => Cause::Mufu,
        _ => Cause::Arithmetic,
    }
}
