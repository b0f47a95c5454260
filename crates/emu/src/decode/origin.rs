//! Finds out from which instructions the values of registers come, whatever way a thread takes.

use ptx::{BinaryOp, Op};

use super::by_slot::BySlot;
use super::effects::{Uses, defines, operand_list, passes_on, uses};
use super::flow::BasicBlock;
use super::{Call, Class, Program, Slot};
use crate::semantics::scalar::{compare, evaluate};

/// The most rounds of a loop that counts to a constant.
const MOST_ROUNDS: u32 = 1 << 12;

/// The instructions that write each register.
pub(super) struct Origins<'p> {
    program: &'p Program,
    /// The registers whose values are given before the kernel runs.
    known: &'p BySlot<bool>,
    writers: BySlot<Vec<u32>>,
}

impl<'p> Origins<'p> {
    pub fn new(program: &'p Program, known: &'p BySlot<bool>) -> Origins<'p> {
        let mut writers = BySlot::new(program, Vec::new());
        for (inst, pc) in program.code.iter().zip(0..) {
            let call = matches!(inst.op, Op::Call { .. }).then(|| &program.calls[inst.target as usize]);
            let mut written = defines(inst, operand_list(program, inst));
            written.extend(call.into_iter().flat_map(Call::registers));
            written.iter().for_each(|slot| writers[*slot].push(pc));
        }
        Origins { program, known, writers }
    }

    /// Whether the value of a register is computed from constants and special registers alone.
    pub fn without_loads(&self, slot: Slot) -> bool {
        let mut seen = vec![slot];
        let mut next = 0;
        while let Some(&slot) = seen.get(next) {
            next += 1;
            if !slot.is_some() || self.known[slot] {
                continue;
            }
            if self.writers[slot].is_empty() {
                return false;
            }
            for pc in &self.writers[slot] {
                let inst = &self.program.code[*pc as usize];
                if !matches!(inst.op, Op::Mov(_)) && !passes_on(&inst.op) {
                    return false;
                }
                let Uses { data, effect } = uses(inst, operand_list(self.program, inst), false);
                let guard = inst.guard.map(|(index, _)| Slot { class: Class::Pred, index });
                for source in data.into_iter().chain(effect).chain(guard) {
                    if !seen.contains(&source) {
                        seen.push(source);
                    }
                }
            }
        }
        true
    }

    /// Whether a block that jumps to itself ends: a register counts from a constant by a constant until it
    /// has passed a constant.
    pub fn counts_to_a_constant(&self, block: &BasicBlock) -> bool {
        self.rounds(block).is_some()
    }

    /// The number of rounds of a loop of one block.
    fn rounds(&self, block: &BasicBlock) -> Option<u32> {
        let inst = |pc: u32| &self.program.code[pc as usize];
        let branch = inst(block.end - 1);
        let (index, negated) = branch.guard.filter(|_| branch.target == block.start)?;
        let [test] = self.writers[Slot { class: Class::Pred, index }][..] else { return None };
        let Op::Setp { cmp, combine: None, ty, ftz } = inst(test).op else { return None };
        if inst(test).d[0].index != index {
            return None;
        }
        let counter = inst(test).s[0];
        let [first, second] = self.writers[counter][..] else { return None };
        let inside = |pc: u32| (block.start..block.end).contains(&pc);
        let (start, step) = if inside(first) { (second, first) } else { (first, second) };
        let (end, by) = (self.constant(inst(test).s[1])?, inst(step));
        let unguarded = [start, step, test].iter().all(|pc| inst(*pc).guard.is_none());
        let adds = matches!(by.op, Op::Binary(BinaryOp::Add, ..)) && by.s[0] == counter;
        if inside(start) || !inside(step) || !inside(test) || !unguarded || !adds {
            return None;
        }
        let increment = self.constant(by.s[1])?;
        let mut count = self.constant(inst(start).s[0]).filter(|_| matches!(inst(start).op, Op::Mov(_)))?;
        (1..MOST_ROUNDS).find(|_| {
            let next = evaluate(&by.op, [count, increment, 0, 0]).unwrap_or(count);
            let seen = if step < test { next } else { count };
            count = next;
            compare(cmp, ty, ftz, seen, end) == Some(negated)
        })
    }

    fn constant(&self, slot: Slot) -> Option<u64> {
        self.program.constants.iter().find(|(s, _)| *s == slot).map(|(_, value)| *value)
    }
}
