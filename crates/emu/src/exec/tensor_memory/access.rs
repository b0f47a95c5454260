//! Checks accesses to tensor memory: that the columns are allocated, that the accesses are ordered, and that
//! what is read was written.

use std::ops::Range;

use super::super::Env;
use super::super::units::{CELL_LANES, TensorMemory, Touched};
use super::super::warp::Warp;
use crate::decode::Inst;
use crate::order::{Access, Actor, Conflict, Strength, TensorPipe, Touch, Verdict, WarpView};
use crate::report::HazardKind;

/// An instruction of tensor memory that a thread, or a warp, issues.
pub(super) struct Issue<'i> {
    pub inst: &'i Inst,
    pub warp: usize,
    pub lane: usize,
    pub pipe: TensorPipe,
    pub view: WarpView,
}

/// Lanes and columns of a CTA's tensor memory.
#[derive(Clone, Debug)]
pub(super) struct Area {
    pub rank: usize,
    pub lanes: Range<usize>,
    pub columns: Range<usize>,
}

impl Env<'_> {
    /// The issue of a product or copy by a lane.
    pub(super) fn issue_of<'i>(&self, warp: &Warp, inst: &'i Inst, lane: usize) -> Issue<'i> {
        let pipe = TensorPipe::Product;
        let view = warp.view.as_issuer(lane, self.tensors.queues[warp.index].epoch(pipe));
        Issue { inst, warp: warp.index, lane, pipe, view }
    }

    /// The issue of a load or store by a warp.
    pub(super) fn issue_together<'i>(&self, warp: &Warp, inst: &'i Inst, pipe: TensorPipe) -> Issue<'i> {
        let lane = warp.live.trailing_zeros() as usize;
        Issue { inst, warp: warp.index, lane, pipe, view: warp.view.together(warp.live) }
    }

    /// The access of an issue.
    pub(super) fn tensor_access<'a>(&self, issue: &'a Issue) -> Access<'a> {
        Access {
            view: &issue.view,
            actor: self.facts.actors.tensor(issue.warp, issue.pipe),
            epoch: self.tensors.queues[issue.warp].epoch(issue.pipe),
            proxy: None,
            lanes: 1 << issue.lane,
            pc: issue.inst.pc,
            strength: Strength::Weak,
            width: 4,
            touch: Touch::Tensor,
        }
    }

    /// Checks a read or write. Returns whether the area is allocated.
    pub(super) fn touch_area(&mut self, issue: &Issue, area: &Area, writes: bool) -> bool {
        if area.lanes.end > 128 || !self.tensors.has(area.rank, &area.columns) {
            let (columns, lanes) = (area.columns.clone(), area.lanes.clone());
            self.report(HazardKind::TensorMemory, issue.inst, issue.warp, issue.lane, None, || {
                format!(
                    "accesses lanes {} to {} of columns {} to {} of tensor memory, which are not all allocated",
                    lanes.start,
                    lanes.end - 1,
                    columns.start,
                    columns.end - 1
                )
            });
            return false;
        }
        let access = self.tensor_access(issue);
        let groups = area.lanes.start / CELL_LANES..area.lanes.end.div_ceil(CELL_LANES);
        for group in groups {
            for column in area.columns.clone() {
                self.touch_cell(issue, &access, (area.rank, group, column), writes);
            }
        }
        true
    }

    fn touch_cell(
        &mut self,
        issue: &Issue,
        access: &Access,
        (rank, group, column): (usize, usize, usize),
        writes: bool,
    ) {
        let time = self.tensors.tick();
        let cell = self.tensors.cell(rank, group, column);
        let before = *cell;
        let touched = Touched { warp: issue.warp, time, pc: issue.inst.pc };
        if writes {
            (cell.write, cell.written) = (touched, true);
        } else {
            cell.read = touched;
        }
        let (lane, checks) = (group * CELL_LANES, self.facts.context.options.checks);
        if !writes && !before.written && checks.uninitialised {
            self.report(HazardKind::UninitialisedRead, issue.inst, issue.warp, issue.lane, None, || {
                format!("reads lane {lane}, column {column} of tensor memory, which was never written")
            });
        }
        if !checks.races {
            return;
        }
        let (offset, bytes) =
            (TensorMemory::shadow_offset(rank, group, column), TensorMemory::shadow_bytes());
        let conflict = if writes {
            self.tensors.shadow.write(offset, bytes, access).map(|(conflict, _)| conflict)
        } else {
            match self.tensors.shadow.read(offset, bytes, access) {
                Verdict::Conflict(conflict) => Some(conflict),
                Verdict::Fine | Verdict::Uninitialised => None,
            }
        };
        if let Some(conflict) = conflict {
            return self.report_tensor_conflict(issue, &conflict, (lane, column), writes);
        }
        self.check_thread_fences(issue, before.write, (lane, column));
        if writes {
            self.check_thread_fences(issue, before.read, (lane, column));
        }
    }

    /// Checks that `tcgen05.fence`s stand between the accesses of two threads, or between a product and what
    /// follows the wait for its commit (PTX ISA, "Canonical synchronization patterns"). ptxas turns the
    /// fences into nothing, so that a GPU shows no difference where an acquire and a release order the
    /// accesses; the finding is one by the letter of the ISA.
    fn check_thread_fences(&mut self, issue: &Issue, other: Touched, (lane, column): (usize, usize)) {
        let code = &self.facts.context.program.code;
        let of_product = |pc: u32| !is_move(&code[pc as usize]);
        let apart = other.warp != issue.warp || of_product(other.pc) && (issue.pipe != TensorPipe::Product);
        if other.time == 0 || !apart {
            return;
        }
        let before = self.tensors.queues[other.warp].before > other.time;
        let after = self.tensors.queues[issue.warp].after > other.time;
        if before && after {
            return;
        }
        let missing = if before { "fence::after_thread_sync" } else { "fence::before_thread_sync" };
        let threads = vec![self.thread(issue.warp, issue.lane), self.thread(other.warp, 0)];
        let other_line = Some(self.line(other.pc));
        self.log.findings.report(HazardKind::MissingTensorFence, issue.inst.line, other_line, || {
            let message = format!(
                "accesses lane {lane}, column {column} of tensor memory after a synchronisation without \
                 tcgen05.{missing}"
            );
            (threads, None, message)
        });
    }

    pub(super) fn report_tensor_conflict(
        &mut self,
        issue: &Issue,
        c: &Conflict,
        (lane, column): (usize, usize),
        writes: bool,
    ) {
        let verb = if writes { "writes" } else { "reads" };
        let place = format!("lane {lane}, column {column} of tensor memory");
        let (kind, message) = match self.unwaited(c) {
            Some(wait) => (
                HazardKind::AsyncNotWaited,
                format!(
                    "{verb} {place} while an earlier instruction may still {} it: no {wait} covers that",
                    if c.wrote { "write" } else { "read" }
                ),
            ),
            None => {
                let earlier = if c.wrote { "wrote" } else { "read" };
                let message = format!("{verb} {place}, which another thread {earlier}, without ordering");
                (HazardKind::Race, message)
            }
        };
        let threads = vec![self.thread(issue.warp, issue.lane), self.thread_of(c.agent, c.lane)];
        let other_line = Some(self.line(c.pc));
        self.log.findings.report(kind, issue.inst.line, other_line, || (threads, None, message));
    }

    /// Names the access that must wait, if the earlier one is an instruction of tensor memory for which no
    /// thread has waited, as far as is known.
    pub(in crate::exec) fn unwaited(&self, c: &Conflict) -> Option<&'static str> {
        let (Touch::Tensor, Actor::Tensor(warp)) = (c.touch, self.facts.actors.name(c.agent)) else {
            return None;
        };
        let local = c.agent.wrapping_sub(self.facts.home()) as usize;
        let queue = &self.tensors.queues[warp];
        let in_flight = |pipe| c.epoch >= queue.epoch(pipe);
        let is = |pipe| local == self.facts.actors.tensor(warp, pipe);
        match () {
            () if is(TensorPipe::Product) => Some("wait on the mbarrier of a tcgen05.commit"),
            () if is(TensorPipe::Load) && in_flight(TensorPipe::Load) => Some("tcgen05.wait::ld"),
            () if is(TensorPipe::Store) && in_flight(TensorPipe::Store) => Some("tcgen05.wait::st"),
            () => None,
        }
    }
}

/// Whether an instruction moves data between tensor memory and registers.
fn is_move(inst: &Inst) -> bool {
    matches!(inst.op, ptx::Op::Tcgen05Ld(_) | ptx::Op::Tcgen05St(_))
}
