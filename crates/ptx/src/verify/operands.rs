//! Checks the number, kinds, types and widths of operands, and addresses.

use crate::{
    Address, Base, Body, Flow, Imm, Instruction, Op, Operand, Reg, Signature, Slot, SlotKind, Space,
    SpecialReg, Statement, TensorMapSpec, Type,
};

use super::symbols::{Scope, Symbol};
use super::{Fault, Rule, fault};

/// Checks the guard, and each operand against its position.
pub(super) fn check(body: &Body, inst: &Instruction, scope: &Scope<'_>) -> Result<(), Fault> {
    let checker = Checker { body, inst, scope };
    if let Some(guard) = inst.guard
        && checker.register(guard.reg)? != Type::Pred
    {
        return fault(Rule::Type, "a guard is a .pred register");
    }
    for (position, (slot, operand)) in matched(inst)?.into_iter().zip(&inst.operands).enumerate() {
        checker.operand(position, slot, operand)?;
    }
    Ok(())
}

/// The positions of the operands. When operands are missing, the last optional positions are skipped; such a
/// position may stand in the middle (`bar.red`).
fn matched(inst: &Instruction) -> Result<Signature, Fault> {
    let mut slots = inst.op.signature();
    let (given, most) = (inst.operands.len(), slots.len());
    let least = slots.iter().filter(|slot| !slot.optional).count();
    if given < least || given > most {
        let expected = if least == most { format!("{least}") } else { format!("{least} to {most}") };
        return fault(Rule::Arity, format!("{given} operands; the operation takes {expected}"));
    }
    while slots.len() > given {
        match slots.iter().rposition(|slot| slot.optional) {
            Some(i) => slots.remove(i),
            None => break,
        };
    }
    Ok(slots)
}

/// Whether a register of type `have` is accepted where the instruction takes `want`, apart from widths.
fn agrees(want: Type, have: Type) -> bool {
    if want == Type::Pred || have == Type::Pred {
        return want == have;
    }
    let packed = matches!(have, Type::F16x2 | Type::Bf16x2 | Type::F16 | Type::Bf16);
    want.is_bits() || have.is_bits() || want == have || (want.is_integer() && have.is_integer() && !packed)
}

struct Checker<'a> {
    body: &'a Body,
    inst: &'a Instruction,
    scope: &'a Scope<'a>,
}

