//! Registers are written before they are read.
//!
//! A read is refused when no way from the entry to it passes a write of that register. A register written on some ways
//! only is allowed: compilers leave it so where the value is not used, and the emulator watches each read as it runs.

use crate::{Body, Instruction, Label, Op, Operand, Reg, Statement};

/// Registers looked at in one pass, so that memory stays linear in the text.
const CHUNK: usize = 1024;

/// A set of registers of one chunk.
type Registers = [u64; CHUNK / 64];

/// A stretch of statements that is left at its end only.
#[derive(Default)]
struct Block {
    accesses: Vec<Access>,
    successors: Vec<usize>,
}

/// An instruction reads or writes a register; reads come before the writes of the same instruction.
struct Access {
    statement: usize,
    reg: Reg,
    writes: bool,
}

fn leaves(inst: &Instruction) -> bool {
    matches!(inst.op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit | Op::Trap)
}

fn targets(inst: &Instruction) -> impl Iterator<Item = Label> {
    let labels = inst.operands.iter().flat_map(|operand| match operand {
        Operand::Label(label) => std::slice::from_ref(label),
        Operand::Labels(labels) => labels,
        _ => &[],
    });
    labels.copied()
}

fn blocks(body: &Body) -> Vec<Block> {
    let statements = &body.statements;
    let mut starts = vec![0];
    for (i, statement) in statements.iter().enumerate() {
        match statement {
            Statement::Label(_) => starts.push(i),
            Statement::Inst(inst) if leaves(inst) => starts.push(i + 1),
            Statement::Inst(_) | Statement::Pragma(_) => {}
        }
    }
    starts.dedup();
    starts.retain(|&start| start < statements.len());
    let mut placed = vec![None; body.labels.len()];
    for (block, &start) in starts.iter().enumerate() {
        if let Statement::Label(label) = statements[start]
            && let Some(slot) = placed.get_mut(label.0 as usize)
        {
            *slot = Some(block);
        }
    }
    let block = |(i, &first): (usize, &usize)| {
        let end = starts.get(i + 1).copied().unwrap_or(statements.len());
        let next = (i + 1 < starts.len()).then_some(i + 1);
        let mut block = Block::default();
        for (statement, inst) in (first..end).filter_map(|i| match &statements[i] {
            Statement::Inst(inst) => Some((i, inst)),
            Statement::Label(_) | Statement::Pragma(_) => None,
        }) {
            inst.registers_read(|reg| block.accesses.push(Access { statement, reg, writes: false }));
            inst.registers_written(|reg| block.accesses.push(Access { statement, reg, writes: true }));
        }
        match &statements[end - 1] {
            Statement::Inst(inst) if leaves(inst) => {
                let jumps = targets(inst).filter_map(|label| placed.get(label.0 as usize).copied().flatten());
                block.successors = jumps.chain(next.filter(|_| inst.guard.is_some())).collect();
            }
            _ => block.successors = next.into_iter().collect(),
        }
        block
    };
    starts.iter().enumerate().map(block).collect()
}

/// Blocks in the order in which a depth-first walk from `roots` finishes them.
fn finished(successors: &[Vec<usize>], roots: impl Iterator<Item = usize>, seen: &mut [bool]) -> Vec<usize> {
    let mut order = Vec::new();
    let mut stack = Vec::new();
    for root in roots {
        if std::mem::replace(&mut seen[root], true) {
            continue;
        }
        stack.push((root, 0));
        while let Some((block, next)) = stack.pop() {
            match successors[block].get(next) {
                Some(&successor) => {
                    stack.push((block, next + 1));
                    if !std::mem::replace(&mut seen[successor], true) {
                        stack.push((successor, 0));
                    }
                }
                None => order.push(block),
            }
        }
    }
    order
}

/// Strongly connected components of what the first block reaches, each before those it leads to (Kosaraju). Every block
/// of a component reaches every other, so they all see the same writes and one pass in this order suffices.
fn components(blocks: &[Block]) -> Vec<Vec<usize>> {
    let forward: Vec<Vec<usize>> = blocks.iter().map(|block| block.successors.clone()).collect();
    let mut reached = vec![false; blocks.len()];
    let order = finished(&forward, std::iter::once(0), &mut reached);
    let mut backward = vec![Vec::new(); blocks.len()];
    for (block, successors) in forward.iter().enumerate().filter(|&(block, _)| reached[block]) {
        successors.iter().for_each(|&successor| backward[successor].push(block));
    }
    let mut seen = vec![false; blocks.len()];
    let mut components = Vec::new();
    for &root in order.iter().rev() {
        let component = finished(&backward, std::iter::once(root), &mut seen);
        if !component.is_empty() {
            components.push(component);
        }
    }
    components
}

/// Calls `report` for each read that no write can reach, with the number of its statement. The first `parameters`
/// registers are written by the caller.
pub(super) fn undefined_reads(body: &Body, parameters: usize, mut report: impl FnMut(usize, Reg)) {
    let blocks = blocks(body);
    if blocks.is_empty() {
        return;
    }
    let components = components(&blocks);
    for first in (0..body.registers.len()).step_by(CHUNK) {
        let mut entry: Registers = [0; CHUNK / 64];
        (first..parameters.min(first + CHUNK)).for_each(|i| entry[(i - first) / 64] |= 1 << (i % 64));
        check_chunk(&blocks, &components, first, entry, &mut report);
    }
}

/// One pass over all blocks for the registers `first..first + CHUNK`.
fn check_chunk(
    blocks: &[Block],
    components: &[Vec<usize>],
    first: usize,
    entry: Registers,
    report: &mut impl FnMut(usize, Reg),
) {
    let bit = |reg: Reg| {
        let i = (reg.0 as usize).checked_sub(first).filter(|&i| i < CHUNK)?;
        Some((i / 64, 1u64 << (i % 64)))
    };
    let add = |to: &mut Registers, from: &Registers| to.iter_mut().zip(from).for_each(|(a, b)| *a |= b);
    let mut arriving = vec![[0; CHUNK / 64]; blocks.len()];
    arriving[0] = entry;
    for component in components {
        let mut seen: Registers = [0; CHUNK / 64];
        component.iter().for_each(|&block| add(&mut seen, &arriving[block]));
        let mut written = seen;
        for access in component.iter().flat_map(|&block| &blocks[block].accesses).filter(|a| a.writes) {
            if let Some((word, mask)) = bit(access.reg) {
                written[word] |= mask;
            }
        }
        let cyclic = component.len() > 1 || blocks[component[0]].successors.contains(&component[0]);
        for &block in component {
            let mut defined = if cyclic { written } else { seen };
            for access in &blocks[block].accesses {
                let Some((word, mask)) = bit(access.reg) else { continue };
                if access.writes {
                    defined[word] |= mask;
                } else if defined[word] & mask == 0 {
                    report(access.statement, access.reg);
                }
            }
            for &successor in &blocks[block].successors {
                add(&mut arriving[successor], &written);
            }
        }
    }
}
