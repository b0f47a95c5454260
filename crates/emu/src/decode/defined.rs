//! Finds the registers that may be undefined when they are read. Most kernels have few such registers. Only
//! these are tracked, lane by lane, while the kernel runs.
//!
//! An undefined value is harmless until something depends on it. A copy, a sum, or the unused side of a
//! `selp` passes the value on. An address, a branch, a store, a barrier or a matrix product depends on the
//! value, and the finding is reported there.

use ptx::{BinaryOp, BoolOp, Op, PrmtMode, Type};
use smallvec::SmallVec;

use super::by_slot::BySlot;
use super::effects::{Slots, Uses, defines, operand_list, uses};
use super::flow::{BasicBlock, blocks};
use super::origin::Origins;
use super::region::{Region, regions};
use super::{Call, Class, Inst, Program, Slot};

/// The suspects (registers that may be undefined) that an instruction touches, by their index in
/// [`Program::suspects`].
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub guard: Option<u32>,
    /// For a branch whose direction reaches only registers and local memory, the index of its region. The
    /// instruction does not depend on its guard then.
    pub region: Option<u32>,
    /// The regions that end before this instruction.
    pub joins: Vec<Join>,
    /// Suspects whose value the instruction passes on.
    pub data: Vec<u32>,
    /// Suspects on whose value the instruction depends.
    pub effect: Vec<u32>,
    pub defines: Vec<u32>,
    pub choice: Option<UndefinedRule>,
    /// For operations that put bytes together or take them apart: the suspects that they write, and where
    /// their bytes come from. Compilers set the bytes of an unwritten register one by one.
    pub bytes: Vec<(u32, Bytes)>,
}

/// The end of the region of a branch: values that the region writes depend on the branch's guard.
#[derive(Debug)]
pub(crate) struct Join {
    pub region: u32,
    pub writes: Vec<u32>,
    /// Whether the region stores to local memory.
    pub stores: bool,
}

/// Operands of an instruction whose result may be defined although one of them is not. Operands that are no
/// suspects are `None`.
#[derive(Debug)]
pub(crate) enum UndefinedRule {
    /// `a`, `b` and the predicate of a `selp`.
    Select([Option<u32>; 3]),
    /// Two truth values that `and` or `or` joins: either decides alone if it equals `decides`.
    Join { sides: [Side; 2], decides: bool },
}

/// A truth value: the suspects that it is computed from, and the predicate operand that holds it. The result
/// of a comparison is in no operand.
#[derive(Debug)]
pub(crate) struct Side {
    pub suspects: SmallVec<[u32; 2]>,
    pub operand: Option<u8>,
}

/// The registers of a wgmma that an instruction of another kind reads or writes, and those that it writes.
#[derive(Debug)]
pub(crate) struct Touches {
    pub all: Vec<u16>,
    pub written: Vec<u16>,
}

/// The bytes of suspects on which each byte of a result depends.
type Bytes = [Vec<(u32, u8)>; 8];

