//! Finds out from which instructions the values of registers come, whatever way a thread takes.

use ptx::{BinaryOp, CmpOp, Op, Type};

use super::by_slot::BySlot;
use super::effects::{Uses, defines, operand_list, passes_on, uses};
use super::flow::BasicBlock;
use super::{Call, Class, Inst, Program, Slot};
use crate::semantics::scalar::{compare, evaluate};

/// The most rounds of a loop that is known to end.
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

    /// Whether a block that jumps to itself ends, whatever values the thread has loaded.
    pub fn ends(&self, block: &BasicBlock) -> bool {
        self.rounds(block).is_some() || self.counts_down(block)
    }

    /// Whether a block jumps to itself only while a register is not zero, and takes from the register the
    /// lesser of the register and a constant, as `fmod` of a large quotient does.
    fn counts_down(&self, block: &BasicBlock) -> bool {
        let branch = &self.program.code[block.end as usize - 1];
        let Some((index, false)) = branch.guard.filter(|_| branch.target == block.start) else {
            return false;
        };
        let guard = Slot { class: Class::Pred, index };
        let mut needed = vec![guard];
        if let Some(and) = self.only_writer(guard, block)
            && matches!(and.op, Op::Binary(BinaryOp::And, Type::Pred, _))
            && and.negated == 0
        {
            needed.extend(&and.s[..2]);
        }
        needed.iter().any(|test| {
            let Some(test) = self.only_writer(*test, block) else { return false };
            let is_not_zero = matches!(test.op, Op::Setp { cmp: CmpOp::Ne, combine: None, ty, .. } if ty.bits() == 32 && !ty.is_float())
                && self.constant(test.s[1]) == Some(0);
            is_not_zero && self.takes_lesser(test.s[0], block)
        })
    }

    /// Whether each round takes the lesser of a register and a constant from the register.
    fn takes_lesser(&self, counter: Slot, block: &BasicBlock) -> bool {
        let inside = |pc: &&u32| (block.start..block.end).contains(*pc);
        let mut writers = self.writers[counter].iter().filter(inside);
        let (Some(&at), None) = (writers.next(), writers.next()) else { return false };
        let take = &self.program.code[at as usize];
        let Some(lesser) = self.only_writer(take.s[1], block) else { return false };
        let constant = match lesser.s {
            [a, b, ..] if a == counter => self.constant(b),
            [a, b, ..] if b == counter => self.constant(a),
            _ => None,
        };
        matches!(take.op, Op::Binary(BinaryOp::Sub, ty, _) if !ty.is_float())
            && take.guard.is_none()
            && take.s[0] == counter
            && matches!(lesser.op, Op::Binary(BinaryOp::Min, Type::U32, _))
            && constant.is_some_and(|constant| constant >= (1 << 32) / u64::from(MOST_ROUNDS))
    }

    /// The one instruction that writes a register, if it lies in the block and has no guard.
    fn only_writer(&self, slot: Slot, block: &BasicBlock) -> Option<&Inst> {
        let [pc] = self.writers[slot][..] else { return None };
        let inst = &self.program.code[pc as usize];
        ((block.start..block.end).contains(&pc) && inst.guard.is_none()).then_some(inst)
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
