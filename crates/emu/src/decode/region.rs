//! Finds the branches whose direction reaches nothing but registers and local memory: `if`s that choose how a
//! value is computed, as in the sine of a large number. A value that nothing uses may decide such a branch.

use ptx::{MemSem, Memory, Op, Space};

use super::effects::{defines, operand_list, passes_on};
use super::flow::BasicBlock;
use super::{Inst, NOWHERE, Program, Slot};

/// The instructions between a branch and the point where its lanes reconverge.
#[derive(Debug)]
pub(super) struct Region {
    /// The branch, and the first instruction behind the region.
    pub branch: u32,
    pub join: u32,
    pub writes: Vec<Slot>,
    /// Whether the region stores to local memory.
    pub stores: bool,
}

/// The regions of one function's branches that write registers and local memory only.
pub(super) fn regions(program: &Program, blocks: &[BasicBlock]) -> Vec<Region> {
    (0..blocks.len()).filter_map(|block| region(program, blocks, block)).collect()
}

fn region(program: &Program, blocks: &[BasicBlock], from: usize) -> Option<Region> {
    let branch = blocks[from].end - 1;
    let inst = &program.code[branch as usize];
    let join = inst.reconverge;
    if !matches!(inst.op, Op::Bra { .. }) || inst.guard.is_none() || join == NOWHERE {
        return None;
    }
    let mut region = Region { branch, join, writes: Vec::new(), stores: false };
    let mut seen = vec![false; blocks.len()];
    let mut work = blocks[from].successors.clone();
    while let Some(at) = work.pop() {
        let block = blocks.get(at)?;
        if block.start == join || std::mem::replace(&mut seen[at], true) {
            continue;
        }
        // A value that decides how often a loop runs may keep it from ending.
        if at == from {
            return None;
        }
        for inst in &program.code[block.start as usize..block.end as usize] {
            if !only_writes_of_the_thread(inst) {
                return None;
            }
            region.stores |= matches!(inst.op, Op::St(_));
            region.writes.extend(defines(inst, operand_list(program, inst)));
        }
        work.extend(&block.successors);
    }
    Some(region)
}

/// Whether an instruction reads nothing that another thread may write, and writes nothing that another thread
/// can read.
fn only_writes_of_the_thread(inst: &Inst) -> bool {
    let constant = |m: &Memory| match m.space {
        Space::Param | Space::Const | Space::Local => true,
        Space::Global => m.non_coherent,
        _ => false,
    };
    match &inst.op {
        Op::Mov(_) | Op::Bra { .. } => true,
        Op::Ld(m) => constant(m) && m.sem == MemSem::Weak,
        Op::St(m) => m.space == Space::Local && m.sem == MemSem::Weak,
        op => passes_on(op),
    }
}
