//! Computes the order in which ptxas lays out a block, and the result of unrolling.
//!
//! The replay issues in order, as the hardware does, but in the compiler's order instead of that of the PTX.
//! Every block is therefore scheduled here as ptxas would schedule it. Registers are renamed. Merged
//! iterations of a loop are concatenated, their address arithmetic and loop control are folded, and loads of
//! adjacent words are joined. Then list scheduling orders the instructions by the longest latency to the end,
//! within a window that represents the registers that ptxas is willing to use.

use std::ops::Range;

use super::cost::Cost;
use super::joins::joined_loads;
use super::lower::{Action, BasicBlock, Direction, Lowered, LoweredModule, Registers, ends_block};
use super::machine::Gpu;

/// Number of instructions from which the scheduler chooses.
const WINDOW: usize = 48;

/// One machine instruction of a scheduled run, or the remainder of a PTX instruction that ptxas folds.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub cost: Cost,
    pub action: Action,
    /// Whether the instruction reads predicates as data.
    pub selects: bool,
    /// Ranges in [`ScheduledRun::registers`].
    pub reads: Range<u32>,
    pub writes: Range<u32>,
    /// Index of its event in the run.
    pub event: u32,
}

/// A scheduled run of one or more iterations of a block, or of a single instruction.
#[derive(Clone, Debug, Default)]
pub(super) struct ScheduledRun {
    pub steps: Vec<Step>,
    pub registers: Vec<u32>,
    /// Number of events that the run covers.
    pub events: u32,
    /// Number of registers beyond those of the program.
    pub temporaries: u32,
}

/// Schedules `copies` iterations of a block.
pub(super) fn layout(program: &LoweredModule, block: &BasicBlock, copies: u32, gpu: &Gpu) -> ScheduledRun {
    let mut nodes = unrolled(program, block, copies);
    let joined = joined_loads(&nodes, &known_alignment(program, block, copies));
    let temporaries = rename(&mut nodes, program.registers);
    for (i, leader) in joined.into_iter().enumerate() {
        if let Some(leader) = leader {
            nodes[i].reads = nodes[leader].writes.clone();
            nodes[i].action = Action::Arithmetic;
            nodes[i].cost = Cost::FREE;
        }
    }
    let edges = dependencies(&nodes);
    let order = list_schedule(&nodes, &edges, gpu);
    emit(&nodes, &order, temporaries)
}

/// The low zero bits of the registers at the start of the run. A counter that the compiler knows is a
/// multiple of its increment over a whole run.
fn known_alignment(program: &LoweredModule, block: &BasicBlock, copies: u32) -> Vec<u8> {
    let mut known = program.alignment.clone();
    if block.counted {
        for node in program.code[block.start as usize..(block.start + block.len) as usize].iter() {
            if let (true, Some(sum), [counter]) = (node.is_induction(), &node.linear, node.writes.as_slice())
            {
                let zeros = copies.trailing_zeros() + sum.constant.trailing_zeros();
                known[*counter as usize] = zeros.min(63) as u8;
            }
        }
    }
    known
}

/// The layout of a single instruction, for runs that do not cover a block (divergence, a truncated trace).
pub(super) fn single(program: &LoweredModule, pc: u32) -> ScheduledRun {
    emit(&[program.code[pc as usize].clone()], &[0], 0)
}

fn emit(nodes: &[Lowered], order: &[usize], temporaries: u32) -> ScheduledRun {
    let mut layout = ScheduledRun { events: nodes.len() as u32, temporaries, ..Default::default() };
    for i in order.iter().copied() {
        let node = &nodes[i];
        let start = layout.registers.len() as u32;
        layout.registers.extend_from_slice(&node.reads);
        let middle = layout.registers.len() as u32;
        layout.registers.extend_from_slice(&node.writes);
        let end = layout.registers.len() as u32;
        layout.steps.push(Step {
            cost: node.cost,
            action: node.action,
            selects: node.selects,
            reads: start..middle,
            writes: middle..end,
            event: i as u32,
        });
    }
    layout
}

/// The iterations, one after another. Instructions that unrolling and hoisting remove have no cost.
fn unrolled(program: &LoweredModule, block: &BasicBlock, copies: u32) -> Vec<Lowered> {
    let body = &program.code[block.start as usize..(block.start + block.len) as usize];
    if !block.is_loop {
        return body.to_vec();
    }
    let invariant = invariants(body);
    let affine = affine_in_the_counter(body, &invariant);
    let control = loop_control(body, &affine);
    let mut nodes = Vec::with_capacity(body.len() * copies as usize);
    for copy in 0..copies {
        for (i, instruction) in body.iter().enumerate() {
            let last = copy + 1 == copies;
            let mut node = instruction.clone();
            // Loop control and the increments of counters are needed once, at the end; addresses once, at the
            // start.
            let folded = if control[i] || node.is_induction() { !last } else { affine[i] && copy > 0 };
            if invariant[i] || folded {
                node.cost = Cost::FREE;
            }
            if node.action == Action::Branch && !last {
                node.action = Action::Arithmetic;
            }
            nodes.push(node);
        }
    }
    nodes
}