/// Finds the registers that may be undefined when they are read, and the instructions that read or write
/// them. A register that a call passes always counts as one: the call and the return copy its state. With
/// `follow_loads`, every register that a load writes counts as possibly undefined.
pub(super) fn watch(program: &mut Program, follow_loads: bool) {
    let mut known = BySlot::new(program, false);
    let constants = program.constants.iter().map(|(slot, _)| *slot);
    let specials = program.specials.iter().map(|(slot, _)| *slot);
    let addresses = program.shared_addresses.iter().map(|(slot, _)| *slot);
    let always = constants.chain(specials).chain(addresses).chain([program.frame_pointer]);
    always.for_each(|slot| known[slot] = true);
    let analysis = Analysis::new(program, &known, follow_loads);
    let passed = program.calls.iter().flat_map(Call::registers);
    let mut suspects: Vec<Slot> = passed.filter(|slot| !known[*slot]).collect();
    let mut all_regions = Vec::new();
    let origins = follow_loads.then(|| Origins::new(program, &known));
    for info in &program.functions {
        let blocks = blocks(&program.code, &program.targets, info.start, info.end);
        let regions =
            origins.iter().flat_map(|origins| regions(program, &blocks, origins)).collect::<Vec<_>>();
        analysis.suspects(&blocks, &regions, &mut suspects);
        all_regions.extend(regions);
    }
    suspects.sort_unstable_by_key(|slot| slot.key());
    suspects.dedup();
    if suspects.is_empty() {
        return;
    }
    let mut index = BySlot::new(program, None);
    suspects.iter().zip(0..).for_each(|(slot, number)| index[*slot] = Some(number));
    for info in &mut program.functions {
        info.suspects = suspects.iter().filter(|slot| info.owns(**slot)).filter_map(|s| index[*s]).collect();
    }
    program.suspects = suspects;
    for pc in 0..program.code.len() {
        if let Some(watch) = watch_of(program, &program.code[pc], &index, follow_loads) {
            program.code[pc].watched = Some(program.watches.len() as u32);
            program.watches.push(watch);
        }
    }
    for (region, number) in all_regions.iter().zip(0..) {
        watch_region(program, region, number, &index);
    }
}

/// Moves the guard of a region's branch to the end of the region.
fn watch_region(program: &mut Program, region: &Region, number: u32, index: &BySlot<Option<u32>>) {
    let branch = program.code[region.branch as usize].watched;
    let Some(branch) = branch.filter(|watch| program.watches[*watch as usize].guard.is_some()) else {
        return;
    };
    program.watches[branch as usize].region = Some(number);
    let join = &mut program.code[region.join as usize].watched;
    let watch = *join.get_or_insert(program.watches.len() as u32) as usize;
    if watch == program.watches.len() {
        program.watches.push(Watch::default());
    }
    let mut writes: Vec<u32> = region.writes.iter().filter_map(|slot| index[*slot]).collect();
    writes.sort_unstable();
    writes.dedup();
    program.watches[watch].joins.push(Join { region: number, writes, stores: region.stores });
}

/// Finds the instructions that touch registers of a wgmma. An instruction must not touch them while the wgmma
/// is in flight (PTX ISA, "wgmma.mma_async").
pub(super) fn touch(program: &mut Program) {
    let of_wgmma = |inst: &&Inst| matches!(inst.op, Op::Wgmma(_));
    if !program.code.iter().any(|inst| of_wgmma(&inst)) {
        return;
    }
    let mut registers = BySlot::new(program, false);
    let slots = program.code.iter().filter(of_wgmma).flat_map(|inst| program.slots(inst));
    slots.filter(|slot| slot.is_some()).for_each(|slot| registers[*slot] = true);
    for pc in 0..program.code.len() {
        let inst = &program.code[pc];
        if of_wgmma(&inst) {
            continue;
        }
        let list = operand_list(program, inst);
        let Uses { mut data, effect } = uses(inst, list, false);
        data.extend(effect);
        let mut written = defines(inst, list);
        data.extend_from_slice(&written);
        let call = matches!(inst.op, Op::Call { .. }).then(|| &program.calls[inst.target as usize]);
        written.extend(call.into_iter().flat_map(Call::registers));
        let [all, written] = [data, written].map(|slots| {
            let of_products = slots.iter().filter(|slot| registers[**slot]);
            let mut indices: Vec<u16> = of_products.map(|slot| slot.index).collect();
            indices.sort_unstable();
            indices.dedup();
            indices
        });
        if !all.is_empty() || !written.is_empty() {
            program.code[pc].touches = Some(program.touches.len() as u32);
            program.touches.push(Touches { all, written });
        }
    }
}