impl Checker<'_> {
    fn register(&self, reg: Reg) -> Result<Type, Fault> {
        match self.body.registers.get(reg.0 as usize) {
            Some(register) => Ok(register.ty),
            None => fault(Rule::Operand, format!("register {} is not declared", reg.0)),
        }
    }

    fn operand(&self, position: usize, slot: Slot, operand: &Operand) -> Result<(), Fault> {
        match slot.kind {
            SlotKind::Value(ty) => self.value(slot.flow, ty, false, operand),
            SlotKind::Wide(ty) => self.value(slot.flow, ty, true, operand),
            SlotKind::Packable(ty) => self.packable(slot.flow, ty, operand),
            SlotKind::Vector(ty, n) => self.vector(slot.flow, ty, n, false, operand),
            SlotKind::WideVector(ty, n) => self.vector(slot.flow, ty, n, true, operand),
            SlotKind::Pair(ty) => self.pair(ty, operand),
            SlotKind::Address(space) => match operand {
                Operand::Address(address) => self.address(position, space, address),
                _ => fault(Rule::Operand, "expected an address in brackets"),
            },
            SlotKind::TensorAddress => match operand {
                Operand::Address(Address { base: Base::Reg(reg), .. }) => self.typed(*reg, Type::B32, false),
                Operand::Address(Address { base: Base::Absolute, .. }) => Ok(()),
                _ => fault(Rule::Operand, "expected an address of tensor memory in brackets"),
            },
            SlotKind::Constant => match operand {
                Operand::Imm(Imm::Int(_)) => Ok(()),
                _ => fault(Rule::Operand, "expected an integer constant"),
            },
            SlotKind::Label => match operand {
                Operand::Label(label) => self.label(label.0),
                _ => fault(Rule::Operand, "expected a label"),
            },
            SlotKind::Labels => match operand {
                Operand::Labels(labels) if !labels.is_empty() => {
                    labels.iter().try_for_each(|l| self.label(l.0))
                }
                _ => fault(Rule::Operand, "expected a list of labels"),
            },
            SlotKind::Callee => match operand {
                Operand::Function(_) => Ok(()),
                _ => fault(Rule::Operand, "expected the name of a function"),
            },
            SlotKind::List => match operand {
                Operand::List(_) => Ok(()),
                _ => fault(Rule::Operand, "expected a list in parentheses"),
            },
        }
    }

    fn label(&self, label: u32) -> Result<(), Fault> {
        match self.body.labels.get(label as usize) {
            Some(_) => Ok(()),
            None => fault(Rule::Label, format!("label {label} is not declared")),
        }
    }

    fn value(&self, flow: Flow, ty: Type, wide: bool, operand: &Operand) -> Result<(), Fault> {
        match (operand, flow) {
            (Operand::Reg(reg), _) => self.typed(*reg, ty, wide),
            (Operand::Not(reg), Flow::Read) if ty == Type::Pred => self.typed(*reg, ty, wide),
            (Operand::Not(_), Flow::Read) => fault(Rule::Operand, "only a predicate source can be negated"),
            (Operand::Sink, Flow::Write) => Ok(()),
            (Operand::Imm(imm), Flow::Read) => immediate(ty, *imm),
            (Operand::Special(register), Flow::Read) => special(ty, *register),
            (Operand::Symbol(name, _), Flow::Read) => self.symbol(ty, name),
            (Operand::Vector(_), _) => fault(Rule::Vector, "expected one value, found a vector"),
            (_, Flow::Write | Flow::ReadWrite) => fault(Rule::Operand, "expected a register"),
            _ => fault(Rule::Operand, "expected a register or an immediate"),
        }
    }

    fn typed(&self, reg: Reg, ty: Type, wide: bool) -> Result<(), Fault> {
        let have = self.register(reg)?;
        let fits = if wide && ty != Type::Pred { have.bits() >= ty.bits() } else { have.bits() == ty.bits() };
        // A register wider than the type holds an extended integer or bits. Floats are never extended.
        let agreed = agrees(ty, have) && (have.bits() == ty.bits() || !ty.is_float());
        if fits && agreed {
            return Ok(());
        }
        let name = &self.body.registers[reg.0 as usize].name;
        fault(Rule::Type, format!("{name} is .{have}; expected .{ty}"))
    }

    /// Checks an address of a variable or function as a value: its type must have 32 or 64 bits.
    fn symbol(&self, ty: Type, name: &str) -> Result<(), Fault> {
        if self.scope.get(name).is_none() {
            return fault(Rule::Symbol, format!("{name} is not declared"));
        }
        if matches!(ty.bits(), 32 | 64) && (ty.is_integer() || ty.is_bits()) {
            return Ok(());
        }
        fault(Rule::Type, format!("the address {name} is not a .{ty}"))
    }

    fn packable(&self, flow: Flow, ty: Type, operand: &Operand) -> Result<(), Fault> {
        let Operand::Vector(parts) = operand else { return self.value(flow, ty, false, operand) };
        let other_vector = self.inst.operands.iter().filter(|o| matches!(o, Operand::Vector(_))).count() > 1;
        if other_vector {
            return fault(Rule::Vector, "mov packs or unpacks: only one side can be a vector");
        }
        let part = match (ty, parts.len()) {
            (Type::B16, 2) => Type::B8,
            (Type::B32, 2) => Type::B16,
            (Type::B32, 4) => Type::B8,
            (Type::B64, 2) => Type::B32,
            (Type::B64, 4) => Type::B16,
            (Type::B128, 2) => Type::B64,
            (Type::B128, 4) => Type::B32,
            _ => return fault(Rule::Vector, format!(".{ty} does not consist of {} elements", parts.len())),
        };
        // Bytes are packed from, and unpacked to, 16-bit registers.
        parts.iter().try_for_each(|operand| self.value(flow, part, part == Type::B8, operand))
    }

    fn vector(&self, flow: Flow, ty: Type, n: usize, wide: bool, operand: &Operand) -> Result<(), Fault> {
        let Operand::Vector(parts) = operand else {
            return fault(Rule::Vector, format!("expected a vector of {n} .{ty} in braces"));
        };
        if parts.len() != n {
            return fault(Rule::Vector, format!("{} elements; expected {n} of .{ty}", parts.len()));
        }
        parts.iter().try_for_each(|operand| self.value(flow, ty, wide, operand))
    }

    fn pair(&self, ty: Type, operand: &Operand) -> Result<(), Fault> {
        let Operand::Pair(first, second) = operand else {
            return self.value(Flow::Write, ty, false, operand);
        };
        first.map_or(Ok(()), |reg| self.typed(reg, ty, false))?;
        second.map_or(Ok(()), |reg| self.typed(reg, Type::Pred, false))
    }

    fn address(&self, position: usize, space: Space, address: &Address) -> Result<(), Fault> {
        let op = &self.inst.op;
        if op.tensor_map_operand() == Some(position) && address.offset != 0 {
            return fault(Rule::Address, "the address of a tensor map cannot have an offset");
        }
        let (bytes, unit) = (op.accessed_bytes(position), alignment(op, position));
        match &address.base {
            Base::Reg(reg) => self.base(space, *reg),
            Base::Absolute => aligned(unit, unit.unwrap_or(1), address.offset),
            Base::Symbol(name) => {
                let Some(symbol) = self.scope.get(name) else {
                    return fault(Rule::Symbol, format!("{name} is not declared"));
                };
                reachable(space, name, &symbol)?;
                let (align, size) = symbol.layout().unwrap_or((1, None));
                aligned(unit, align, address.offset)?;
                inside(bytes, size, address.offset, name)
            }
        }
    }

    fn base(&self, space: Space, reg: Reg) -> Result<(), Fault> {
        let ty = self.register(reg)?;
        let integral = ty.is_integer() || ty.is_bits();
        let narrow = !matches!(space, Space::Generic | Space::Global);
        if integral && (ty.bits() == 64 || (ty.bits() == 32 && narrow)) {
            return Ok(());
        }
        let widths = if narrow { "32 or 64" } else { "64" };
        let name = &self.body.registers[reg.0 as usize].name;
        fault(Rule::Type, format!("{name} is .{ty}; an address here is an integer of {widths} bits"))
    }
}

