//! Whether operands fit the positions of their operation: number, kind, type and width.

use super::Rule;
use crate::*;

/// What is wrong with one operand.
pub(super) type Wrong = (Rule, String);

/// The registers and variables that operands name.
pub(super) struct Scope<'m> {
    pub(super) body: &'m Body,
    /// The state space and size in bytes of a variable or parameter; `None` for a size that is not known.
    pub(super) find: &'m dyn Fn(&str) -> Option<Place>,
}

/// Where a name points.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) space: Space,
    pub(super) align: u32,
    /// Size in bytes, where it is known.
    pub(super) bytes: Option<u64>,
    pub(super) function: bool,
}

fn wrong<T>(rule: Rule, message: impl Into<String>) -> Result<T, Wrong> {
    Err((rule, message.into()))
}

/// Whether a register can hold a value of the instruction's type at the same width (PTX ISA, "Operand Type
/// Information"): untyped bits go with everything, signed with unsigned, a float with itself.
fn agree(inst: Type, register: Type) -> bool {
    inst.bits() == register.bits()
        && (inst == register
            || (inst.is_bits() && register != Type::Pred)
            || (register.is_bits() && inst != Type::Pred)
            || (inst.is_integer() && register.is_integer()))
}

/// As [`agree`], with registers that may be wider than the type; a float is never narrower than its register.
fn agree_wide(inst: Type, register: Type) -> bool {
    if inst.is_float() || register.is_float() || register == Type::Pred {
        return agree(inst, register);
    }
    register.bits() >= inst.bits()
}

/// Checks all operands of an instruction.
pub(super) fn check(inst: &Instruction, scope: &Scope<'_>) -> Result<(), Wrong> {
    let slots = inst.op.signature();
    let operands = &inst.operands;
    let required = slots.iter().filter(|slot| !slot.optional).count();
    if !(required..=slots.len()).contains(&operands.len()) {
        let wanted = if required == slots.len() {
            format!("{required}")
        } else {
            format!("{required} to {}", slots.len())
        };
        return wrong(Rule::Operands, format!("takes {wanted} operands, not {}", operands.len()));
    }
    // Beside `cp.async` only reductions of a barrier leave out an operand that is not the last.
    let middle =
        slots.iter().position(|slot| slot.optional).filter(|&at| slots[at..].iter().any(|s| !s.optional));
    let skip = |i: usize| match middle {
        Some(at) if operands.len() < slots.len() && i >= at => i + 1,
        // The size read may be left out before a policy.
        _ if i == 3 && operands.len() == 4 && matches!(inst.op, Op::CpAsync(c) if c.cache_hint) => 4,
        _ => i,
    };
    for (i, operand) in operands.iter().enumerate() {
        let slot = slots[skip(i)];
        scope
            .one(inst, slot, operand)
            .map_err(|(rule, message)| (rule, format!("operand {}: {message}", i + 1)))?;
    }
    hints(inst)
}

/// The cache policy stands there exactly when the mnemonic says so.
fn hints(inst: &Instruction) -> Result<(), Wrong> {
    let (hint, without) = match inst.op {
        Op::Ld(m) | Op::St(m) => (m.cache_hint, 2),
        Op::Red(a) => (a.cache_hint, 2),
        Op::Atom(a) => (a.cache_hint, if a.op == AtomicOp::Cas { 4 } else { 3 }),
        Op::CpAsync(c) => (c.cache_hint, if c.cache_hint { 3 } else { 4 }),
        _ => return Ok(()),
    };
    match (hint, inst.operands.len() > without) {
        (true, false) => wrong(Rule::Operands, "needs a cache policy with `.L2::cache_hint`"),
        (false, true) => wrong(Rule::Operands, "takes a cache policy with `.L2::cache_hint` only"),
        _ => Ok(()),
    }
}

