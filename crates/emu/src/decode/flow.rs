//! Computes immediate post-dominators: the points where lanes that diverge at a branch reconverge (Cooper,
//! Harvey & Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph).

use ptx::Op;

use super::{Inst, NOWHERE};

/// Sets `reconverge` of every instruction in `start..end` at which lanes can diverge.
pub(super) fn reconvergence(code: &mut [Inst], targets: &[u32], start: u32, end: u32) {
    let blocks = blocks(code, targets, start, end);
    let exit = blocks.len();
    let successors: Vec<Vec<usize>> = blocks.iter().map(|b| b.successors.clone()).collect();
    for (block, parent) in blocks.iter().zip(post_dominators(&successors, exit)) {
        code[block.end as usize - 1].reconverge =
            parent.filter(|p| *p != exit).map_or(NOWHERE, |p| blocks[p].start);
    }
}

/// A basic block.
#[derive(Debug)]
pub(super) struct BasicBlock {
    pub start: u32,
    pub end: u32,
    /// Indices of the successor blocks. An index equal to the number of blocks means the exit.
    pub successors: Vec<usize>,
}

/// The basic blocks of a function, in order.
pub(super) fn blocks(code: &[Inst], targets: &[u32], start: u32, end: u32) -> Vec<BasicBlock> {
    if start == end {
        return Vec::new();
    }
    let leaders = leaders(code, targets, start, end);
    let block_of = |pc: u32| leaders.partition_point(|l| *l <= pc) - 1;
    let ends = leaders[1..].iter().copied().chain([end]);
    let block = |(&start, block_end): (&u32, u32)| {
        let last = block_end - 1;
        let next = successors_of(&code[last as usize], last, targets).into_iter();
        let target = |pc: u32| if (leaders[0]..end).contains(&pc) { block_of(pc) } else { leaders.len() };
        BasicBlock { start, end: block_end, successors: next.map(target).collect() }
    };
    leaders.iter().zip(ends).map(block).collect()
}

fn is_end(inst: &Inst) -> bool {
    matches!(inst.op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit | Op::Trap)
}

fn leaders(code: &[Inst], targets: &[u32], start: u32, end: u32) -> Vec<u32> {
    let mut leaders = vec![start];
    for pc in start..end {
        let inst = &code[pc as usize];
        if is_end(inst) {
            leaders.push(pc + 1);
            leaders.extend(jump_targets(inst, targets));
        }
    }
    leaders.retain(|pc| (start..end).contains(pc));
    leaders.sort_unstable();
    leaders.dedup();
    leaders
}

fn jump_targets<'a>(inst: &'a Inst, targets: &'a [u32]) -> &'a [u32] {
    match inst.op {
        Op::Bra { .. } => std::slice::from_ref(&inst.target),
        Op::BrxIdx { .. } => &targets[inst.list.0 as usize..][..usize::from(inst.list.1)],
        _ => &[],
    }
}

fn successors_of(inst: &Inst, pc: u32, targets: &[u32]) -> Vec<u32> {
    let mut next = jump_targets(inst, targets).to_vec();
    if !is_end(inst) || inst.guard.is_some() {
        next.push(pc + 1);
    }
    // A trap is no path to the exit, so that lanes reconverge behind a branch in which none of them traps. A
    // guarded exit is one, because it may be the only way out of a loop.
    if matches!(inst.op, Op::Ret { .. } | Op::Exit) {
        next.push(NOWHERE);
    }
    next
}

/// The immediate post-dominator of each block; `None` if no path leads from the block to the exit.
fn post_dominators(successors: &[Vec<usize>], exit: usize) -> Vec<Option<usize>> {
    let mut predecessors = vec![Vec::new(); exit + 1];
    for (b, next) in successors.iter().enumerate() {
        next.iter().for_each(|n| predecessors[*n].push(b));
    }
    let order = post_order(&predecessors, exit);
    let mut rank = vec![usize::MAX; exit + 1];
    order.iter().enumerate().for_each(|(r, b)| rank[*b] = r);
    let mut ipdom: Vec<Option<usize>> = vec![None; exit + 1];
    ipdom[exit] = Some(exit);
    let mut changed = true;
    while changed {
        changed = false;
        for &b in order.iter().rev().filter(|b| **b != exit) {
            let mut new = None;
            for &s in successors[b].iter().filter(|s| rank[**s] != usize::MAX) {
                new = match (new, ipdom[s]) {
                    (new, None) => new,
                    (None, Some(_)) => Some(s),
                    (Some(mut x), Some(_)) => {
                        let mut y = s;
                        while x != y {
                            // The chain of a processed block ends at the exit, so `ipdom` is never `None`
                            // here.
                            while rank[x] < rank[y] {
                                x = ipdom[x].unwrap_or(exit);
                            }
                            while rank[y] < rank[x] {
                                y = ipdom[y].unwrap_or(exit);
                            }
                        }
                        Some(x)
                    }
                };
            }
            if ipdom[b] != new {
                ipdom[b] = new;
                changed = true;
            }
        }
    }
    ipdom[exit] = None;
    ipdom
}

fn post_order(edges: &[Vec<usize>], root: usize) -> Vec<usize> {
    let mut seen = vec![false; edges.len()];
    let mut order = Vec::new();
    let mut stack = vec![(root, 0)];
    seen[root] = true;
    while let Some((node, next)) = stack.pop() {
        match edges[node].get(next) {
            Some(&child) => {
                stack.push((node, next + 1));
                if !std::mem::replace(&mut seen[child], true) {
                    stack.push((child, 0));
                }
            }
            None => order.push(node),
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::post_dominators;

    #[test]
    fn diamonds_and_loops() {
        // 0 → 1, 2; 1 → 3; 2 → 3; 3 → 0 or exit (4).
        let graph = [vec![1, 2], vec![3], vec![3], vec![0, 4]];
        assert_eq!(post_dominators(&graph, 4), [Some(3), Some(3), Some(3), Some(4), None]);
        // A loop without an exit has no post-dominator.
        assert_eq!(post_dominators(&[vec![1, 2], vec![1]], 2), [Some(2), None, None]);
    }
}
