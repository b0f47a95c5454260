//! CTA barriers (PTX ISA, "bar, barrier"). Each CTA has sixteen of them. Arrivals are counted in warps.

use std::rc::Rc;

use ptx::{BarKind, Op};

use super::Env;
use super::collective::Part;
use super::run::Flow;
use super::warp::{Sequential, Split, State, Warp};
use crate::decode::Inst;
use crate::order::Clock;
use crate::report::HazardKind;

/// The counts of a reducing barrier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    count: u32,
    threads: u32,
}

/// The state of a barrier between two completions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barrier {
    /// Number of threads that the barrier waits for; `None` for all threads of the CTA.
    expected: Option<u32>,
    /// The reduction of the first arrival, if it has one.
    reduction: Option<BarKind>,
    /// The warps that arrived, once for each arrival.
    arrived: Vec<usize>,
    waiting: Vec<usize>,
    clock: Option<Clock>,
    carried: Sequential,
    tally: Tally,
    line: u32,
}

/// What a warp receives when a barrier releases it.
#[derive(Clone, Debug)]
pub(crate) struct Wake {
    pub warp: usize,
    /// Index of the barrier in the cluster.
    pub barrier: u8,
    release: Rc<(Clock, Sequential)>,
    tally: Tally,
}

/// The number and the thread count of the barrier, as a lane gives them.
pub(super) fn named(warp: &Warp, inst: &Inst, lane: usize) -> (u32, Option<u32>) {
    let count = inst.s[1].is_some().then(|| warp.registers.lane(inst.s[1], lane) as u32);
    (warp.registers.lane(inst.s[0], lane) as u32, count)
}

