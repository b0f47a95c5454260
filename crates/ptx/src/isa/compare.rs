//! Comparison and selection (PTX ISA, "Comparison and Selection Instructions" and "testp").

use smallvec::smallvec;

use super::is_bf16;
use super::requirement::{need, when};
use super::signature::{carrier, read, uniform, value, write};
use super::syntax::names;
use crate::verify::rules::{ensure, one_of};
use crate::{Signature, SlotKind, Type};

/// Comparison. The `U` forms are true when either operand is NaN; `Lo` to `Hs` are unsigned integer forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum CmpOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Lo,
    Ls,
    Hi,
    Hs,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// How the result of a comparison is combined with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BoolOp {
    And,
    Or,
    Xor,
}

/// `testp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum TestpOp {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

names! {
    CmpOp {
        Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge", Lo = "lo", Ls = "ls", Hi = "hi",
        Hs = "hs",
        Equ = "equ", Neu = "neu", Ltu = "ltu", Leu = "leu", Gtu = "gtu", Geu = "geu", Num = "num",
        Nan = "nan",
    }
    BoolOp { And = "and", Or = "or", Xor = "xor" }
    TestpOp {
        Finite = "finite", Infinite = "infinite", Number = "number", NotANumber = "notanumber",
        Normal = "normal",
        Subnormal = "subnormal",
    }
}

instructions! { ($) compare compare_list

    /// Compares and writes predicates: `p[|q], a, b, c?`. The predicate `c` is present exactly when `combine`
    /// is. PTX ISA, "setp".
    Setp {
        /// The comparison.
        cmp: CmpOp,
        /// How the result is combined with the predicate `c`.
        combine: Option<BoolOp>,
        /// Type of `a` and `b`.
        ty: Type,
        /// `.ftz`.
        ftz: bool,
    } => {
        text: |m| {
            m.head("setp")?;
            m.one(cmp, COMPARISON, CmpOp::NAMES)?;
            m.maybe(combine, BoolOp::NAMES)?;
            m.flag(ftz, "ftz")?;
            m.ty(ty)
        },
        operands: comparison(SlotKind::Pair(Type::Pred), ty, combine.is_some()),
        accepts: comparable("setp", cmp, ty, ftz),
        needs: when(is_bf16(ty), need(78, 90)),
    }

    /// Compares and writes a register, all ones or 1.0 for true: `d, a, b, c?`. PTX ISA, "set".
    Set {
        /// The comparison.
        cmp: CmpOp,
        /// How the result is combined with the predicate `c`.
        combine: Option<BoolOp>,
        /// Type of `d`.
        to: Type,
        /// Type of `a` and `b`.
        ty: Type,
        /// `.ftz`.
        ftz: bool,
    } => {
        text: |m| {
            m.head("set")?;
            m.one(cmp, COMPARISON, CmpOp::NAMES)?;
            m.maybe(combine, BoolOp::NAMES)?;
            m.flag(ftz, "ftz")?;
            m.ty(to)?;
            m.ty(ty)
        },
        operands: comparison(value(carrier(to)), ty, combine.is_some()),
        accepts: {
            comparable("set", cmp, ty, ftz)?;
            let to_fits = match (to, ty) {
                (Type::U32 | Type::S32, _) => true,
                (Type::F16x2 | Type::Bf16x2, _) | (_, Type::F16x2 | Type::Bf16x2) => to == ty,
                _ => matches!(to, Type::F32 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16),
            };
            ensure(to_fits, || format!("set.{ty} has no result type .{to}"))
        },
        needs: when(is_bf16(ty), need(78, 90)),
    }

    /// `d, a, b, p`: `a` if `p` is true, else `b`. PTX ISA, "selp".
    Selp(ty: Type) => {
        text: |m| { m.head("selp")?; m.ty(ty) },
        operands: {
            let mut s = uniform(ty, 2);
            s.push(read(value(Type::Pred)));
            s
        },
        accepts: one_of("selp", ty, &SELECTABLE),
    }

    /// `d, a, b, c`: `a` if `c ≥ 0`, else `b`. PTX ISA, "slct".
    Slct {
        /// Type of `d`, `a`, `b`.
        ty: Type,
        /// Type of `c`: s32 or f32.
        cond: Type,
        /// `.ftz`.
        ftz: bool,
    } => {
        text: |m| { m.head("slct")?; m.flag(ftz, "ftz")?; m.ty(ty)?; m.ty(cond) },
        operands: {
            let mut s = uniform(ty, 2);
            s.push(read(value(cond)));
            s
        },
        accepts: {
            one_of("slct", ty, &SELECTABLE)?;
            ensure(matches!(cond, Type::S32 | Type::F32), || "the condition of slct is .s32 or .f32".into())?;
            ensure(!ftz || cond == Type::F32, || "slct takes .ftz with an .f32 condition only".into())
        },
    }

    /// `p, a`. PTX ISA, "testp".
    Testp(test: TestpOp, ty: Type) => {
        text: |m| { m.head("testp")?; m.one(test, "a test such as `.finite`", TestpOp::NAMES)?; m.ty(ty) },
        operands: smallvec![write(value(Type::Pred)), read(value(ty))],
        accepts: one_of("testp", ty, &[Type::F32, Type::F64]),
    }
}

const COMPARISON: &str = "a comparison";

const SELECTABLE: [Type; 11] = [
    Type::B16,
    Type::B32,
    Type::B64,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F32,
    Type::F64,
];

fn comparison(to: SlotKind, ty: Type, combine: bool) -> Signature {
    let ty = value(carrier(ty));
    let mut s: Signature = smallvec![write(to), read(ty), read(ty)];
    if combine {
        s.push(read(value(Type::Pred)));
    }
    s
}

fn comparable(name: &str, cmp: CmpOp, ty: Type, ftz: bool) -> Result<(), String> {
    use CmpOp::{Eq, Equ, Ge, Geu, Gt, Gtu, Hi, Hs, Le, Leu, Lo, Ls, Lt, Ltu, Nan, Ne, Neu, Num};
    let comparable = ty.bits() >= 16
        && !matches!(
            ty,
            Type::B128 | Type::Tf32 | Type::F32x2 | Type::E4m3x2 | Type::E5m2x2 | Type::U16x2 | Type::S16x2
        );
    ensure(comparable, || format!("{name} has no type .{ty}"))?;
    ensure(!ftz || matches!(ty, Type::F32 | Type::F16 | Type::F16x2), || {
        format!("{name}.{ty} does not take .ftz")
    })?;
    let has = match cmp {
        Eq | Ne => true,
        Lt | Le | Gt | Ge => !ty.is_bits(),
        Lo | Ls | Hi | Hs => ty.is_integer() && !ty.is_signed(),
        Equ | Neu | Ltu | Leu | Gtu | Geu | Num | Nan => ty.is_float(),
    };
    ensure(has, || format!(".{} does not compare .{ty}", cmp.name()))
}
