//! Finds the registers that may be undefined when they are read. Most kernels have few such registers. Only
//! these are tracked, lane by lane, while the kernel runs.
//!
//! An undefined value is harmless until something depends on it. A copy, a sum, or the unused side of a
//! `selp` passes the value on. An address, a branch, a store, a barrier or a matrix product depends on the
//! value, and the finding is reported there.

use std::collections::{HashMap, HashSet};

use ptx::{BinaryOp, Op, PrmtMode};

use super::flow::{Block, blocks};
use super::{Class, Inst, Program, Slot};

/// The suspects (registers that may be undefined) that an instruction touches, by their index in
/// [`Program::suspects`].
#[derive(Debug)]
pub(crate) struct Watch {
    pub guard: Option<u32>,
    /// Suspects whose value the instruction passes on.
    pub data: Vec<u32>,
    /// Suspects on whose value the instruction depends.
    pub effect: Vec<u32>,
    pub defines: Vec<u32>,
    /// `a`, `b` and the predicate of a `selp`, if they are suspects.
    pub choice: Option<[Option<u32>; 3]>,
    /// For operations that put bytes together: the bytes of suspects on which each byte of the result
    /// depends. Compilers set the bytes of an unwritten register one by one.
    pub bytes: Option<[Vec<(u32, u8)>; 8]>,
}

/// The slots that an instruction reads: those whose value it passes on, and those on which it depends.
struct Uses {
    data: Vec<Slot>,
    effect: Vec<Slot>,
}

/// The slots that an instruction reads, without its guard. With `follow_loads`, a plain store passes its
/// values on; the run looks at them when it knows the memory that they are stored to.
fn uses(inst: &Inst, list: &[Slot], follow_loads: bool) -> Uses {
    let sources = || inst.s.iter().copied().filter(|s| s.is_some());
    let mut uses = Uses { data: Vec::new(), effect: Vec::new() };
    match inst.op {
        Op::Mov(_) => {
            uses.data.extend(sources());
            if inst.d[0].is_some() {
                uses.data.extend(list);
            }
        }
        Op::St(_) if follow_loads => uses.data.extend(list),
        Op::St(_) | Op::Stmatrix(_) | Op::WmmaStore(_) => {
            uses.effect.extend(sources());
            uses.effect.extend(list);
        }
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            uses.effect.extend(&list[results..]);
        }
        Op::Wmma(w) => {
            let [_, _, _, results] = w.registers();
            uses.effect.extend(&list[results..]);
        }
        // Whether D is read depends on the predicate.
        Op::Wgmma(w) => {
            uses.effect.extend(sources());
            uses.effect.extend(&list[w.d_registers()..]);
        }
        Op::CpAsyncBulk(_)
        | Op::CpReduceAsyncBulk(_)
        | Op::CpAsyncBulkTensor(_)
        | Op::CpReduceAsyncBulkTensor(_)
        | Op::StAsync(_)
        | Op::RedAsync(_) => {
            uses.effect.extend(sources());
            uses.effect.extend(list);
        }
        Op::Shfl(_) => {
            uses.data.push(inst.s[0]);
            uses.effect.extend(&inst.s[1..]);
        }
        _ if passes_on(&inst.op) => uses.data.extend(sources()),
        _ => uses.effect.extend(sources()),
    }
    uses.effect.extend([inst.base, inst.source.0, inst.signal.0]);
    uses.data.retain(|s| s.is_some());
    uses.effect.retain(|s| s.is_some());
    uses
}

/// The slots that an instruction writes.
fn defines(inst: &Inst, list: &[Slot]) -> Vec<Slot> {
    let mut slots: Vec<Slot> = inst.d.to_vec();
    match inst.op {
        Op::Ld(_) | Op::Ldmatrix(_) | Op::WmmaLoad(_) => slots.extend(list),
        Op::Mov(_) if !inst.d[0].is_some() => slots.extend(list),
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            slots.extend(&list[..results]);
        }
        Op::Wmma(w) => {
            let [_, _, _, results] = w.registers();
            slots.extend(&list[..results]);
        }
        Op::Wgmma(w) => slots.extend(&list[..w.d_registers()]),
        _ => {}
    }
    slots.retain(|s| s.is_some());
    slots
}