/// The alignment in bytes of the address at a position: the size of the access, except for a box in shared
/// memory and for a tensor map (PTX ISA, "cp.async.bulk.tensor").
fn alignment(op: &Op, position: usize) -> Option<u32> {
    match op.tensor_map_operand() {
        Some(map) if map == position => Some(TensorMapSpec::ALIGN),
        Some(_) if position != 3 => Some(128),
        _ => op.accessed_bytes(position),
    }
}

/// Rejects an offset that is misaligned for every base that is aligned to `align`.
fn aligned(bytes: Option<u32>, align: u32, offset: i64) -> Result<(), Fault> {
    let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else { return Ok(()) };
    if offset.rem_euclid(i64::from(align.min(bytes).max(1))) == 0 {
        return Ok(());
    }
    fault(Rule::Address, format!("offset {offset} is misaligned for an access of {bytes} bytes"))
}

fn inside(bytes: Option<u32>, size: Option<u64>, offset: i64, name: &str) -> Result<(), Fault> {
    let (Some(bytes), Some(size)) = (bytes, size) else { return Ok(()) };
    let end = u64::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes.into()));
    if end.is_some_and(|end| end <= size) {
        return Ok(());
    }
    fault(
        Rule::Address,
        format!("{bytes} bytes at offset {offset} are outside {name}, which has {size} bytes"),
    )
}

/// Checks that a symbol is in the space that the instruction names. A generic address may name a variable in
/// global memory, because the generic address of such a variable equals its address.
fn reachable(space: Space, name: &str, symbol: &Symbol<'_>) -> Result<(), Fault> {
    let Some(own) = symbol.space() else {
        return fault(Rule::Symbol, format!("{name} is a function, not memory"));
    };
    let fits = match space {
        Space::Generic => own == Space::Global,
        Space::SharedCluster => own == Space::Shared,
        _ => own == space,
    };
    if fits {
        return Ok(());
    }
    let wanted = if space == Space::Generic { "a generic address" } else { space.suffix() };
    fault(Rule::Symbol, format!("{name} is in {}; expected {wanted}", own.suffix()))
}

fn immediate(ty: Type, imm: Imm) -> Result<(), Fault> {
    let fits = match imm {
        Imm::Int(_) if ty.is_float() => {
            return fault(
                Rule::Type,
                format!("expected a .{ty}, found an integer; write 1.0, or the bits as in 0f3F800000"),
            );
        }
        Imm::Int(value) if ty.bits() < 64 => {
            let bits = ty.bits();
            (-(1i64 << (bits - 1).min(62))..=(1i64 << bits) - 1).contains(&value)
        }
        Imm::Int(_) => true,
        Imm::F32(_) => matches!(ty, Type::F32 | Type::B32 | Type::F64),
        Imm::F64(_) => matches!(ty, Type::F64 | Type::B64 | Type::F32 | Type::B32),
    };
    if fits { Ok(()) } else { fault(Rule::Type, format!("{imm} does not fit a .{ty}")) }
}

fn special(ty: Type, register: SpecialReg) -> Result<(), Fault> {
    let have = register.ty();
    // `%gridid` had 32 bits in early versions of PTX. Reading its low half is still legal.
    let fits = have.bits() == ty.bits() || register == SpecialReg::GridId;
    if fits && !ty.is_float() {
        return Ok(());
    }
    fault(Rule::Type, format!("{} is .{have}; expected .{ty}", register.name()))
}

/// Checks that each label in use is placed exactly once.
pub(super) fn labels(body: &Body) -> Vec<Fault> {
    let mut places = vec![0u32; body.labels.len()];
    let mut used = vec![false; body.labels.len()];
    for statement in &body.statements {
        match statement {
            Statement::Label(label) => places.get_mut(label.0 as usize).into_iter().for_each(|n| *n += 1),
            Statement::Inst(inst) => {
                for operand in &inst.operands {
                    let targets: &[crate::Label] = match operand {
                        Operand::Label(label) => std::slice::from_ref(label),
                        Operand::Labels(labels) => labels,
                        _ => &[],
                    };
                    for target in targets {
                        used.get_mut(target.0 as usize).into_iter().for_each(|used| *used = true);
                    }
                }
            }
            Statement::Pragma(_) => {}
        }
    }
    let faults = body.labels.iter().zip(places.iter().zip(used));
    let faults = faults.filter_map(|(name, (&places, used))| match places {
        0 if used => Some(format!("the label {name} is not placed")),
        2.. => Some(format!("the label {name} is placed {places} times")),
        _ => None,
    });
    faults.map(|message| (Rule::Label, message)).collect()
}