impl Scope<'_> {
    fn register(&self, reg: Reg) -> Result<&Register, Wrong> {
        let found = self.body.registers.get(reg.0 as usize);
        found.ok_or_else(|| (Rule::Operands, format!("register {} is not declared", reg.0)))
    }

    fn one(&self, inst: &Instruction, slot: Slot, operand: &Operand) -> Result<(), Wrong> {
        match slot.kind {
            SlotKind::Value(ty) => self.value(inst, slot.flow, ty, operand, agree),
            SlotKind::Wide(ty) => self.value(inst, slot.flow, ty, operand, agree_wide),
            SlotKind::Packable(ty) => match operand {
                Operand::Vector(parts) => self.pack(inst, slot.flow, ty, parts),
                _ => self.value(inst, slot.flow, ty, operand, agree),
            },
            SlotKind::Vector(ty, count) => self.vector(inst, slot.flow, ty, count, operand, agree),
            SlotKind::WideVector(ty, count) => self.vector(inst, slot.flow, ty, count, operand, agree_wide),
            SlotKind::Pair(ty) => self.pair(ty, operand),
            SlotKind::Address(space) => self.address(inst, space, operand),
            SlotKind::Constant => match operand {
                Operand::Imm(Imm::Int(_)) => Ok(()),
                _ => wrong(Rule::Operands, "must be an integer constant"),
            },
            SlotKind::Label => self.label(operand),
            SlotKind::Labels => match operand {
                Operand::Labels(labels) if !labels.is_empty() => Ok(()),
                _ => wrong(Rule::Operands, "must be a list of labels"),
            },
            SlotKind::Callee | SlotKind::List => Ok(()),
        }
    }

    fn label(&self, operand: &Operand) -> Result<(), Wrong> {
        match operand {
            Operand::Label(_) => Ok(()),
            _ => wrong(Rule::Operands, "must be a label"),
        }
    }

    /// A scalar. `fits` says whether a register's type will do.
    fn value(
        &self,
        inst: &Instruction,
        flow: Flow,
        ty: Type,
        operand: &Operand,
        fits: fn(Type, Type) -> bool,
    ) -> Result<(), Wrong> {
        match (operand, flow) {
            (Operand::Reg(reg), _) => {
                let register = self.register(*reg)?;
                if fits(ty, register.ty) {
                    return Ok(());
                }
                let message = format!("`{}` is `.{}` where `.{ty}` is wanted", register.name, register.ty);
                wrong(Rule::Types, message)
            }
            (Operand::Not(reg), Flow::Read) if ty == Type::Pred && takes_negation(&inst.op) => {
                self.value(inst, flow, ty, &Operand::Reg(*reg), fits)
            }
            (Operand::Sink, Flow::Write) if drops_results(&inst.op) => Ok(()),
            (Operand::Imm(imm), Flow::Read) => immediate(ty, *imm),
            (Operand::Special(special), Flow::Read) => {
                if !matches!(inst.op, Op::Mov(_) | Op::Cvt(_)) {
                    return wrong(Rule::Operands, "a special register is read by `mov` and `cvt` only");
                }
                let from = special.ty();
                let narrowed = from == Type::U64 && ty.bits() == 32;
                if narrowed || fits(ty, from) || (from == Type::Pred && ty == Type::Pred) {
                    return Ok(());
                }
                wrong(Rule::Types, format!("`{}` is `.{from}` where `.{ty}` is wanted", special.name()))
            }
            (Operand::Symbol(name, _), Flow::Read) => {
                if !matches!(inst.op, Op::Mov(_) | Op::Cvta { .. }) {
                    return wrong(Rule::Operands, "an address is taken by `mov` and `cvta` only");
                }
                self.place(name)?;
                let holds =
                    matches!(ty, Type::B32 | Type::U32 | Type::B64 | Type::U64 | Type::S64 | Type::S32);
                if holds { Ok(()) } else { wrong(Rule::Types, format!("`.{ty}` cannot hold an address")) }
            }
            _ => wrong(Rule::Operands, format!("must be a register or constant of `.{ty}`")),
        }
    }

    fn place(&self, name: &str) -> Result<Place, Wrong> {
        (self.find)(name).ok_or_else(|| (Rule::Symbols, format!("`{name}` is not declared")))
    }

    fn vector(
        &self,
        inst: &Instruction,
        flow: Flow,
        ty: Type,
        count: usize,
        operand: &Operand,
        fits: fn(Type, Type) -> bool,
    ) -> Result<(), Wrong> {
        let Operand::Vector(parts) = operand else {
            return wrong(Rule::Operands, format!("must be a vector of {count}"));
        };
        if parts.len() != count {
            return wrong(Rule::Operands, format!("must have {count} elements, not {}", parts.len()));
        }
        for part in parts {
            let sink = *part == Operand::Sink && flow == Flow::Write && matches!(inst.op, Op::Ld(_));
            if !sink {
                self.value(inst, flow, ty, part, fits)?;
            }
        }
        Ok(())
    }

    /// `{…}` of `mov`: elements of one width that fill the type.
    fn pack(&self, inst: &Instruction, flow: Flow, ty: Type, parts: &[Operand]) -> Result<(), Wrong> {
        let bits = ty.bits() / parts.len().max(1) as u32;
        let element = match (parts.len(), bits) {
            (2 | 4, 8) => Type::B8,
            (2 | 4, 16) => Type::B16,
            (2 | 4, 32) => Type::B32,
            (2, 64) => Type::B64,
            _ => {
                return wrong(Rule::Operands, format!("{} elements do not make up `.{ty}`", parts.len()));
            }
        };
        for part in parts {
            if !(*part == Operand::Sink && flow == Flow::Write) {
                self.value(inst, flow, element, part, agree)?;
            }
        }
        Ok(())
    }

    fn pair(&self, ty: Type, operand: &Operand) -> Result<(), Wrong> {
        let halves = match *operand {
            Operand::Reg(reg) => [Some((reg, ty)), None],
            Operand::Pair(a, b) => [a.map(|reg| (reg, ty)), b.map(|reg| (reg, Type::Pred))],
            Operand::Sink => [None, None],
            _ => return wrong(Rule::Operands, "must be a register, or two joined by `|`"),
        };
        for (reg, ty) in halves.into_iter().flatten() {
            let register = self.register(reg)?;
            if !agree(ty, register.ty) {
                let message = format!("`{}` is `.{}` where `.{ty}` is wanted", register.name, register.ty);
                return wrong(Rule::Types, message);
            }
        }
        Ok(())
    }

    fn address(&self, inst: &Instruction, space: Space, operand: &Operand) -> Result<(), Wrong> {
        let Operand::Address(address) = operand else { return wrong(Rule::Operands, "must be an address") };
        if i32::try_from(address.offset).is_err() && address.base != Base::Absolute {
            return wrong(Rule::Immediates, format!("the offset {} does not fit 32 bits", address.offset));
        }
        let bytes = access_bytes(inst);
        match &address.base {
            Base::Reg(reg) => {
                let register = self.register(*reg)?;
                let small = matches!(
                    space,
                    Space::Shared | Space::SharedCluster | Space::Local | Space::Param | Space::Const
                );
                let fits = agree(Type::B64, register.ty) || (small && agree(Type::B32, register.ty));
                if register.ty.is_float() || !fits {
                    let wanted = if small { "32 or 64" } else { "64" };
                    let message = format!(
                        "`{}` is `.{}`; an address here has {wanted} bits",
                        register.name, register.ty
                    );
                    return wrong(Rule::Types, message);
                }
            }
            Base::Symbol(name) => {
                let place = self.place(name)?;
                if place.function || (space != Space::Generic && !same_memory(space, place.space)) {
                    let message = format!("`{name}` does not lie in `{}`", space.suffix());
                    return wrong(Rule::Symbols, message);
                }
                let end = address.offset.checked_add(bytes.into());
                let inside = address.offset >= 0
                    && place.bytes.is_none_or(|size| end.is_some_and(|end| end as u64 <= size));
                if !inside {
                    let message =
                        format!("bytes {} to {} lie outside `{name}`", address.offset, end.unwrap_or(0));
                    return wrong(Rule::Alignment, message);
                }
                if place.align >= bytes {
                    return aligned(address.offset, bytes);
                }
            }
            Base::Absolute => return aligned(address.offset, bytes),
        }
        Ok(())
    }
}

