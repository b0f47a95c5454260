//! Executes branches, calls and exits.

use ptx::{Op, SpecialReg};

use super::Env;
use super::run::Flow;
use super::units::Definedness;
use super::warp::{Frame, SavedRegisters, Split, State, Warp};
use crate::decode::{Class, Inst, NOWHERE, Program, Slot, Transfer};
use crate::report::HazardKind;

/// Maximum depth of nested calls.
const MAX_DEPTH: usize = 256;

impl Env<'_> {
    pub(super) fn branch(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, taken: u32) -> Flow {
        if taken == split.mask {
            split.pc = inst.target;
            return Flow::Jump;
        }
        warp.push_group(split, inst.reconverge);
        let mut other = split.clone();
        other.mask = taken;
        other.pc = inst.target;
        split.mask &= !taken;
        split.pc += 1;
        // The seed of the schedule chooses which side runs first.
        if self.facts.context.options.seed & 1 == 1 {
            std::mem::swap(split, &mut other);
        }
        Flow::Part(other)
    }

    pub(super) fn indexed_branch(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        let first = split.mask.trailing_zeros() as usize;
        let indices = *warp.registers.get32(inst.s[0]);
        let same = (0..32).filter(|l| split.mask >> l & 1 == 1 && indices[*l] == indices[first]);
        let same = same.fold(0u32, |m, l| m | 1 << l);
        let targets = &self.facts.context.program.targets[inst.list.0 as usize..][..usize::from(inst.list.1)];
        if same != split.mask {
            warp.push_group(split, inst.reconverge);
            let mut other = split.clone();
            other.mask &= !same;
            split.mask = same;
            return Flow::Again(other);
        }
        match targets.get(indices[first] as usize) {
            Some(target) => split.pc = *target,
            None => {
                self.report(HazardKind::OutOfBounds, inst, warp.index, first, None, || {
                    format!("branch index {} is beyond a list of {} targets", indices[first], targets.len())
                });
                split.pc += 1;
            }
        }
        Flow::Jump
    }

    pub(super) fn call(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        let program = self.facts.context.program;
        let call = &program.calls[inst.target as usize];
        let callee = &program.functions[call.callee];
        let caller = split.function;
        let first = split.mask.trailing_zeros() as usize;
        if split.frames.len() >= MAX_DEPTH {
            let lane = first;
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                format!("`{}` is called {MAX_DEPTH} deep: the stack overflows", callee.name)
            });
            return self.exit(warp, split, split.mask);
        }
        warp.push_group(split, split.pc + 1);
        let caller_frame = u64::from(program.functions[caller as usize].frame);
        let pointer = warp.registers.lane(program.frame_pointer, first) - crate::memory::LOCAL_BASE;
        let next_frame = (pointer + caller_frame) as usize;
        warp.local.grow(next_frame + callee.frame as usize);
        warp.local.forget(split.mask, next_frame, callee.frame as usize);
        let active = caller as usize == call.callee
            || split.frames.iter().any(|f| program.functions[f.caller as usize].start == callee.start);
        let saved = active.then(|| Box::new(save(warp, callee)));
        // Saving and restoring one register of 32 lanes takes about as long as a warp instruction.
        self.log.toll += saved.as_ref().map_or(0, |s| (s.w32.len() + 2 * s.w64.len()) as u64);
        let given: Vec<_> = call.arguments.iter().map(|t| read_transfer(program, warp, t, inst)).collect();
        warp.undefined.forget(&callee.suspects, split.mask);
        for (transfer, passed) in call.arguments.iter().zip(given) {
            match *transfer {
                Transfer::Register { to, .. } => write_slot(program, warp, to, split.mask, &passed),
                Transfer::Bytes { caller, callee, bytes } => {
                    copy_local(
                        warp,
                        split.mask,
                        pointer as usize + caller as usize,
                        next_frame + callee as usize,
                        bytes,
                    );
                }
            }
        }
        set_frame(warp, program.frame_pointer, split.mask, next_frame as u64);
        split.frames.push(Frame { return_pc: split.pc + 1, call: inst.target, caller, saved });
        split.function = call.callee as u32;
        split.pc = callee.start;
        // Points of reconvergence of the caller do not apply inside the callee. The call depth distinguishes
        // them.
        Flow::Jump
    }

    pub(super) fn ret(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        let program = self.facts.context.program;
        let Some(frame) = split.frames.pop() else { return self.exit(warp, split, split.mask) };
        let call = &program.calls[frame.call as usize];
        let callee = &program.functions[call.callee];
        let caller_frame = program.functions[frame.caller as usize].frame as usize;
        let first = split.mask.trailing_zeros() as usize;
        let pointer =
            (warp.registers.lane(program.frame_pointer, first) - crate::memory::LOCAL_BASE) as usize;
        let back = pointer - caller_frame;
        let results: Vec<_> = call.results.iter().map(|t| read_transfer(program, warp, t, inst)).collect();
        if let Some(saved) = &frame.saved {
            restore(warp, callee, saved, split.mask);
        }
        for (transfer, passed) in call.results.iter().zip(results) {
            match *transfer {
                Transfer::Register { to, .. } => write_slot(program, warp, to, split.mask, &passed),
                Transfer::Bytes { caller, callee, bytes } => {
                    copy_local(warp, split.mask, pointer + callee as usize, back + caller as usize, bytes);
                }
            }
        }
        set_frame(warp, program.frame_pointer, split.mask, back as u64);
        split.function = frame.caller;
        split.pc = frame.return_pc;
        Flow::Jump
    }

    pub(super) fn exit(&mut self, warp: &mut Warp, split: &mut Split, lanes: u32) -> Flow {
        self.check_left(warp, split, lanes);
        split.mask &= !lanes;
        self.live[warp.index] &= !lanes;
        self.leave_bulk(warp, lanes);
        self.leave_cluster(warp, lanes);
        warp.leave(lanes);
        self.leave_wgmma(warp, &self.facts.context.program.code[split.pc as usize]);
        self.leave_tensor_memory(warp);
        warp.join_waiting();
        self.meet_apart(warp);
        self.barriers.complete_after_exit(&self.live);
        self.complete_cluster_barrier();
        if split.mask == 0 { Flow::Gone } else { Flow::Next }
    }

    pub(super) fn trap(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        let lane = mask.trailing_zeros() as usize;
        let context = self.facts.context;
        let of_grid =
            |(_, special): &(Slot, SpecialReg)| matches!(special, SpecialReg::Envreg1 | SpecialReg::Envreg2);
        let barrier = !context.options.cooperative && context.program.specials.iter().any(of_grid);
        self.report(HazardKind::Trap, inst, warp.index, lane, None, || {
            if barrier {
                "the kernel traps: it asks for the workspace of a grid barrier (grid.sync), and the launch is not \
                 cooperative"
                    .into()
            } else {
                "the kernel traps".into()
            }
        });
        self.exit(warp, split, mask)
    }

    /// Called when nothing in the cluster can run. Lanes that wait for other lanes of their warp then proceed
    /// without them, which is a finding.
    pub(super) fn force(&mut self, warp: &mut Warp) -> bool {
        let waiting = |s: &Split| matches!(s.state, State::Lanes(_));
        let Some(first) = warp.splits.iter().position(waiting) else { return false };
        self.report_divergence(warp, first);
        for split in warp.splits.iter_mut().filter(|s| waiting(s)) {
            split.forced = true;
            split.state = State::Run;
        }
        true
    }

    /// Called when lanes exit. Lanes of their warp that wait for them at a warp-wide instruction then
    /// continue. This is correct after an early return. It is a finding if the exiting lanes had run past
    /// that instruction: all threads of a warp must execute an `.aligned` barrier, and all threads of a
    /// member mask the instruction that names it (PTX ISA, "bar, barrier" and "shfl.sync").
    fn check_left(&mut self, warp: &Warp, split: &Split, lanes: u32) {
        if split.ran_on == NOWHERE || self.returns_at_once(split.ran_on) {
            return;
        }
        let code = &self.facts.context.program.code;
        for other in &warp.splits {
            let State::Lanes(members) = other.state else { continue };
            let inst = &code[other.pc as usize];
            let missing = members & lanes;
            if missing == 0 || matches!(inst.op, Op::Bar { aligned: false, .. }) {
                continue;
            }
            let threads = [other.mask, missing].map(|m| self.thread(warp.index, m.trailing_zeros() as usize));
            let (mask, line) = (other.mask, self.line(split.ran_on));
            self.log.findings.report(HazardKind::BarrierDivergence, inst.line, Some(line), || {
                let message = format!(
                    "lanes {mask:#010x} of the warp wait for lanes {missing:#010x}, which went past to line \
                     {line} and ran on to their end"
                );
                (threads.to_vec(), None, message)
            });
        }
    }

    /// Whether lanes at this instruction of the entry do nothing but return.
    fn returns_at_once(&self, mut pc: u32) -> bool {
        for _ in 0..8 {
            match self.facts.context.program.code.get(pc as usize) {
                Some(Inst { op: Op::Ret { .. } | Op::Exit, guard: None, .. }) => return true,
                Some(Inst { op: Op::Bra { .. }, guard: None, target, .. }) => pc = *target,
                _ => return false,
            }
        }
        false
    }

    fn report_divergence(&mut self, warp: &Warp, at: usize) {
        let split = &warp.splits[at];
        let inst = &self.facts.context.program.code[split.pc as usize];
        let State::Lanes(need) = split.state else { return };
        let missing = need & warp.live & !split.mask;
        let others: Vec<String> = warp
            .splits
            .iter()
            .filter(|s| s.mask & missing != 0)
            .map(|s| format!("lanes {:#010x} are at line {}", s.mask & missing, self.line(s.pc)))
            .collect();
        let other = warp.splits.iter().find(|s| s.mask & missing != 0);
        let other_line = other.map(|s| self.line(s.pc));
        let message = format!(
            "lanes {:#010x} of the warp wait for lanes {missing:#010x}: {}",
            split.mask,
            if others.is_empty() { "they never come".into() } else { others.join(", ") }
        );
        let mut threads = vec![self.thread(warp.index, split.mask.trailing_zeros() as usize)];
        threads.extend(other.map(|s| self.thread(warp.index, s.mask.trailing_zeros() as usize)));
        self.log
            .findings
            .report(HazardKind::BarrierDivergence, inst.line, other_line, || (threads, None, message));
    }
}

