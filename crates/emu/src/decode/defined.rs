//! Which registers are surely defined where they are read. Nearly all are, in nearly all kernels; only the others are
//! watched while the kernel runs, lane by lane.
//!
//! An undefined value does no harm until something depends on it: a copy, a sum, or the unused side of a `selp` passes it
//! on; an address, a branch, a store, a barrier or a matrix product is where it is reported.

use std::collections::HashSet;

use ptx::Op;

use super::flow::{Block, blocks};
use super::{Class, Inst, Program, Slot};

/// Slots that an instruction reads: those whose value it passes on, and those that it acts on.
pub(crate) struct Uses {
    pub data: Vec<Slot>,
    pub effect: Vec<Slot>,
}

/// What an instruction reads, its guard apart.
pub(crate) fn uses(inst: &Inst, list: &[Slot]) -> Uses {
    let sources = || inst.s.iter().copied().filter(|s| s.is_some());
    let mut uses = Uses { data: Vec::new(), effect: Vec::new() };
    match inst.op {
        Op::Mov(_) => {
            uses.data.extend(sources());
            if inst.d[0].is_some() {
                uses.data.extend(list);
            }
        }
        Op::St(_) | Op::Stmatrix(_) => {
            uses.effect.extend(sources());
            uses.effect.extend(list);
        }
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            uses.effect.extend(&list[results..]);
        }
        Op::Shfl(_) => {
            uses.data.push(inst.s[0]);
            uses.effect.extend(&inst.s[1..]);
        }
        _ if passes_on(&inst.op) => uses.data.extend(sources()),
        _ => uses.effect.extend(sources()),
    }
    uses.effect.extend([inst.base, inst.source.0]);
    uses.data.retain(|s| s.is_some());
    uses.effect.retain(|s| s.is_some());
    uses
}

/// What an instruction writes.
pub(crate) fn defines(inst: &Inst, list: &[Slot]) -> Vec<Slot> {
    let mut slots: Vec<Slot> = inst.d.to_vec();
    match inst.op {
        Op::Ld(_) | Op::Ldmatrix(_) => slots.extend(list),
        Op::Mov(_) if !inst.d[0].is_some() => slots.extend(list),
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            slots.extend(&list[..results]);
        }
        _ => {}
    }
    slots.retain(|s| s.is_some());
    slots
}

/// Lane-wise operations: an undefined operand makes an undefined result.
fn passes_on(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(..)
            | Op::Binary(..)
            | Op::Ternary(..)
            | Op::Carry(..)
            | Op::Setp { .. }
            | Op::Set { .. }
            | Op::Selp(_)
            | Op::Slct { .. }
            | Op::Testp(..)
            | Op::Lop3
            | Op::Shf(..)
            | Op::Bfe(_)
            | Op::Bfi(_)
            | Op::Prmt(_)
            | Op::Bmsk(_)
            | Op::Szext(..)
            | Op::Fns
            | Op::Dp4a(..)
            | Op::Dp2a(..)
            | Op::Cvt(_)
            | Op::Cvta { .. }
    )
}

/// Sets `watched` of every instruction that reads or writes a register that may be undefined where it is read.
pub(super) fn watch(program: &mut Program) {
    let constant: HashSet<Slot> = program
        .constants
        .iter()
        .map(|(slot, _)| *slot)
        .chain(program.specials.iter().map(|(slot, _)| *slot))
        .chain([program.frame_pointer])
        .collect();
    let passed: HashSet<Slot> = program.calls.iter().flat_map(super::Call::passed_slots).collect();
    let mut suspects = HashSet::new();
    for info in &program.functions {
        let blocks = blocks(&program.code, &program.targets, info.start, info.end);
        let analysis = Analysis { program, constant: &constant, passed: &passed };
        analysis.suspects(&blocks, &mut suspects);
    }
    program.suspects = suspects.iter().copied().collect();
    for pc in 0..program.code.len() {
        let inst = &program.code[pc];
        let list = operand_list(program, inst);
        let Uses { data, effect } = uses(inst, list);
        let guard = inst.guard.map(|(index, _)| Slot { class: Class::Pred, index });
        let touched = data.iter().chain(&effect).chain(&guard);
        let watched = touched.chain(&defines(inst, list)).any(|s| suspects.contains(s));
        program.code[pc].watched = watched;
    }
}

/// Slots in the pool of an instruction that has any.
pub(crate) fn operand_list<'p>(program: &'p Program, inst: &Inst) -> &'p [Slot] {
    if matches!(inst.op, Op::BrxIdx { .. }) { &[] } else { program.slots(inst) }
}

struct Analysis<'p> {
    program: &'p Program,
    constant: &'p HashSet<Slot>,
    passed: &'p HashSet<Slot>,
}

/// Registers that are defined, for every lane that gets here; `None` before any path was found.
type Defined = Option<HashSet<Slot>>;

impl Analysis<'_> {
    fn suspects(&self, blocks: &[Block], suspects: &mut HashSet<Slot>) {
        let mut entry: Vec<Defined> = vec![None; blocks.len()];
        let Some(first) = entry.first_mut() else { return };
        *first = Some(HashSet::new());
        let mut work = vec![0];
        while let Some(b) = work.pop() {
            let Some(mut defined) = entry[b].clone() else { continue };
            for pc in blocks[b].start..blocks[b].end {
                self.step(pc, &mut defined, &mut |_| {});
            }
            for &next in blocks[b].successors.iter().filter(|n| **n < blocks.len()) {
                let changed = match &mut entry[next] {
                    known @ None => {
                        *known = Some(defined.clone());
                        true
                    }
                    Some(known) => {
                        let before = known.len();
                        known.retain(|s| defined.contains(s));
                        known.len() != before
                    }
                };
                if changed {
                    work.push(next);
                }
            }
        }
        for (block, defined) in blocks.iter().zip(entry) {
            let Some(mut defined) = defined else { continue };
            for pc in block.start..block.end {
                self.step(pc, &mut defined, &mut |slot| {
                    suspects.insert(slot);
                });
            }
        }
    }

    /// What is defined after an instruction; `undefined` is told of what it reads and is not.
    fn step(&self, pc: u32, defined: &mut HashSet<Slot>, undefined: &mut impl FnMut(Slot)) {
        let inst = &self.program.code[pc as usize];
        let list = operand_list(self.program, inst);
        let known = |slot: &Slot, defined: &HashSet<Slot>| {
            defined.contains(slot) || self.constant.contains(slot) || self.passed.contains(slot)
        };
        let Uses { data, effect } = uses(inst, list);
        let guard = inst.guard.map(|(index, _)| Slot { class: Class::Pred, index });
        for slot in data.iter().chain(&effect).chain(&guard) {
            if !known(slot, defined) {
                undefined(*slot);
            }
        }
        let clean = data.iter().all(|s| known(s, defined));
        for slot in defines(inst, list) {
            if !clean {
                defined.remove(&slot);
            } else if inst.guard.is_none() {
                defined.insert(slot);
            }
        }
    }
}