/// Arithmetic whose sources do not change in the loop. ptxas hoists it.
fn invariants(body: &[Lowered]) -> Vec<bool> {
    let written: Registers = body.iter().flat_map(|n| n.writes.iter().copied()).collect();
    let mut invariant = vec![false; body.len()];
    let mut fixed = Registers::new();
    for (i, node) in body.iter().enumerate() {
        let once = |r: &u32| written.iter().filter(|w| *w == r).count() == 1;
        invariant[i] = node.action == Action::Arithmetic
            && node.writes.iter().all(once)
            && node.reads.iter().all(|r| !written.contains(r) || fixed.contains(r));
        if invariant[i] {
            fixed.extend(node.writes.iter().copied());
        }
    }
    invariant
}

/// Integer arithmetic on loop counters and invariants: its result changes by a constant per iteration.
fn affine_in_the_counter(body: &[Lowered], invariant: &[bool]) -> Vec<bool> {
    let written: Registers = body.iter().flat_map(|n| n.writes.iter().copied()).collect();
    let mut steady: Registers =
        body.iter().filter(|n| n.is_induction()).flat_map(|n| n.writes.clone()).collect();
    steady
        .extend(body.iter().zip(invariant).filter(|(_, fixed)| **fixed).flat_map(|(n, _)| n.writes.clone()));
    let mut affine = vec![false; body.len()];
    for (i, node) in body.iter().enumerate() {
        affine[i] =
            node.linear.is_some() && node.reads.iter().all(|r| !written.contains(r) || steady.contains(r));
        if affine[i] {
            steady.extend(node.writes.iter().copied());
        }
    }
    affine
}

/// The branch of the loop, and the comparison of a counter that only the branch reads.
fn loop_control(body: &[Lowered], affine: &[bool]) -> Vec<bool> {
    let mut control = vec![false; body.len()];
    let Some((branch, rest)) = body.split_last() else { return control };
    control[body.len() - 1] = branch.action == Action::Branch;
    let steady: Registers =
        rest.iter().zip(affine).filter(|(_, a)| **a).flat_map(|(n, _)| n.writes.clone()).collect();
    for (i, node) in rest.iter().enumerate() {
        let [predicate] = node.writes.as_slice() else { continue };
        let others = rest.iter().any(|n| n.reads.contains(predicate));
        let counts = node.reads.iter().any(|r| steady.contains(r));
        control[i] =
            node.action == Action::Arithmetic && branch.reads.contains(predicate) && !others && counts;
    }
    control
}

/// Gives every value its own register, except that the last value of each register keeps its name. Returns
/// the number of added registers.
fn rename(nodes: &mut [Lowered], base: u32) -> u32 {
    let mut last_write = std::collections::HashMap::new();
    for (i, node) in nodes.iter().enumerate() {
        node.writes.iter().for_each(|r| {
            last_write.insert(*r, i);
        });
    }
    let mut current = std::collections::HashMap::new();
    let mut next = base;
    for (i, node) in nodes.iter_mut().enumerate() {
        node.reads.iter_mut().for_each(|r| *r = current.get(r).copied().unwrap_or(*r));
        for r in &mut node.writes {
            let name = if last_write.get(r) == Some(&i) {
                *r
            } else {
                next += 1;
                next - 1
            };
            current.insert(*r, name);
            *r = name;
        }
    }
    next - base
}

/// A node that must come before another node, and whether the other node needs its result.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    from: u32,
    data: bool,
}

/// For each node, the nodes that must come before it.
fn dependencies(nodes: &[Lowered]) -> Vec<Vec<Edge>> {
    let mut writer = std::collections::HashMap::new();
    let mut readers_of_old: std::collections::HashMap<u32, Vec<u32>> = std::collections::HashMap::new();
    let mut memory = MemoryOrder::default();
    let mut before: Vec<Vec<Edge>> = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.iter().enumerate() {
        let i = i as u32;
        let (mut data, mut order) = (Vec::new(), Vec::new());
        for r in &node.reads {
            match writer.get(r) {
                Some(w) => data.push(*w),
                None => readers_of_old.entry(*r).or_default().push(i),
            }
        }
        for r in &node.writes {
            // The last value keeps the register's name, so instructions that read the value from before the
            // run come first.
            order.extend(readers_of_old.remove(r).unwrap_or_default());
            writer.insert(*r, i);
        }
        memory.order(i, node.action, &mut order);
        if i as usize + 1 == nodes.len() && ends_block(node.action) {
            order.extend(0..i);
        }
        let edge = |data: bool| move |from: u32| Edge { from, data };
        let mut edges: Vec<Edge> =
            data.into_iter().map(edge(true)).chain(order.into_iter().map(edge(false))).collect();
        edges.retain(|e| e.from != i);
        edges.sort_unstable_by_key(|e| (e.from, !e.data));
        edges.dedup_by_key(|e| e.from);
        before.push(edges);
    }
    before
}