/// The values of a register that a call or a return passes, and which of them are undefined.
fn read_transfer(
    program: &Program,
    warp: &Warp,
    transfer: &Transfer,
    inst: &Inst,
) -> ([u64; 32], Definedness) {
    match *transfer {
        Transfer::Register { from, .. } => {
            let (bytes, origin) =
                program.suspect(from).map_or_else(Definedness::default, |s| warp.undefined.state(s));
            let values = std::array::from_fn(|l| warp.registers.lane(from, l));
            (values, (bytes, origin.or(Some(inst.line))))
        }
        Transfer::Bytes { .. } => ([0; 32], Definedness::default()),
    }
}

fn write_slot(
    program: &Program,
    warp: &mut Warp,
    slot: Slot,
    mask: u32,
    (value, undefined): &([u64; 32], Definedness),
) {
    if let Some(suspect) = program.suspect(slot) {
        warp.undefined.set_state(suspect, mask, *undefined);
    }
    if slot.class == Class::Pred {
        let bits = (0..32).fold(0, |set, l| set | (value[l] as u32 & 1) << l);
        warp.registers.set_pred(slot, mask, bits);
    } else {
        warp.registers.set_any(slot, mask, value);
    }
}

fn set_frame(warp: &mut Warp, slot: Slot, mask: u32, offset: u64) {
    warp.registers.set64(slot, mask, &[offset + crate::memory::LOCAL_BASE; 32]);
}

