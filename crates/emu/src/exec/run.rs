//! Runs one turn of a warp: fetches instructions, evaluates guards and executes.

use ptx::{FenceSem, GridDependency, Op, ProxyFence};

use super::Env;
use super::warp::{Split, State, Warp};
use crate::EmuError;
use crate::decode::Inst;
use crate::order::ProxySpace;

/// The effect of an instruction on the flow of control.
pub(super) enum Flow {
    /// Continue with the next instruction.
    Next,
    /// The instruction has set the split's `pc`.
    Jump,
    /// Continue with the next instruction after other warps have run: only they can change the value that
    /// this split reads.
    Yield,
    /// The instruction could not be executed yet. Execute it again after other warps have run.
    Retry,
    /// The instruction could not be executed yet. Wait for the lanes or warps given by the state.
    Wait(State),
    /// The instruction was executed, and the split waits until a barrier releases it.
    Hold(State),
    /// Some lanes branch elsewhere. The new split contains them; the present split keeps the other lanes.
    Part(Split),
    /// Some lanes must execute the instruction separately, in the new split. Nothing was executed yet; the
    /// present split keeps the other lanes.
    Again(Split),
    /// The split has no lanes left.
    Gone,
}

/// The participating lanes at one instruction.
#[derive(Clone, Copy)]
pub(super) struct Part<'i> {
    pub inst: &'i Inst,
    pub lanes: u32,
}