/// The order of accesses to one kind of memory: stores after all earlier accesses, loads after earlier
/// stores.
#[derive(Default)]
struct MemoryOrder {
    stores: [Option<u32>; 2],
    loads: [Vec<u32>; 2],
    fence: Option<u32>,
}

impl MemoryOrder {
    fn order(&mut self, i: u32, action: Action, edges: &mut Vec<u32>) {
        let (shared, cached) = match action {
            Action::Arithmetic | Action::Exchange | Action::Branch => return,
            Action::Shared(d) => (Some(d), None),
            Action::Cached(d, _) => (None, Some(d)),
            Action::Copy => (Some(Direction::Store), Some(Direction::Load)),
            Action::Commit | Action::WaitGroups(_) | Action::Barrier(_) | Action::Fence => {
                (Some(Direction::Store), Some(Direction::Store))
            }
            Action::Mbarrier
            | Action::Bulk
            | Action::ToCluster
            | Action::BulkCommit
            | Action::BulkWait(_)
            | Action::Wgmma { .. }
            | Action::WgmmaCommit
            | Action::WgmmaWait(_)
            | Action::ClusterArrive
            | Action::ClusterWait => (Some(Direction::Store), Some(Direction::Store)),
        };
        for (space, direction) in [shared, cached].into_iter().enumerate() {
            match direction {
                None => {}
                Some(Direction::Load) => {
                    edges.extend(self.stores[space]);
                    self.loads[space].push(i);
                }
                Some(Direction::Store | Direction::Atomic) => {
                    edges.extend(self.stores[space]);
                    edges.append(&mut self.loads[space]);
                    self.stores[space] = Some(i);
                }
            }
        }
        edges.extend(self.fence);
        if action == Action::Fence {
            self.fence = Some(i);
        }
    }
}

/// The latency that the compiler assumes for a result. It assumes that loads hit the cache.
fn assumed_latency(node: &Lowered, gpu: &Gpu) -> u64 {
    match node.action {
        Action::Shared(Direction::Load | Direction::Atomic) => u64::from(gpu.latency.shared),
        Action::Cached(Direction::Load | Direction::Atomic, _) => u64::from(gpu.latency.l1),
        _ => u64::from(node.cost.latency),
    }
}

fn list_schedule(nodes: &[Lowered], before: &[Vec<Edge>], gpu: &Gpu) -> Vec<usize> {
    let n = nodes.len();
    let mut height = vec![0u64; n];
    for i in (0..n).rev() {
        for edge in &before[i] {
            let from = edge.from as usize;
            let latency = if edge.data { assumed_latency(&nodes[from], gpu) } else { 0 };
            height[from] = height[from].max(height[i] + latency);
        }
    }
    let mut waiting: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut after: Vec<Vec<Edge>> = vec![Vec::new(); n];
    for (i, edges) in before.iter().enumerate() {
        edges.iter().for_each(|e| after[e.from as usize].push(Edge { from: i as u32, data: e.data }));
    }
    let mut ready_at = vec![0u64; n];
    let mut pending: Vec<usize> = (0..n).collect();
    let (mut order, mut now) = (Vec::with_capacity(n), 0u64);
    while !pending.is_empty() {
        let candidates = pending.iter().take(WINDOW).enumerate().filter(|(_, i)| waiting[**i] == 0);
        // First the node with the shortest wait; among ready nodes, the longest path to the end; then source
        // order.
        let best = candidates.min_by_key(|(_, i)| {
            let wait = ready_at[**i].saturating_sub(now);
            (wait, nodes[**i].cost.slots > 0, std::cmp::Reverse(height[**i]), **i)
        });
        let Some((position, i)) = best.map(|(position, i)| (position, *i)) else { break };
        pending.remove(position);
        let start = now.max(ready_at[i]);
        now = start + u64::from(nodes[i].cost.slots);
        for successor in &after[i] {
            let s = successor.from as usize;
            waiting[s] -= 1;
            let ready = if successor.data { start + assumed_latency(&nodes[i], gpu) } else { start };
            ready_at[s] = ready_at[s].max(ready);
        }
        order.push(i);
    }
    order
}
