//! Logic on 32 bits, bit fields, permutations, funnel shifts and byte dot products (PTX ISA, "Logic and Shift
//! Instructions", "prmt", "dp4a", "dp2a"). Plain `and`, `or`, `xor`, `not`, `shl` and `shr` are in the group
//! of arithmetic.

use smallvec::smallvec;

use super::BoolOp;
use super::requirement::{need, when};
use super::signature::{read, uniform, value, write};
use super::syntax::names;
use crate::verify::rules::{constant, one_of, range};
use crate::verify::{Rule, fault};
use crate::{Operand, Signature, SlotKind, Type};

/// Direction of a funnel shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShiftDirection {
    Left,
    Right,
}

/// How a shift amount beyond the width is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShfMode {
    Clamp,
    Wrap,
}

/// `prmt` modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum PrmtMode {
    Generic,
    /// `.f4e`
    F4e,
    /// `.b4e`
    B4e,
    /// `.rc8`
    Rc8,
    /// `.ecl`
    Ecl,
    /// `.ecr`
    Ecr,
    /// `.rc16`
    Rc16,
}

/// Which bytes of `b` a `dp2a` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum DotHalf {
    Lo,
    Hi,
}

names! {
    ShiftDirection { Left = "l", Right = "r" }
    ShfMode { Clamp = "clamp", Wrap = "wrap" }
    DotHalf { Lo = "lo", Hi = "hi" }
}

impl PrmtMode {
    /// Every mode with its suffix in PTX text.
    pub const SUFFIXES: &'static [(PrmtMode, &'static str)] = &[
        (PrmtMode::Generic, ""),
        (PrmtMode::F4e, "f4e"),
        (PrmtMode::B4e, "b4e"),
        (PrmtMode::Rc8, "rc8"),
        (PrmtMode::Ecl, "ecl"),
        (PrmtMode::Ecr, "ecr"),
        (PrmtMode::Rc16, "rc16"),
    ];
}

impl super::syntax::Start for PrmtMode {
    const START: PrmtMode = PrmtMode::Generic;
}

const CLAMP: &str = "`.clamp` or `.wrap`";

instructions! { ($) logic logic_list

    /// `d, a, b, c, immLut`; always `.b32`. With a `BoolOp`: `d|p, a, b, c, immLut, q`, where `p` is `(d ≠ 0)
    /// op q`. PTX ISA, "lop3".
    Lop3(combine: Option<BoolOp>) => {
        text: |m| { m.head("lop3")?; m.maybe(combine, BoolOp::NAMES)?; m.word("b32") },
        operands: {
            let mut s = uniform(Type::B32, 3);
            s.push(read(SlotKind::Constant));
            if combine.is_some() {
                s[0] = write(SlotKind::Pair(Type::B32));
                s.push(read(value(Type::Pred)));
            }
            s
        },
        needs: when(combine.is_some(), need(82, 75)),
        check: |inst| {
            if combine.is_some() && !matches!(inst.operands[0], Operand::Pair(..)) {
                return fault(Rule::Operand, "lop3 with a predicate writes two results: d|p");
            }
            range("the truth table of lop3", constant(inst, 4), 0, 255)
        },
    }

    /// Funnel shift: `d, a, b, c`; always `.b32`. PTX ISA, "shf".
    Shf(direction: ShiftDirection, mode: ShfMode) => {
        text: |m| {
            m.head("shf")?;
            m.one(direction, "`.l` or `.r`", ShiftDirection::NAMES)?;
            m.one(mode, CLAMP, ShfMode::NAMES)?;
            m.word("b32")
        },
        operands: uniform(Type::B32, 3),
    }

    /// Bit-field extract: `d, a, pos, len`. PTX ISA, "bfe".
    Bfe(ty: Type) => {
        text: |m| { m.head("bfe")?; m.ty(ty) },
        operands: bit_field(ty, 1),
        accepts: one_of("bfe", ty, &[Type::U32, Type::U64, Type::S32, Type::S64]),
    }

    /// Bit-field insert: `d, a, b, pos, len`. PTX ISA, "bfi".
    Bfi(ty: Type) => {
        text: |m| { m.head("bfi")?; m.ty(ty) },
        operands: bit_field(ty, 2),
        accepts: one_of("bfi", ty, &[Type::B32, Type::B64]),
    }

    /// Byte permute: `d, a, b, selector`; always `.b32`. PTX ISA, "prmt".
    Prmt(mode: PrmtMode) => {
        text: |m| {
            m.head("prmt")?;
            m.word("b32")?;
            m.optional(mode, PrmtMode::Generic, PrmtMode::SUFFIXES)
        },
        operands: uniform(Type::B32, 3),
    }

    /// Bit mask: `d, pos, len`; always `.b32`. PTX ISA, "bmsk".
    Bmsk(mode: ShfMode) => {
        text: |m| { m.head("bmsk")?; m.one(mode, CLAMP, ShfMode::NAMES)?; m.word("b32") },
        operands: uniform(Type::B32, 2),
        needs: need(76, 75),
    }

    /// Sign- or zero-extend from bit `b`: `d, a, b`. PTX ISA, "szext".
    Szext(mode: ShfMode, ty: Type) => {
        text: |m| { m.head("szext")?; m.one(mode, CLAMP, ShfMode::NAMES)?; m.ty(ty) },
        operands: smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))],
        accepts: one_of("szext", ty, &[Type::U32, Type::S32]),
        needs: need(76, 75),
    }

    /// Find the n-th set bit: `d, mask, base, offset`; always `.b32`. PTX ISA, "fns".
    Fns => {
        text: |m| { m.head("fns")?; m.word("b32") },
        operands: uniform(Type::B32, 3),
    }

    /// Four-way byte dot product: `d, a, b, c`, with the types of `a` and `b`. PTX ISA, "dp4a".
    Dp4a(a: Type, b: Type) => {
        text: |m| { m.head("dp4a")?; m.ty(a)?; m.ty(b) },
        operands: dot_product(a, b),
        accepts: dot_types(a, b),
    }

    /// Two-way dot product of halves and bytes: `d, a, b, c`. PTX ISA, "dp2a".
    Dp2a(half: DotHalf, a: Type, b: Type) => {
        text: |m| { m.head("dp2a")?; m.one(half, "`.lo` or `.hi`", DotHalf::NAMES)?; m.ty(a)?; m.ty(b) },
        operands: dot_product(a, b),
        accepts: dot_types(a, b),
    }
}

/// `bfe` and `bfi`: sources of type `ty`, then position and length.
fn bit_field(ty: Type, sources: usize) -> Signature {
    let mut s = uniform(ty, sources);
    s.extend([read(value(Type::U32)), read(value(Type::U32))]);
    s
}

fn dot_product(a: Type, b: Type) -> Signature {
    let sum = if a.is_signed() || b.is_signed() { Type::S32 } else { Type::U32 };
    smallvec![write(value(sum)), read(value(Type::B32)), read(value(Type::B32)), read(value(sum))]
}

fn dot_types(a: Type, b: Type) -> Result<(), String> {
    one_of("a dot product", a, &[Type::U32, Type::S32])?;
    one_of("a dot product", b, &[Type::U32, Type::S32])
}
