//! Finds the branches whose direction reaches nothing but registers and local memory: `if`s that choose how a
//! value is computed, as in the sine of a large number. A value that nothing uses may decide such a branch.

use ptx::{MemSem, Memory, Op, Space};

use super::effects::{defines, operand_list, passes_on};
use super::flow::BasicBlock;
use super::origin::Origins;
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
pub(super) fn regions(program: &Program, blocks: &[BasicBlock], origins: &Origins) -> Vec<Region> {
    (0..blocks.len()).filter_map(|block| region(program, blocks, origins, block)).collect()
}

fn region(program: &Program, blocks: &[BasicBlock], origins: &Origins, from: usize) -> Option<Region> {
    let branch = blocks[from].end - 1;
    let inst = &program.code[branch as usize];
    let join = inst.reconverge;
    if !matches!(inst.op, Op::Bra { .. }) || inst.guard.is_none() || join == NOWHERE {
        return None;
    }
    let mut region = Region { branch, join, writes: Vec::new(), stores: false };
    let mut inside = vec![false; blocks.len()];
    let mut work = blocks[from].successors.clone();
    while let Some(at) = work.pop() {
        let block = blocks.get(at)?;
        if block.start == join || std::mem::replace(&mut inside[at], true) {
            continue;
        }
        for inst in &program.code[block.start as usize..block.end as usize] {
            if !only_writes_of_the_thread(inst, origins) {
                return None;
            }
            region.stores |= matches!(inst.op, Op::St(_));
            region.writes.extend(defines(inst, operand_list(program, inst)));
        }
        work.extend(&block.successors);
    }
    ends(blocks, &inside, origins).then_some(region)
}

/// Whether an instruction reads nothing that another thread may write, and writes nothing that another thread
/// can read. Its address must not depend on what the thread has loaded: lanes that take another side do not
/// execute it, and nothing checks the address that it would have there. Only a load of local memory may have
/// any address, since a sine reads the digits of 2/π from an array of the thread.
fn only_writes_of_the_thread(inst: &Inst, origins: &Origins) -> bool {
    let weak = |m: &Memory| matches!(m.sem, MemSem::Default | MemSem::Weak);
    match &inst.op {
        Op::Mov(_) | Op::Bra { .. } => true,
        Op::Ld(m) if weak(m) => match m.space {
            Space::Local => true,
            Space::Param | Space::Const => origins.without_loads(inst.base),
            Space::Global => m.non_coherent && origins.without_loads(inst.base),
            _ => false,
        },
        Op::St(m) if weak(m) => m.space == Space::Local && origins.without_loads(inst.base),
        op => passes_on(op),
    }
}

/// Whether lanes leave the blocks `inside`, whichever way they take: these hold no loops but such that end
/// after a limited number of rounds. Another value may keep the thread from ending.
fn ends(blocks: &[BasicBlock], inside: &[bool], origins: &Origins) -> bool {
    let next = |at: usize| {
        let successors =
            blocks[at].successors.iter().copied().filter(|next| inside.get(*next) == Some(&true));
        successors.filter(move |next| *next != at || !origins.ends(&blocks[at]))
    };
    let all: Vec<usize> = (0..blocks.len()).filter(|at| inside[*at]).collect();
    let mut before = vec![0; blocks.len()];
    all.iter().flat_map(|at| next(*at)).for_each(|next| before[next] += 1);
    let mut order: Vec<usize> = all.iter().copied().filter(|at| before[*at] == 0).collect();
    let mut done = 0;
    while let Some(&at) = order.get(done) {
        done += 1;
        for next in next(at) {
            before[next] -= 1;
            if before[next] == 0 {
                order.push(next);
            }
        }
    }
    done == all.len()
}