fn watch_of(
    program: &Program,
    inst: &Inst,
    index: &BySlot<Option<u32>>,
    follow_loads: bool,
) -> Option<Watch> {
    let list = operand_list(program, inst);
    let Uses { data, effect } = uses(inst, list, follow_loads);
    let known = |slots: &[Slot]| -> Vec<u32> { slots.iter().filter_map(|s| index[*s]).collect() };
    let guard = inst.guard.and_then(|(at, _)| index[Slot { class: Class::Pred, index: at }]);
    let [data, effect, defines] = [known(&data), known(&effect), known(&defines(inst, list))];
    if guard.is_none() && data.is_empty() && effect.is_empty() && defines.is_empty() {
        return None;
    }
    let choice = choice_of(inst, index);
    let bytes = match inst.op {
        Op::Mov(ty) if !list.is_empty() && ty != Type::B128 => {
            bytes_of_parts((ty.bytes() / list.len() as u32) as u8, inst, list, index)
        }
        _ => index[inst.d[0]].zip(bytes_of(program, inst, index)).into_iter().collect(),
    };
    Some(Watch { guard, data, effect, defines, choice, bytes, region: None, joins: Vec::new() })
}

fn choice_of(inst: &Inst, index: &BySlot<Option<u32>>) -> Option<UndefinedRule> {
    let suspects = |at: &[usize]| at.iter().filter_map(|i| index[inst.s[*i]]).collect();
    let predicate = |at: usize| Side { suspects: suspects(&[at]), operand: Some(at as u8) };
    match inst.op {
        Op::Selp(_) => Some(UndefinedRule::Select([0, 1, 2].map(|i| index[inst.s[i]]))),
        Op::Binary(op @ (BinaryOp::And | BinaryOp::Or), Type::Pred, _) => {
            Some(UndefinedRule::Join { sides: [0, 1].map(predicate), decides: op == BinaryOp::Or })
        }
        Op::Setp { combine: Some(op @ (BoolOp::And | BoolOp::Or)), .. } => {
            let comparison = Side { suspects: suspects(&[0, 1]), operand: None };
            Some(UndefinedRule::Join { sides: [comparison, predicate(2)], decides: op == BoolOp::Or })
        }
        _ => None,
    }
}

/// [`Watch::bytes`] of a `mov` that packs or unpacks parts of `size` bytes.
fn bytes_of_parts(size: u8, inst: &Inst, list: &[Slot], index: &BySlot<Option<u32>>) -> Vec<(u32, Bytes)> {
    let byte = |slot: Slot, byte: u8| Vec::from_iter(index[slot].map(|suspect| (suspect, byte)));
    let packed = |at: u8| list.get(usize::from(at / size)).map_or(Vec::new(), |part| byte(*part, at % size));
    let part = |first: u8, at: u8| if at < size { byte(inst.s[0], first + at) } else { Vec::new() };
    let bytes = [0, 1, 2, 3, 4, 5, 6, 7];
    if inst.d[0].is_some() {
        return Vec::from_iter(index[inst.d[0]].map(|suspect| (suspect, bytes.map(packed))));
    }
    let parts = list.iter().zip((0..).step_by(usize::from(size)));
    parts.filter_map(|(slot, first)| Some((index[*slot]?, bytes.map(|at| part(first, at))))).collect()
}

/// The bytes of suspects on which each byte of the result depends, for operations that keep bytes apart.
fn bytes_of(program: &Program, inst: &Inst, index: &BySlot<Option<u32>>) -> Option<Bytes> {
    let constant = |slot: Slot| program.constants.iter().find(|(s, _)| *s == slot).map(|(_, value)| *value);
    // A byte of an operand that decides about the result, unless the other operand decides alone.
    let part = |at: usize, byte: u8| index[inst.s[at]].map(|suspect| (suspect, byte));
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
    let keeps_apart = match inst.op {
        Op::Mov(Type::B128) => false,
        Op::Mov(_) | Op::Binary(BinaryOp::And | BinaryOp::Or | BinaryOp::Xor, ..) => {
            inst.d[0].class != Class::Pred
        }
        Op::Prmt(PrmtMode::Generic) => constant(inst.s[2]).is_some(),
        _ => false,
    };
    keeps_apart.then(|| [0, 1, 2, 3, 4, 5, 6, 7].map(from))
}

