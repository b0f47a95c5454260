//! Estimates registers by a liveness analysis of the PTX.

use ptx::{Body, Instruction, Label, Module, Op, Operand, Statement, Type};

use super::{ResourceSource, Resources, static_shared};
use crate::dataflow::{Regs, reads, writes};

/// Registers of every kernel in addition to its values: the stack pointer, and temporaries of expanded
/// instructions.
const OVERHEAD: u32 = 6;
/// Registers of an SM, on every architecture since sm_50.
const REGISTER_FILE: u64 = 65536;
/// Maximum number of registers of a thread.
const MOST: u32 = 255;

/// Estimates registers and spills from the PTX: the maximum number of 32-bit words that are live at one
/// point, by backward dataflow over the control-flow graph, plus a small overhead. Values that ptxas folds
/// away are counted, and values that it hoists are not. The estimate is accurate to about a fifth. `None`
/// when the module has no such entry.
pub fn estimate(module: &Module, entry: &str) -> Option<Resources> {
    let function = module.function(entry)?;
    let body = function.body.as_ref()?;
    let wanted = peak(body) + OVERHEAD;
    let bound = function.bounds.max_registers.unwrap_or(MOST).clamp(16, MOST);
    let threads = function.bounds.required_threads.or(function.bounds.max_threads);
    let per_launch = threads.map_or(MOST, |[x, y, z]| {
        let ctas = u64::from(function.bounds.min_ctas_per_sm.unwrap_or(1));
        let threads = [x, y, z].into_iter().fold(ctas, |all, n| all.saturating_mul(u64::from(n)));
        (REGISTER_FILE / threads.max(1)).min(u64::from(MOST)) as u32 / 8 * 8
    });
    let allowed = bound.min(per_launch.clamp(16, MOST));
    let spilled = wanted.saturating_sub(allowed) * 4;
    let local =
        body.variables.iter().filter(|v| v.space == ptx::Space::Local).map(|v| v.bytes()).sum::<u64>();
    Some(Resources {
        registers: wanted.min(allowed).next_multiple_of(2),
        spill_stores: spilled,
        spill_loads: spilled,
        stack: u32::try_from(local).unwrap_or(u32::MAX).saturating_add(spilled),
        shared: static_shared(module, entry),
        source: ResourceSource::Estimate,
    })
}

fn words(ty: Type) -> u32 {
    // Predicates have separate registers. Two 16-bit values share a word in about half of the cases; that is
    // not counted.
    if ty == Type::Pred { 0 } else { ty.bits().div_ceil(32) }
}

/// A set of registers.
#[derive(Clone, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn new(len: usize) -> Set {
        Set(vec![0; len.div_ceil(64)])
    }

    fn insert(&mut self, r: u32) -> bool {
        let bit = 1 << (r % 64);
        let word = &mut self.0[r as usize / 64];
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    fn remove(&mut self, r: u32) -> bool {
        let bit = 1 << (r % 64);
        let word = &mut self.0[r as usize / 64];
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }

    fn union(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    fn members(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.0.len() as u32 * 64).filter(|r| self.0[*r as usize / 64] >> (r % 64) & 1 == 1)
    }
}

struct BasicBlock<'a> {
    code: Vec<&'a Instruction>,
    next: Vec<usize>,
}

/// The registers that an instruction writes in every thread, and those that it reads.
struct Uses {
    writes: Regs,
    reads: Regs,
}

impl Uses {
    fn of(inst: &Instruction) -> Uses {
        Uses { writes: if inst.guard.is_none() { writes(inst) } else { Regs::new() }, reads: reads(inst) }
    }
}

/// The maximum number of words that are live at one point.
fn peak(body: &Body) -> u32 {
    let blocks = blocks(body);
    let uses = |block: &BasicBlock| block.code.iter().rev().map(|inst| Uses::of(inst)).collect::<Vec<_>>();
    let uses: Vec<Vec<Uses>> = blocks.iter().map(uses).collect();
    let weight: Vec<u32> = body.registers.iter().map(|r| words(r.ty)).collect();
    let mut live_in = vec![Set::new(weight.len()); blocks.len()];
    let live_out = |i: usize, live_in: &[Set]| {
        let mut live = Set::new(weight.len());
        blocks[i].next.iter().for_each(|n| live.union(&live_in[*n]));
        live
    };
    let mut changed = true;
    while changed {
        changed = false;
        for i in (0..blocks.len()).rev() {
            let mut live = live_out(i, &live_in);
            uses[i].iter().for_each(|uses| step(uses, &mut live, &mut 0, &weight));
            if live != live_in[i] {
                live_in[i] = live;
                changed = true;
            }
        }
    }
    let mut most = 0;
    for (i, uses) in uses.iter().enumerate() {
        let mut live = live_out(i, &live_in);
        let mut now = live.members().map(|r| weight[r as usize]).sum();
        most = most.max(now);
        for uses in uses {
            step(uses, &mut live, &mut now, &weight);
            most = most.max(now);
        }
    }
    most
}

/// Updates liveness from after an instruction to before it. `now` is the number of live words.
fn step(uses: &Uses, live: &mut Set, now: &mut u32, weight: &[u32]) {
    for r in &uses.writes {
        if live.remove(r.0) {
            *now = now.saturating_sub(weight[r.0 as usize]);
        }
    }
    for r in &uses.reads {
        if live.insert(r.0) {
            *now += weight[r.0 as usize];
        }
    }
}

fn blocks(body: &Body) -> Vec<BasicBlock<'_>> {
    let mut blocks = vec![BasicBlock { code: Vec::new(), next: Vec::new() }];
    let mut label_block = vec![usize::MAX; body.labels.len()];
    for statement in &body.statements {
        match statement {
            Statement::Label(Label(label)) => {
                blocks.push(BasicBlock { code: Vec::new(), next: Vec::new() });
                if let Some(slot) = label_block.get_mut(*label as usize) {
                    *slot = blocks.len() - 1;
                }
            }
            Statement::Pragma(_) => {}
            Statement::Inst(inst) => {
                if let Some(block) = blocks.last_mut() {
                    block.code.push(inst);
                }
                if ends(&inst.op) {
                    blocks.push(BasicBlock { code: Vec::new(), next: Vec::new() });
                }
            }
        }
    }
    let count = blocks.len();
    for (i, block) in blocks.iter_mut().enumerate() {
        let last = block.code.last();
        let jumps = last.is_some_and(|l| ends(&l.op) && l.guard.is_none());
        if !jumps && i + 1 < count {
            block.next.push(i + 1);
        }
        for operand in last.filter(|l| ends(&l.op)).into_iter().flat_map(|l| &l.operands) {
            let targets = match operand {
                Operand::Label(label) => std::slice::from_ref(label),
                Operand::Labels(labels) => labels.as_slice(),
                _ => &[],
            };
            block
                .next
                .extend(targets.iter().filter_map(|l| label_block.get(l.0 as usize)).filter(|b| **b < count));
        }
    }
    blocks
}

fn ends(op: &Op) -> bool {
    matches!(op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit | Op::Trap)
}
