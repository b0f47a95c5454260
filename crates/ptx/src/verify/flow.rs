//! Checks that registers are defined before they are used, over the control-flow graph.
//!
//! A forward analysis finds the registers that *may* be defined: a block starts with the union of the sets
//! that its predecessors end with. Blocks that the entry does not reach are skipped. The analysis takes the
//! union and not the intersection, because compilers define a register only on the paths that need it (a load
//! under a guard whose result is used under the same guard; the first iteration of a rotated loop).

use std::collections::VecDeque;

use crate::{
    Body, Flow, Function, Imm, Instruction, Name, Op, Operand, ParamSpace, Reg, Signature, Statement,
};

use super::{Report, Rule};

/// A basic block.
struct Block {
    start: usize,
    end: usize,
    successors: Vec<usize>,
}

/// Reports the first read of each register that no path has written.
pub(super) fn check(function: &Function, body: &Body, report: &mut Report) {
    let blocks = blocks(body);
    let mut entry = Bits::new(body.registers.len());
    let in_registers = function.params.iter().filter(|p| p.space == ParamSpace::Reg).map(|p| &p.name);
    let in_registers: Vec<&Name> = in_registers.collect();
    for (i, register) in body.registers.iter().enumerate() {
        if in_registers.contains(&&register.name) {
            entry.insert(i);
        }
    }
    let starts = solve(body, &blocks, entry);
    let mut reported = Bits::new(body.registers.len());
    for (block, start) in blocks.iter().zip(starts) {
        let Some(mut defined) = start else { continue };
        for inst in instructions(body, block) {
            let signature = inst.op.signature();
            if !adds_always(inst) {
                define(inst, &signature, &mut defined);
            }
            let mut read = |reg| undefined(reg, &defined, &mut reported, body, inst, report);
            inst.guard.into_iter().for_each(|guard| read(guard.reg));
            inst.each(&signature, Flow::Read, &mut read);
            define(inst, &signature, &mut defined);
        }
    }
}

fn define(inst: &Instruction, signature: &Signature, defined: &mut Bits) {
    inst.each(signature, Flow::Write, &mut |reg| {
        defined.insert(reg.0 as usize);
    });
}

/// Whether an operand that is read and written is always read. `wgmma` reads its accumulators only if
/// `scale-d` is true. The value of a `scale-d` in a register is known to the emulator only.
fn adds_always(inst: &Instruction) -> bool {
    !matches!(inst.op, Op::Wgmma(_)) || inst.operands.get(3) == Some(&Operand::Imm(Imm::Int(1)))
}

fn undefined(
    reg: Reg,
    defined: &Bits,
    reported: &mut Bits,
    body: &Body,
    inst: &Instruction,
    report: &mut Report,
) {
    let index = reg.0 as usize;
    if !defined.contains(index) && reported.insert(index) {
        let name = &body.registers[index].name;
        report.instruction(
            body,
            inst,
            (Rule::Undefined, format!("{name} is read, but no path has written it")),
        );
    }
}

fn instructions<'b>(body: &'b Body, block: &Block) -> impl Iterator<Item = &'b Instruction> {
    body.statements[block.start..block.end].iter().filter_map(|statement| match statement {
        Statement::Inst(inst) => Some(inst),
        Statement::Label(_) | Statement::Pragma(_) => None,
    })
}

/// The registers that may be defined at the start of each block. `None` for blocks that the entry does not
/// reach.
fn solve(body: &Body, blocks: &[Block], entry: Bits) -> Vec<Option<Bits>> {
    let written = |block| {
        let mut written = Bits::new(body.registers.len());
        instructions(body, block).for_each(|inst| define(inst, &inst.op.signature(), &mut written));
        written
    };
    let written: Vec<Bits> = blocks.iter().map(written).collect();
    let mut starts: Vec<Option<Bits>> = blocks.iter().map(|_| None).collect();
    let mut queued = vec![false; blocks.len()];
    let mut pending = VecDeque::new();
    if let Some(first) = starts.first_mut() {
        *first = Some(entry);
        pending.push_back(0);
    }
    while let Some(index) = pending.pop_front() {
        queued[index] = false;
        let Some(mut defined) = starts[index].clone() else { continue };
        defined.unite(&written[index]);
        for &next in &blocks[index].successors {
            let changed = match &mut starts[next] {
                Some(known) => known.unite(&defined),
                unknown => {
                    *unknown = Some(defined.clone());
                    true
                }
            };
            if changed && !std::mem::replace(&mut queued[next], true) {
                pending.push_back(next);
            }
        }
    }
    starts
}

fn ends_block(op: &Op) -> bool {
    matches!(op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit | Op::Trap)
}

fn blocks(body: &Body) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut place = vec![None; body.labels.len()];
    let mut start = 0;
    let mut close = |start: &mut usize, end: usize| {
        if end > *start {
            blocks.push(Block { start: *start, end, successors: Vec::new() });
            *start = end;
        }
        blocks.len()
    };
    for (i, statement) in body.statements.iter().enumerate() {
        match statement {
            Statement::Label(label) => {
                let index = close(&mut start, i);
                if let Some(place) = place.get_mut(label.0 as usize) {
                    *place = Some(index);
                }
            }
            Statement::Inst(inst) if ends_block(&inst.op) => {
                close(&mut start, i + 1);
            }
            Statement::Inst(_) | Statement::Pragma(_) => {}
        }
    }
    close(&mut start, body.statements.len());
    let count = blocks.len();
    for (index, block) in blocks.iter_mut().enumerate() {
        let last = match &body.statements[block.end - 1] {
            Statement::Inst(inst) if ends_block(&inst.op) => Some(inst),
            _ => None,
        };
        let falls_through = last.is_none_or(|inst| inst.guard.is_some());
        if falls_through && index + 1 < count {
            block.successors.push(index + 1);
        }
        let targets = last.iter().flat_map(|inst| &inst.operands).flat_map(|operand| match operand {
            Operand::Label(label) => std::slice::from_ref(label),
            Operand::Labels(labels) => labels,
            _ => &[],
        });
        block.successors.extend(targets.filter_map(|l| place[l.0 as usize]).filter(|&b| b < count));
    }
    blocks
}

/// A set of register indices.
#[derive(Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)])
    }

    fn contains(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    /// Adds `i`. Returns whether it is new.
    fn insert(&mut self, i: usize) -> bool {
        let new = !self.contains(i);
        self.0[i / 64] |= 1 << (i % 64);
        new
    }

    /// Adds all of `other`. Returns whether any is new.
    fn unite(&mut self, other: &Bits) -> bool {
        let mut changed = false;
        for (word, &more) in self.0.iter_mut().zip(&other.0) {
            changed |= *word | more != *word;
            *word |= more;
        }
        changed
    }
}
