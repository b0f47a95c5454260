//! The operands that an operation takes: their positions, flow, kinds and types.

use smallvec::{SmallVec, smallvec};

use crate::{Base, Instruction, Operand, Reg, Space, Type};

/// Whether an instruction reads or writes an operand. Results come first in every instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// A source.
    Read,
    /// A result.
    Write,
    /// A result that is also a source: the accumulators of `wgmma`.
    ReadWrite,
}

/// What an operand position accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// A register of exactly this width. A source may also be an immediate, a special register or a symbol.
    Value(Type),
    /// Like `Value`, but the register may be wider than the type (`ld`, `st`, `cvt`; PTX ISA, "Operand Size
    /// Exceeding Instruction-Type Size").
    Wide(Type),
    /// A scalar, or a vector that `mov` packs or unpacks.
    Packable(Type),
    /// `{…}` with this number of elements.
    Vector(Type, usize),
    /// As `Vector`, but the registers may be wider than the type.
    WideVector(Type, usize),
    /// A result of the first type, and optionally `|p`, a predicate.
    Pair(Type),
    /// An address into a state space.
    Address(Space),
    /// An address of tensor memory: brackets around a register of 32 bits, with an offset.
    TensorAddress,
    /// An integer constant.
    Constant,
    /// A branch target.
    Label,
    /// The targets of `brx.idx`.
    Labels,
    /// The callee of a call.
    Callee,
    /// Results or arguments of a call.
    List,
}

/// An operand position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Whether the operand is read or written.
    pub flow: Flow,
    /// What the position accepts.
    pub kind: SlotKind,
    /// Whether the operand may be left out.
    pub optional: bool,
}

/// The operand positions of an operation, in order.
pub type Signature = SmallVec<[Slot; 5]>;

/// A result.
pub(crate) const fn write(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Write, kind, optional: false }
}

/// A source.
pub(crate) const fn read(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Read, kind, optional: false }
}

/// A source that may be left out.
pub(crate) const fn optional(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Read, kind, optional: true }
}

/// A register; as a source also an immediate.
pub(crate) const fn value(ty: Type) -> SlotKind {
    SlotKind::Value(ty)
}

/// An address, which is always a source.
pub(crate) const fn address(space: Space) -> Slot {
    read(SlotKind::Address(space))
}

/// A cache policy.
pub(crate) const POLICY: SlotKind = SlotKind::Value(Type::B64);
/// A member mask, one bit per lane.
pub(crate) const MASK: SlotKind = SlotKind::Value(Type::B32);

/// `d, a, b, …`, all of one type.
pub(crate) fn uniform(ty: Type, sources: usize) -> Signature {
    let mut slots = [read(value(ty)); 5];
    slots[0] = write(value(ty));
    Signature::from_slice(&slots[..=sources])
}

/// The type of a register that carries one element or one pack of `ty`.
pub(crate) fn carrier(ty: Type) -> Type {
    match ty {
        Type::Tf32 => Type::B32,
        Type::Bf16 => Type::B16,
        Type::Bf16x2 | Type::F16x2 | Type::U16x2 | Type::S16x2 => Type::B32,
        Type::E4m3x2 | Type::E5m2x2 => Type::B16,
        Type::F32x2 => Type::B64,
        other => other,
    }
}

/// A scalar or a vector of `elements`.
pub(crate) fn scalar_or_vector(ty: Type, elements: u8) -> SlotKind {
    let ty = carrier(ty);
    if elements > 1 { SlotKind::Vector(ty, elements.into()) } else { value(ty) }
}

/// The type of the registers that hold elements of a matrix.
pub(crate) fn matrix_element(ty: Type) -> Type {
    match ty {
        Type::F32 | Type::F64 | Type::S32 => ty,
        _ => Type::B32,
    }
}

/// `{d…}, {a…}, {b…}, {c…}`, from types and register counts in the order A, B, C, D.
pub(crate) fn matrix_product(types: [Type; 4], registers: [usize; 4]) -> Signature {
    let fragment = |i: usize| SlotKind::Vector(matrix_element(types[i]), registers[i]);
    smallvec![write(fragment(3)), read(fragment(0)), read(fragment(1)), read(fragment(2))]
}

impl Instruction {
    /// Calls `f` for each register that the instruction reads: sources, address bases and the guard. When the
    /// guard is false, a result keeps its old value; this does not count as a read.
    pub fn registers_read(&self, mut f: impl FnMut(Reg)) {
        if let Some(guard) = self.guard {
            f(guard.reg);
        }
        self.each(&self.op.signature(), Flow::Read, &mut f);
    }

    /// Calls `f` for each register that the instruction writes.
    pub fn registers_written(&self, mut f: impl FnMut(Reg)) {
        self.each(&self.op.signature(), Flow::Write, &mut f);
    }

    /// Calls `f` for each register in an operand of that flow, for a caller that has the signature.
    pub(crate) fn each(&self, signature: &Signature, flow: Flow, f: &mut impl FnMut(Reg)) {
        for (i, operand) in self.operands.iter().enumerate() {
            // A missing optional operand in the middle (`bar.red`) shifts only sources, which all have the
            // same flow.
            let here = signature.get(i).map_or(Flow::Read, |slot| slot.flow);
            if here == flow || here == Flow::ReadWrite {
                registers(operand, f);
            } else if flow == Flow::Read
                && let Operand::Address(address) = operand
                && let Base::Reg(reg) = address.base
            {
                f(reg);
            }
        }
    }
}

fn registers(operand: &Operand, f: &mut impl FnMut(Reg)) {
    match operand {
        Operand::Reg(reg) | Operand::Not(reg) => f(*reg),
        Operand::Pair(a, b) => [a, b].into_iter().flatten().for_each(|reg| f(*reg)),
        Operand::Vector(parts) | Operand::List(parts) => parts.iter().for_each(|part| registers(part, f)),
        Operand::Address(address) => {
            if let Base::Reg(reg) = address.base {
                f(reg);
            }
        }
        Operand::Sink
        | Operand::Imm(_)
        | Operand::Special(_)
        | Operand::Symbol(..)
        | Operand::Label(_)
        | Operand::Labels(_)
        | Operand::Function(_) => {}
    }
}