impl Env<'_> {
    /// Retries the instruction after other warps have run.
    pub(super) fn retry(&mut self, split: &mut Split) -> Flow {
        split.polls += 1;
        Flow::Retry
    }

    /// Runs a warp for at most `quantum` instructions, or until none of its lanes can continue.
    pub fn run_warp(&mut self, warp: &mut Warp, mut quantum: u32) -> Result<(), EmuError> {
        while quantum > 0 {
            let Some(at) = warp.splits.iter().rposition(|s| s.state == State::Run) else { break };
            let split = warp.splits.remove(at);
            self.run_split(warp, split, &mut quantum);
        }
        if let Some(error) = self.log.stopped.take() {
            return Err(error);
        }
        if self.log.steps + self.tolls() > self.facts.context.options.step_limit {
            let line = warp.splits.first().map_or(0, |s| self.line(s.pc));
            return Err(EmuError::StepLimit {
                cta: self.facts.ctas[self.rank(warp)],
                steps: self.log.steps,
                line,
            });
        }
        self.facts.context.options.stopwatch.as_ref().map_or(Ok(()), |stopwatch| stopwatch.check())
    }

    fn run_split(&mut self, warp: &mut Warp, mut split: Split, quantum: &mut u32) {
        let program = self.facts.context.program;
        loop {
            if split.pc == split.meet && warp.at_meeting(&split) {
                match warp.park(split) {
                    Some(joined) => split = joined,
                    None => return,
                }
                continue;
            }
            if *quantum == 0 {
                // The split moves to the front of the list, so that the other splits of the warp run first.
                warp.splits.insert(0, split);
                return;
            }
            *quantum -= 1;
            let inst = &program.code[split.pc as usize];
            let mask = match inst.guard {
                None => split.mask,
                Some((slot, negated)) => {
                    let value = warp.registers.pred[usize::from(slot)];
                    split.mask & if negated { !value } else { value }
                }
            };
            if let Some(watch) = inst.watched
                && self.facts.context.options.checks.uninitialised
            {
                self.watch(warp, inst, &program.watches[watch as usize], split.mask, mask);
            }
            if mask == 0 {
                self.count(warp, split.pc as usize, inst, 0);
                split.pc += 1;
                continue;
            }
            if mask != split.mask && parts(&inst.op) {
                let rest = split_off(warp, &mut split, mask);
                warp.splits.push(rest);
            }
            if let Some(touches) = inst.touches {
                self.touch_registers(warp, inst, &program.touches[touches as usize], mask);
            }
            let pc = split.pc as usize;
            let flow = self.execute(warp, &mut split, inst, mask);
            if !matches!(flow, Flow::Wait(_) | Flow::Again(_) | Flow::Retry) {
                self.count(warp, pc, inst, mask);
            }
            match flow {
                Flow::Next => split.pc += 1,
                Flow::Jump => {}
                Flow::Yield => {
                    split.pc += 1;
                    *quantum = 0;
                }
                Flow::Retry => *quantum = 0,
                Flow::Wait(state) => {
                    split.state = state;
                    warp.splits.push(split);
                    warp.join_waiting();
                    self.meet_apart(warp);
                    return;
                }
                Flow::Hold(state) => {
                    split.state = state;
                    warp.splits.push(split);
                    return;
                }
                Flow::Part(other) | Flow::Again(other) => warp.splits.push(other),
                Flow::Gone => return,
            }
        }
    }

    #[inline(always)]
    pub(super) fn count(&mut self, warp: &mut Warp, index: usize, inst: &Inst, mask: u32) {
        let counter = &mut self.log.counters.instructions[index];
        counter.issues += 1;
        counter.lanes += u64::from(mask.count_ones());
        self.log.counters.single_lane_issues += u64::from(mask & mask.wrapping_sub(1) == 0);
        warp.steps += 1;
        self.log.steps += 1;
        if let Some(recorder) = &mut self.log.recorder
            && (mask == 0 || !records_itself(&inst.op))
        {
            recorder.issue(warp.index, inst.number, mask);
        }
    }

    /// Executes an instruction for the lanes of `mask`, which is not empty.
    #[inline(always)]
    fn execute(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        match inst.op {
            Op::Bra { .. } => return self.branch(warp, split, inst, mask),
            Op::BrxIdx { .. } => return self.indexed_branch(warp, split, inst),
            Op::Call { .. } => return self.call(warp, split, inst),
            Op::Ret { .. } => return self.ret(warp, split, inst),
            Op::Exit => return self.exit(warp, split, mask),
            Op::Trap => return self.trap(warp, split, inst, mask),
            Op::Bar { .. } => return self.bar(warp, split, inst),
            Op::BarrierCluster(_) => return self.cluster_barrier(warp, split, inst, mask),
            Op::BarWarpSync | Op::Shfl(_) | Op::Vote(_) | Op::Match(..) | Op::Redux { .. } | Op::Elect => {
                return self.collective(warp, split, inst, mask);
            }
            Op::Mma(_)
            | Op::Ldmatrix(_)
            | Op::Stmatrix(_)
            | Op::Movmatrix
            | Op::WmmaLoad(_)
            | Op::WmmaStore(_)
            | Op::Wmma(_) => {
                return self.matrix(warp, split, inst, mask);
            }
            Op::Ld(m) => return self.load(warp, split, inst, &m, mask),
            Op::St(m) => self.store(warp, split, inst, &m, mask),
            Op::Atom(a) | Op::Red(a) => return self.atomic(warp, split, inst, &a, mask),
            Op::CpAsync(c) => self.copy_async(warp, inst, &c, mask),
            Op::CpAsyncCommitGroup => warp.copies.commit(mask),
            Op::CpAsyncWaitGroup => self.wait_group(warp, inst, mask),
            Op::CpAsyncWaitAll => self.wait_all(warp, mask),
            Op::CpAsyncBulk(_)
            | Op::CpReduceAsyncBulk(_)
            | Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_) => self.bulk(warp, inst, mask),
            Op::TryCancel { multicast, .. } => self.try_cancel(warp, inst, multicast, mask),
            Op::QueryCancel(query) => self.query_cancel(warp, inst, query, mask),
            Op::StAsync(_) | Op::RedAsync(_) => self.store_async(warp, inst, mask),
            Op::CpAsyncBulkCommitGroup => warp.bulk.commit(mask),
            Op::CpAsyncBulkWaitGroup { read } => self.bulk_wait(warp, inst, read, mask),
            Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommitGroup | Op::WgmmaWaitGroup | Op::Setmaxnreg(_) => {
                return self.warpgroup(warp, split, inst, mask);
            }
            Op::Tcgen05Alloc { .. }
            | Op::Tcgen05Dealloc { .. }
            | Op::Tcgen05Relinquish { .. }
            | Op::Tcgen05Ld(_)
            | Op::Tcgen05St(_)
            | Op::Tcgen05Wait { .. }
            | Op::Tcgen05Fence { .. }
            | Op::Tcgen05Commit { .. }
            | Op::Tcgen05Cp { .. }
            | Op::Tcgen05Mma(_) => return self.tensor(warp, split, inst, mask),
            Op::FenceProxy(kind) => {
                let spaces: &[ProxySpace] = match kind {
                    _ if !self.facts.context.program.asynchronous => &[],
                    ProxyFence::Alias => &[],
                    ProxyFence::Async => &[ProxySpace::Shared, ProxySpace::Global],
                    ProxyFence::AsyncGlobal => &[ProxySpace::Global],
                    // Fences of one direction count as fences of both, which is lenient.
                    ProxyFence::AsyncSharedCta
                    | ProxyFence::AsyncSharedCluster
                    | ProxyFence::AsyncAcquire
                    | ProxyFence::AsyncRelease => &[ProxySpace::Shared],
                };
                for &space in spaces {
                    warp.view.fence_proxy(mask, warp.live, space);
                }
            }
            Op::FenceTensormap(sem, _) => self.fence_map(warp, inst, sem, mask),
            Op::TensormapReplace { field, .. } => self.replace_field(warp, inst, field, mask),
            Op::TensormapCopy(_) => return self.copy_map(warp, split, inst, mask),
            Op::FenceMbarrierInit => self.fence_initialisations(warp, mask),
            Op::CpAsyncMbarrierArrive { noinc, .. } => self.copy_arrive(warp, inst, noinc, mask),
            Op::Mbarrier(m) => return self.mbarrier(warp, split, inst, m, mask),
            Op::Membar(scope) => self.fence(warp, FenceSem::Sc, scope, mask),
            Op::Fence(sem, scope, _) => self.fence(warp, sem, scope, mask),
            Op::Activemask => {
                let active = [mask; 32];
                warp.registers.set32(inst.d[0], mask, &active);
            }
            Op::Nanosleep => return Flow::Yield,
            Op::Pmevent => {
                if let Some(special) = &inst.special {
                    return self.execute_special(warp, split, inst, special, mask);
                }
            }
            Op::Prefetch(..)
            | Op::Discard(_)
            | Op::Brkpt
            | Op::CpAsyncBulkPrefetch { .. }
            | Op::CpAsyncBulkPrefetchTensor { .. } => {}
            // A dependent grid waits for the end of this grid in any case.
            Op::Griddepcontrol(GridDependency::LaunchDependents) => self.release_next_grid(warp, mask),
            Op::Griddepcontrol(GridDependency::Wait) => warp.view.wait_for_grid(mask, warp.live),
            Op::CreatePolicy(_) => warp.registers.set64(inst.d[0], mask, &[0; 32]),
            Op::Mov(ty) => self.mov(warp, inst, ty, mask),
            Op::Cvta { space, to_space, .. } => self.cvta(warp, inst, space, to_space, mask),
            Op::Mapa { space, .. } => self.mapa(warp, inst, space, mask),
            Op::Getctarank { .. } => self.getctarank(warp, inst, mask),
            Op::Isspacep(space) => self.isspacep(warp, inst, space, mask),
            _ => super::alu::execute(&mut warp.registers, inst, mask),
        }
        Flow::Next
    }
}