impl Env<'_> {
    pub(super) fn bar(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        if split.mask != warp.live && !split.forced {
            return Flow::Wait(State::Lanes(!0));
        }
        split.forced = false;
        self.meet_barrier(warp, &[Part { inst, lanes: split.mask }])
    }

    /// A warp arrives. It arrives only once, even if its lanes arrive by several instructions without
    /// `.aligned`.
    pub(super) fn meet_barrier(&mut self, warp: &mut Warp, parts: &[Part]) -> Flow {
        let Part { inst, lanes } = parts[0];
        let Op::Bar { kind, .. } = inst.op else { return Flow::Next };
        let lane = lanes.trailing_zeros() as usize;
        let (id, count) = named(warp, inst, lane);
        if id >= 16 {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                format!("barrier {id} does not exist: a CTA has barriers 0 to 15")
            });
            return Flow::Next;
        }
        let at = 16 * self.rank(warp) + id as usize;
        self.check_count(inst, warp.index, lane, at, count);
        self.check_reduction(inst, warp.index, lane, at, kind);
        if let Some(recorder) = &mut self.recorder {
            let threads = count.unwrap_or(32 * self.actors.warps as u32) as u16;
            recorder.barrier(warp.index, inst.number, lanes, id as u8, kind, threads);
            parts[1..].iter().for_each(|p| recorder.issue(warp.index, p.inst.number, p.lanes));
        }
        self.counters.barriers += 1;
        self.arrive(warp, parts, kind, at, count);
        if kind == BarKind::Arrive { Flow::Next } else { Flow::Hold(State::Barrier(at as u8)) }
    }

    fn check_count(&mut self, inst: &Inst, warp: usize, lane: usize, at: usize, count: Option<u32>) {
        let id = at % 16;
        if let Some(n) = count
            && (n % 32 != 0 || n == 0)
        {
            self.report(HazardKind::BarrierDivergence, inst, warp, lane, None, || {
                format!("barrier {id} counts {n} threads: the count must be a multiple of 32")
            });
        }
        let barrier = &self.barriers[at];
        // "If no thread count is specified, all threads in the CTA participate" (PTX ISA, "bar, barrier").
        let threads = |n: Option<u32>| n.unwrap_or(32 * self.actors.warps as u32);
        if !barrier.arrived.is_empty() && threads(barrier.expected) != threads(count) {
            let (first, line) = (barrier.expected, barrier.line);
            let thread = self.thread(warp, lane);
            let all = |n: Option<u32>| n.map_or("all".into(), |n: u32| n.to_string());
            self.findings.report(HazardKind::BarrierDivergence, inst.line, Some(line), || {
                let message = format!(
                    "warps use barrier {id} with different thread counts: {} and {}",
                    all(count),
                    all(first)
                );
                (vec![thread], None, message)
            });
        }
    }

    /// `barrier.red` must not be used with `barrier.sync` or `barrier.arrive` on the same active barrier (PTX
    /// ISA, "bar, barrier").
    fn check_reduction(&mut self, inst: &Inst, warp: usize, lane: usize, at: usize, kind: BarKind) {
        let barrier = &self.barriers[at];
        if barrier.arrived.is_empty() || barrier.reduction == reduction(kind) {
            return;
        }
        let (id, line, thread) = (at % 16, barrier.line, self.thread(warp, lane));
        self.findings.report(HazardKind::BarrierDivergence, inst.line, Some(line), || {
            let message = format!("warps use barrier {id} with different operations in one phase");
            (vec![thread], None, message)
        });
    }

    fn arrive(&mut self, warp: &mut Warp, parts: &[Part], kind: BarKind, id: usize, count: Option<u32>) {
        let home = warp.view.home();
        let barrier = &mut self.barriers[id];
        for Part { inst, lanes } in parts {
            let clock = warp.view.release(*lanes);
            match &mut barrier.clock {
                Some(known) => known.join(home, &clock),
                None => {
                    barrier.clock = Some(clock);
                    barrier.expected = count;
                    barrier.reduction = reduction(kind);
                    barrier.line = inst.line;
                }
            }
            barrier.carried.join(home, &warp.sequential(*lanes));
            if inst.s[2].is_some() {
                let votes = warp.registers.get_pred(inst.s[2], inst.negated, 2) & lanes;
                barrier.tally.count += votes.count_ones();
                barrier.tally.threads += lanes.count_ones();
            }
        }
        barrier.arrived.push(warp.index);
        if kind != BarKind::Arrive {
            barrier.waiting.push(warp.index);
        }
        self.complete(id);
    }

    /// Releases the waiting warps once all expected warps have arrived.
    fn complete(&mut self, id: usize) {
        let barrier = &self.barriers[id];
        let rank = id / 16;
        let full = match barrier.expected {
            Some(count) => 32 * barrier.arrived.len() as u32 >= count,
            None => (rank * self.actors.warps..(rank + 1) * self.actors.warps)
                .all(|w| self.live[w] == 0 || barrier.arrived.contains(&w)),
        };
        if barrier.arrived.is_empty() || !full {
            return;
        }
        let done = std::mem::take(&mut self.barriers[id]);
        let release = Rc::new((done.clock.unwrap_or_default(), done.carried));
        for warp in done.waiting {
            self.wakes.push(Wake {
                warp,
                barrier: id as u8,
                release: Rc::clone(&release),
                tally: done.tally,
            });
        }
    }

    /// Completes the barriers that wait for all threads of a CTA: they do not wait for threads that have
    /// exited.
    pub(super) fn complete_barriers_after_exit(&mut self) {
        (0..self.barriers.len())
            .filter(|id| self.barriers[*id].expected.is_none())
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|id| {
                if !self.barriers[id].arrived.is_empty() {
                    self.complete(id);
                }
            });
    }

    /// The number of threads that have arrived at a barrier, and the number that it waits for.
    pub(super) fn attendance(&self, barrier: u8) -> (usize, u32) {
        let barrier = &self.barriers[usize::from(barrier)];
        (32 * barrier.arrived.len(), barrier.expected.unwrap_or(32 * self.actors.warps as u32))
    }

    /// Whether a warp has arrived at a barrier since the barrier last completed.
    pub(super) fn has_arrived(&self, barrier: u8, warp: usize) -> bool {
        self.barriers[usize::from(barrier)].arrived.contains(&warp)
    }

    /// Whether a barrier waits for a given number of threads, rather than for all threads of the CTA.
    pub(super) fn is_counted(&self, barrier: u8) -> bool {
        self.barriers[usize::from(barrier)].expected.is_some()
    }

    /// Continues a split that waited at a barrier.
    pub(super) fn leave_barrier(&mut self, warp: &mut Warp, at: usize, wake: &Wake) {
        let ((clock, carried), tally) = (&*wake.release, wake.tally);
        let split = &mut warp.splits[at];
        let inst = &self.context.program.code[split.pc as usize];
        split.pc += 1;
        split.state = State::Run;
        split.polls = 0;
        let mask = split.mask;
        warp.view.acquire(mask, warp.live, clock);
        if mask & warp.live == warp.live {
            warp.view.merged();
        }
        warp.inherit(mask, carried);
        let Op::Bar { kind, .. } = inst.op else { return };
        match kind {
            BarKind::Sync | BarKind::Arrive => {}
            BarKind::RedPopc => warp.registers.set32(inst.d[0], mask, &[tally.count; 32]),
            BarKind::RedAnd => {
                warp.registers.set_pred(inst.d[0], mask, all_ones(tally.count == tally.threads))
            }
            BarKind::RedOr => warp.registers.set_pred(inst.d[0], mask, all_ones(tally.count > 0)),
        }
    }
}

/// The reduction of a barrier. Barriers without one may be mixed.
fn reduction(kind: BarKind) -> Option<BarKind> {
    (!matches!(kind, BarKind::Sync | BarKind::Arrive)).then_some(kind)
}

fn all_ones(condition: bool) -> u32 {
    if condition { !0 } else { 0 }
}
