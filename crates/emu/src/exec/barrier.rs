//! Executes the CTA barriers `bar` and `barrier`.

use ptx::{BarKind, Op};

use super::Env;
use super::run::{Flow, Part};
use super::units::{Joined, Wake, reduction};
use super::warp::{Split, State, Warp};
use crate::decode::Inst;
use crate::report::HazardKind;

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
        if let Some(recorder) = &mut self.log.recorder {
            let threads = count.unwrap_or(32 * self.facts.actors.warps as u32) as u16;
            recorder.barrier(warp.index, inst.number, lanes, id as u8, kind, threads);
            parts[1..].iter().for_each(|p| recorder.issue(warp.index, p.inst.number, p.lanes));
        }
        self.log.counters.barriers += 1;
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
        // "If no thread count is specified, all threads in the CTA participate" (PTX ISA, "bar, barrier").
        let threads = |n: Option<u32>| n.unwrap_or(32 * self.facts.actors.warps as u32);
        if let Some((first, _, line)) = self.barriers.first_arrival(at)
            && threads(first) != threads(count)
        {
            let thread = self.thread(warp, lane);
            let all = |n: Option<u32>| n.map_or("all".into(), |n: u32| n.to_string());
            self.log.findings.report(HazardKind::BarrierDivergence, inst.line, Some(line), || {
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
        let Some((_, _, line)) =
            self.barriers.first_arrival(at).filter(|(_, first, _)| *first != reduction(kind))
        else {
            return;
        };
        let (id, thread) = (at % 16, self.thread(warp, lane));
        self.log.findings.report(HazardKind::BarrierDivergence, inst.line, Some(line), || {
            let message = format!("warps use barrier {id} with different operations in one phase");
            (vec![thread], None, message)
        });
    }

    fn arrive(&mut self, warp: &mut Warp, parts: &[Part], kind: BarKind, at: usize, count: Option<u32>) {
        let home = warp.view.home();
        for Part { inst, lanes } in parts {
            let clock = warp.view.release(*lanes);
            let carried = warp.fences.sequential(&warp.view, *lanes);
            let votes = inst.s[2]
                .is_some()
                .then(|| (warp.registers.get_pred(inst.s[2], inst.negated, 2) & lanes, *lanes));
            let joined = Joined { clock, carried, kind, count, line: inst.line, votes };
            self.barriers.join(at, home, joined);
        }
        self.barriers.arrive(at, warp.index, kind, &self.live);
    }

    /// Continues a split that waited at a barrier.
    pub(super) fn leave_barrier(&mut self, warp: &mut Warp, at: usize, wake: &Wake) {
        let ((clock, carried), tally) = (&*wake.release, wake.tally);
        let split = &mut warp.splits[at];
        let inst = &self.facts.context.program.code[split.pc as usize];
        split.pc += 1;
        split.state = State::Run;
        split.polls = 0;
        let mask = split.mask;
        warp.view.acquire(mask, warp.live, clock);
        if mask & warp.live == warp.live {
            warp.view.merged();
        }
        warp.fences.inherit(&warp.view, mask, carried);
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

fn all_ones(condition: bool) -> u32 {
    if condition { !0 } else { 0 }
}