/// Copies bytes of local memory for some lanes. Unwritten bytes stay unwritten.
fn copy_local(warp: &mut Warp, mask: u32, from: usize, to: usize, bytes: u32) {
    super::registers::for_lanes(mask, |lane| {
        for byte in 0..bytes as usize {
            if warp.local.is_written(lane, from + byte, 1) {
                let value = warp.local.load(lane, from + byte, 1);
                warp.local.store(lane, to + byte, 1, &value);
            }
        }
    });
}

fn save(warp: &Warp, function: &crate::decode::FunctionInfo) -> SavedRegisters {
    let range = |(start, count): (u16, u16)| usize::from(start)..usize::from(start) + usize::from(count);
    SavedRegisters {
        w32: warp.registers.w32[range(function.w32)].to_vec(),
        w64: warp.registers.w64[range(function.w64)].to_vec(),
        pred: warp.registers.pred[range(function.pred)].to_vec(),
        undefined: function.suspects.iter().map(|s| warp.undefined.state(*s)).collect(),
    }
}

fn restore(warp: &mut Warp, function: &crate::decode::FunctionInfo, saved: &SavedRegisters, mask: u32) {
    for (i, value) in saved.w32.iter().enumerate() {
        warp.registers.set32(Slot { class: Class::W32, index: function.w32.0 + i as u16 }, mask, value);
    }
    for (i, value) in saved.w64.iter().enumerate() {
        warp.registers.set64(Slot { class: Class::W64, index: function.w64.0 + i as u16 }, mask, value);
    }
    for (i, value) in saved.pred.iter().enumerate() {
        warp.registers.set_pred(Slot { class: Class::Pred, index: function.pred.0 + i as u16 }, mask, *value);
    }
    for (suspect, state) in function.suspects.iter().zip(&saved.undefined) {
        warp.undefined.set_state(*suspect, mask, *state);
    }
}