/// Whether an operation is lane-wise: an undefined operand makes its result undefined.
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
            | Op::Lop3(_)
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
            | Op::CvtPack { .. }
            | Op::Cvta { .. }
            | Op::Mapa { .. }
            | Op::Getctarank { .. }
    )
}

/// Finds the registers that may be undefined when they are read, and the instructions that read or write
/// them. With `follow_loads`, every register that a load writes counts as possibly undefined.
pub(super) fn watch(program: &mut Program, follow_loads: bool) {
    let constant: HashSet<Slot> = program
        .constants
        .iter()
        .map(|(slot, _)| *slot)
        .chain(program.specials.iter().map(|(slot, _)| *slot))
        .chain(program.shared_addresses.iter().map(|(slot, _)| *slot))
        .chain([program.frame_pointer])
        .collect();
    let passed: HashSet<Slot> = program.calls.iter().flat_map(super::Call::passed_slots).collect();
    let mut suspects = HashSet::new();
    for info in &program.functions {
        let blocks = blocks(&program.code, &program.targets, info.start, info.end);
        let analysis = Analysis { program, constant: &constant, passed: &passed, follow_loads };
        analysis.suspects(&blocks, &mut suspects);
    }
    program.suspects = suspects.into_iter().collect();
    let index: HashMap<Slot, u32> = program.suspects.iter().copied().zip(0..).collect();
    for pc in 0..program.code.len() {
        if let Some(watch) = watch_of(program, &program.code[pc], &index, follow_loads) {
            program.code[pc].watched = Some(program.watches.len() as u32);
            program.watches.push(watch);
        }
    }
}

/// Finds the instructions that touch registers of a wgmma. An instruction must not touch them while the wgmma
/// is in flight (PTX ISA, "wgmma.mma_async").
pub(super) fn touch(program: &mut Program) {
    let of_wgmma = |inst: &&Inst| matches!(inst.op, Op::Wgmma(_));
    let registers: HashSet<Slot> = program
        .code
        .iter()
        .filter(of_wgmma)
        .flat_map(|inst| program.slots(inst).iter().copied())
        .filter(|slot| slot.is_some())
        .collect();
    if registers.is_empty() {
        return;
    }
    for pc in 0..program.code.len() {
        let inst = &program.code[pc];
        if of_wgmma(&inst) {
            continue;
        }
        let list = operand_list(program, inst);
        let Uses { mut data, effect } = uses(inst, list, false);
        data.extend(effect);
        data.extend(defines(inst, list));
        let mut touched: Vec<u16> =
            data.iter().filter(|slot| registers.contains(slot)).map(|slot| slot.index).collect();
        touched.sort_unstable();
        touched.dedup();
        if !touched.is_empty() {
            program.code[pc].touches = Some(program.touches.len() as u32);
            program.touches.push(touched);
        }
    }
}

fn watch_of(program: &Program, inst: &Inst, index: &HashMap<Slot, u32>, follow_loads: bool) -> Option<Watch> {
    let list = operand_list(program, inst);
    let Uses { data, effect } = uses(inst, list, follow_loads);
    let known = |slots: &[Slot]| -> Vec<u32> { slots.iter().filter_map(|s| index.get(s).copied()).collect() };
    let guard = inst.guard.and_then(|(at, _)| index.get(&Slot { class: Class::Pred, index: at }).copied());
    let choice = matches!(inst.op, Op::Selp(_)).then(|| [0, 1, 2].map(|i| index.get(&inst.s[i]).copied()));
    let watch = Watch {
        guard,
        data: known(&data),
        effect: known(&effect),
        defines: known(&defines(inst, list)),
        choice,
        bytes: bytes_of(program, inst, index),
    };
    let touches =
        guard.is_some() || !(watch.data.is_empty() && watch.effect.is_empty() && watch.defines.is_empty());
    touches.then_some(watch)
}