fn aligned(offset: i64, bytes: u32) -> Result<(), Wrong> {
    if bytes == 0 || offset % i64::from(bytes) == 0 {
        return Ok(());
    }
    wrong(Rule::Alignment, format!("the offset {offset} is not a multiple of the {bytes} bytes accessed"))
}

fn same_memory(space: Space, place: Space) -> bool {
    space == place || (space == Space::SharedCluster && place == Space::Shared)
}

/// Bytes that a thread moves; 0 where an address is not one thread's alone.
fn access_bytes(inst: &Instruction) -> u32 {
    match inst.op {
        Op::Ld(m) | Op::St(m) => m.bytes(),
        Op::Atom(a) | Op::Red(a) => a.ty.bytes() * u32::from(a.vector),
        Op::Mbarrier(_) => 8,
        _ => 0,
    }
}

/// Predicates that may be written `!p`.
fn takes_negation(op: &Op) -> bool {
    matches!(op, Op::Setp { .. } | Op::Set { .. } | Op::Vote(_) | Op::Bar { .. })
}

/// Instructions whose result may be `_`.
fn drops_results(op: &Op) -> bool {
    matches!(op, Op::Atom(_) | Op::Mbarrier(_))
}

/// A constant where `.ty` is wanted.
fn immediate(ty: Type, imm: Imm) -> Result<(), Wrong> {
    match imm {
        Imm::Int(value) if ty.is_bits() || ty.is_integer() || ty == Type::Pred => {
            let bits = ty.bits();
            if bits >= 64 {
                return Ok(());
            }
            let (low, high) = (-(1i64 << (bits - 1)), (1i64 << bits) - 1);
            if (low..=high).contains(&value) {
                return Ok(());
            }
            wrong(Rule::Immediates, format!("{value} does not fit `.{ty}`: {low} to {high}"))
        }
        Imm::Int(_) => wrong(Rule::Types, format!("an integer constant where `.{ty}` is wanted")),
        Imm::F32(_) if matches!(ty, Type::F32 | Type::F64 | Type::B32) => Ok(()),
        Imm::F64(_) if matches!(ty, Type::F32 | Type::F64 | Type::B64) => Ok(()),
        Imm::F32(_) | Imm::F64(_) => {
            wrong(Rule::Types, format!("a floating-point constant where `.{ty}` is wanted"))
        }
    }
}
