//! Exchanges between the lanes of a warp (PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync",
//! "activemask", "elect.sync").

use smallvec::smallvec;

use super::requirement::{need, need_specific};
use super::signature::{MASK, read, value, write};
use super::syntax::names;
use crate::verify::rules::{constant, ensure, member_mask, one_of};
use crate::verify::{Rule, fault};
use crate::{Operand, SlotKind, Type};

/// Direction of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShflMode {
    Up,
    Down,
    Bfly,
    Idx,
}

/// `vote.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum VoteMode {
    All,
    Any,
    Uni,
    Ballot,
}

/// `match.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatchMode {
    Any,
    All,
}

/// `redux.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ReduxOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
}

names! {
    ShflMode { Up = "up", Down = "down", Bfly = "bfly", Idx = "idx" }
    VoteMode { All = "all", Any = "any", Uni = "uni", Ballot = "ballot" }
    MatchMode { Any = "any", All = "all" }
    ReduxOp { Add = "add", Min = "min", Max = "max", And = "and", Or = "or", Xor = "xor" }
}

instructions! { ($) warp warp_list

    /// `d[|p], a, b, c, membermask`; always `.b32`. PTX ISA, "shfl.sync".
    Shfl(mode: ShflMode) => {
        text: |m| {
            m.head("shfl")?;
            m.sync()?;
            m.one(mode, "`.up`, `.down`, `.bfly` or `.idx`", ShflMode::NAMES)?;
            m.word("b32")
        },
        operands: smallvec![
            write(SlotKind::Pair(Type::B32)),
            read(value(Type::B32)),
            read(value(Type::B32)),
            read(value(Type::B32)),
            read(MASK)
        ],
        check: |inst| member_mask(constant(inst, 4)),
    }

    /// `d, a, membermask`: `d` is a predicate, or b32 for ballot; `a` is a predicate and may be negated. PTX
    /// ISA, "vote.sync".
    Vote(mode: VoteMode) => {
        text: |m| {
            m.head("vote")?;
            m.sync()?;
            m.one(mode, "`.all`, `.any`, `.uni` or `.ballot`", VoteMode::NAMES)?;
            m.word(if *mode == VoteMode::Ballot { "b32" } else { "pred" })
        },
        operands: {
            let to = if mode == VoteMode::Ballot { Type::B32 } else { Type::Pred };
            smallvec![write(value(to)), read(value(Type::Pred)), read(MASK)]
        },
        check: |inst| member_mask(constant(inst, 2)),
    }

    /// `d[|p], a, membermask`; `ty` is the type of `a`; `|p` is accepted with `all` only. PTX ISA,
    /// "match.sync".
    Match(mode: MatchMode, ty: Type) => {
        text: |m| {
            m.head("match")?;
            m.one(mode, "`.any` or `.all`", MatchMode::NAMES)?;
            m.sync()?;
            m.ty(ty)
        },
        operands: {
            let to = match mode {
                MatchMode::Any => value(Type::B32),
                MatchMode::All => SlotKind::Pair(Type::B32),
            };
            smallvec![write(to), read(value(ty)), read(MASK)]
        },
        accepts: one_of("match", ty, &[Type::B32, Type::B64]),
        check: |inst| member_mask(constant(inst, 2)),
    }

    /// `d, a, membermask`. PTX ISA, "redux.sync".
    Redux {
        /// The reduction.
        op: ReduxOp,
        /// Type of the operand.
        ty: Type,
        /// `.abs` (f32 only).
        abs: bool,
        /// `.NaN` (f32 only).
        nan: bool,
    } => {
        text: |m| {
            m.head("redux")?;
            m.sync()?;
            m.one(op, super::atomic::OPERATION, ReduxOp::NAMES)?;
            m.flag(abs, "abs")?;
            m.flag(nan, "NaN")?;
            m.ty(ty)
        },
        operands: smallvec![write(value(ty)), read(value(ty)), read(MASK)],
        accepts: redux(op, ty, abs || nan),
        needs: if ty == Type::F32 { need_specific(86, 100) } else { need(70, 80) },
        check: |inst| member_mask(constant(inst, 2)),
    }

    /// `d`: the mask of the lanes that execute together. PTX ISA, "activemask".
    Activemask => {
        text: |m| { m.head("activemask")?; m.word("b32") },
        operands: smallvec![write(value(Type::B32))],
    }

    /// `d|p, membermask`: elects one lane. PTX ISA, "elect.sync".
    Elect => {
        text: |m| { m.head("elect")?; m.sync() },
        operands: smallvec![write(SlotKind::Pair(Type::B32)), read(MASK)],
        needs: need(80, 90),
        check: |inst| {
            if !matches!(inst.operands[0], Operand::Pair(..)) {
                return fault(Rule::Operand, "elect writes two results: d|p");
            }
            member_mask(constant(inst, 1))
        },
    }
}

fn redux(op: ReduxOp, ty: Type, float_modifiers: bool) -> Result<(), String> {
    match op {
        ReduxOp::Add => one_of("redux.add", ty, &[Type::U32, Type::S32])?,
        ReduxOp::Min | ReduxOp::Max => one_of("redux.min and .max", ty, &[Type::U32, Type::S32, Type::F32])?,
        ReduxOp::And | ReduxOp::Or | ReduxOp::Xor => one_of("a bitwise redux", ty, &[Type::B32])?,
    }
    ensure(!float_modifiers || ty == Type::F32, || ".abs and .NaN of redux are for .f32".into())
}