/// Registers that are defined in every lane that reaches a point; `None` before any path to the point was
/// found.
type Defined = Option<BySlot<bool>>;

/// The slots that an instruction reads and defines.
struct Step {
    data: Slots,
    /// The other slots that it reads.
    effect: Slots,
    defines: Slots,
    guarded: bool,
    /// Whether the slots that it defines may be undefined in any case.
    followed: bool,
}

struct Analysis {
    steps: Vec<Step>,
    /// No slot.
    nothing: BySlot<bool>,
}

impl Analysis {
    /// `known` has the slots that are defined everywhere. With `follow_loads`, a register that a load writes
    /// may be undefined.
    fn new(program: &Program, known: &BySlot<bool>, follow_loads: bool) -> Analysis {
        let step = |inst: &Inst| {
            let list = operand_list(program, inst);
            let Uses { mut data, mut effect } = uses(inst, list, follow_loads);
            effect.extend(inst.guard.map(|(index, _)| Slot { class: Class::Pred, index }));
            data.retain(|slot| !known[*slot]);
            effect.retain(|slot| !known[*slot]);
            let mut defines = defines(inst, list);
            let call = matches!(inst.op, Op::Call { .. }).then(|| &program.calls[inst.target as usize]);
            defines.extend(call.into_iter().flat_map(Call::result_registers));
            let loads = matches!(inst.op, Op::Ld(_) | Op::Ldmatrix(_));
            let followed = follow_loads && loads || call.is_some();
            Step { data, effect, defines, guarded: inst.guard.is_some(), followed }
        };
        let steps = program.code.iter().map(step).collect();
        Analysis { steps, nothing: BySlot::new(program, false) }
    }

    fn suspects(&self, blocks: &[BasicBlock], regions: &[Region], suspects: &mut Vec<Slot>) {
        // The values that a region writes may depend on the guard of its branch.
        let leave_regions = |block: &BasicBlock, defined: &mut BySlot<bool>| {
            let left = regions.iter().filter(|region| region.join == block.start);
            left.flat_map(|region| &region.writes).for_each(|slot| defined[*slot] = false);
        };
        let mut entry: Vec<Defined> = vec![None; blocks.len()];
        let Some(first) = entry.first_mut() else { return };
        *first = Some(self.nothing.clone());
        let mut work = vec![0];
        while let Some(b) = work.pop() {
            let Some(mut defined) = entry[b].clone() else { continue };
            leave_regions(&blocks[b], &mut defined);
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
                        let mut changed = false;
                        for (known, defined) in known.values.iter_mut().zip(&defined.values) {
                            changed |= *known & !defined;
                            *known &= defined;
                        }
                        changed
                    }
                };
                if changed {
                    work.push(next);
                }
            }
        }
        for (block, defined) in blocks.iter().zip(entry) {
            let Some(mut defined) = defined else { continue };
            leave_regions(block, &mut defined);
            for pc in block.start..block.end {
                self.step(pc, &mut defined, &mut |slot| suspects.push(slot));
            }
        }
    }

    /// Updates `defined` for an instruction. Calls `undefined` for each slot that the instruction reads and
    /// that may be undefined.
    fn step(&self, pc: u32, defined: &mut BySlot<bool>, undefined: &mut impl FnMut(Slot)) {
        let Step { data, effect, defines, guarded, followed } = &self.steps[pc as usize];
        data.iter().chain(effect).filter(|slot| !defined[**slot]).for_each(|slot| undefined(*slot));
        let clean = !followed && data.iter().all(|slot| defined[*slot]);
        for slot in defines.iter().filter(|_| !clean || !guarded) {
            defined[*slot] = clean;
        }
    }
}