/// The bytes of suspects on which each byte of the result depends, for operations that keep bytes apart.
fn bytes_of(program: &Program, inst: &Inst, index: &HashMap<Slot, u32>) -> Option<[Vec<(u32, u8)>; 8]> {
    let constant = |slot: Slot| program.constants.iter().find(|(s, _)| *s == slot).map(|(_, value)| *value);
    // A byte of an operand that decides about the result, unless the other operand decides alone.
    let part = |at: usize, byte: u8| index.get(&inst.s[at]).map(|suspect| (*suspect, byte));
    let byte_of = |value: u64, byte: u8| (value >> (8 * byte)) as u8;
    let width = match inst.op {
        Op::Binary(_, ty, _) | Op::Mov(ty) => ty.bytes(),
        _ => 4,
    };
    let from = |byte: u8| -> Vec<(u32, u8)> {
        if u32::from(byte) >= width {
            return Vec::new();
        }
        let decides = |at: usize, neutral: u8| {
            let other = constant(inst.s[1 - at]);
            other.is_none_or(|other| byte_of(other, byte) != neutral)
        };
        let sources = match inst.op {
            Op::Binary(BinaryOp::And, ..) => [0, 1].map(|at| part(at, byte).filter(|_| decides(at, 0))),
            Op::Binary(BinaryOp::Or, ..) => [0, 1].map(|at| part(at, byte).filter(|_| decides(at, 0xff))),
            Op::Binary(BinaryOp::Xor, ..) => [0, 1].map(|at| part(at, byte)),
            Op::Prmt(PrmtMode::Generic) => {
                let selector = constant(inst.s[2]).unwrap_or_default() >> (4 * byte) & 7;
                [part((selector / 4) as usize, (selector % 4) as u8), None]
            }
            _ => [part(0, byte), None],
        };
        sources.into_iter().flatten().collect()
    };
    let is_copy =
        || matches!(inst.op, Op::Mov(_)) && inst.list.1 == 0 && inst.s[1..].iter().all(|s| !s.is_some());
    let keeps_apart = match inst.op {
        Op::Binary(BinaryOp::And | BinaryOp::Or | BinaryOp::Xor, ..) => inst.d[0].class != Class::Pred,
        Op::Prmt(PrmtMode::Generic) => constant(inst.s[2]).is_some(),
        _ => is_copy(),
    };
    keeps_apart.then(|| [0, 1, 2, 3, 4, 5, 6, 7].map(from))
}

/// The pool slots of an instruction; empty for `brx.idx`, whose list holds branch targets.
fn operand_list<'p>(program: &'p Program, inst: &Inst) -> &'p [Slot] {
    if matches!(inst.op, Op::BrxIdx { .. }) { &[] } else { program.slots(inst) }
}

struct Analysis<'p> {
    program: &'p Program,
    constant: &'p HashSet<Slot>,
    passed: &'p HashSet<Slot>,
    /// Whether a register that a load writes may be undefined.
    follow_loads: bool,
}

/// Registers that are defined in every lane that reaches a point; `None` before any path to the point was
/// found.
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

    /// Updates `defined` for an instruction. Calls `undefined` for each slot that the instruction reads and
    /// that may be undefined.
    fn step(&self, pc: u32, defined: &mut HashSet<Slot>, undefined: &mut impl FnMut(Slot)) {
        let inst = &self.program.code[pc as usize];
        let list = operand_list(self.program, inst);
        let known = |slot: &Slot, defined: &HashSet<Slot>| {
            defined.contains(slot) || self.constant.contains(slot) || self.passed.contains(slot)
        };
        let Uses { data, effect } = uses(inst, list, self.follow_loads);
        let guard = inst.guard.map(|(index, _)| Slot { class: Class::Pred, index });
        for slot in data.iter().chain(&effect).chain(&guard) {
            if !known(slot, defined) {
                undefined(*slot);
            }
        }
        let followed = self.follow_loads && matches!(inst.op, Op::Ld(_));
        let clean = !followed && data.iter().all(|s| known(s, defined));
        for slot in defines(inst, list) {
            if !clean {
                defined.remove(&slot);
            } else if inst.guard.is_none() {
                defined.insert(slot);
            }
        }
    }
}