/// Whether lanes with a false guard must be split off before the instruction, because they continue while the
/// other lanes wait or branch elsewhere.
fn parts(op: &Op) -> bool {
    matches!(
        op,
        Op::Call { .. }
            | Op::Ret { .. }
            | Op::BrxIdx { .. }
            | Op::Bar { .. }
            | Op::BarrierCluster(_)
            | Op::BarWarpSync
            | Op::Shfl(_)
            | Op::Vote(_)
            | Op::Match(..)
            | Op::Redux { .. }
            | Op::Elect
            | Op::Mma(_)
            | Op::Ldmatrix(_)
            | Op::Stmatrix(_)
            | Op::Movmatrix
            | Op::WmmaLoad(_)
            | Op::WmmaStore(_)
            | Op::Wmma(_)
            | Op::Wgmma(_)
            | Op::WgmmaFence
            | Op::WgmmaCommitGroup
            | Op::WgmmaWaitGroup
            | Op::Setmaxnreg(_)
            | Op::Tcgen05Alloc { .. }
            | Op::Tcgen05Dealloc { .. }
            | Op::Tcgen05Relinquish { .. }
            | Op::Tcgen05Ld(_)
            | Op::Tcgen05St(_)
            | Op::Tcgen05Wait { .. }
            | Op::TensormapCopy(_)
    )
}

/// Splits off the lanes outside `mask`. They skip the instruction and wait behind it.
fn split_off(warp: &mut Warp, split: &mut Split, mask: u32) -> Split {
    warp.push_group(split, split.pc + 1);
    let mut rest = split.clone();
    rest.mask &= !mask;
    rest.pc += 1;
    split.mask = mask;
    rest
}

/// Whether an instruction writes its own events to the recorder.
fn records_itself(op: &Op) -> bool {
    matches!(
        op,
        Op::Ld(_)
            | Op::St(_)
            | Op::Atom(_)
            | Op::Red(_)
            | Op::Ldmatrix(_)
            | Op::Stmatrix(_)
            | Op::WmmaLoad(_)
            | Op::WmmaStore(_)
            | Op::CpAsync(_)
            | Op::Bar { .. }
    )
}
