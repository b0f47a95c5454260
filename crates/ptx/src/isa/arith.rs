//! Arithmetic with one, two or three sources of one type, and arithmetic with the carry flag.

use smallvec::smallvec;

use super::requirement::{BASE, all, need, when};
use super::signature::{carrier, read, uniform, value, write};
use super::syntax::{Syntax, names, start};
use super::{is_bf16, is_half, is_pair};
use crate::Type;
use crate::verify::rules::{ensure, one_of};

/// Rounding of floating-point arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum Rounding {
    /// `.rn`: nearest even.
    Rn,
    /// `.rz`: toward zero.
    Rz,
    /// `.rm`: toward −∞.
    Rm,
    /// `.rp`: toward +∞.
    Rp,
}

/// Precision or rounding of an operation that has approximate forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// No modifier: `add.f32` (round to nearest even; ptxas may contract it), and all integer operations.
    #[default]
    Unspecified,
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    Rounded(Rounding),
    /// `.approx`.
    Approx,
    /// `.full` (div only).
    Full,
}

/// Modifiers of arithmetic instructions. The verifier checks which modifiers an operation accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FloatMods {
    /// Rounding or approximation.
    pub precision: Precision,
    /// `.ftz`: subnormal inputs and results become zero of the same sign.
    pub ftz: bool,
    /// `.sat`: floating-point results are clamped to [0, 1], results of integer add, sub and mad to the range
    /// of the type.
    pub sat: bool,
    /// `.relu`: negative results and NaN become 0 (f16 and bf16; min, max, fma).
    pub relu: bool,
    /// `.NaN` of min and max: a NaN input gives NaN.
    pub nan: bool,
    /// `.xorsign.abs` of min and max.
    pub xorsign_abs: bool,
    /// `.abs` of min and max with three sources.
    pub abs: bool,
}

impl FloatMods {
    /// No modifiers.
    pub const NONE: FloatMods = FloatMods {
        precision: Precision::Unspecified,
        ftz: false,
        sat: false,
        relu: false,
        nan: false,
        xorsign_abs: false,
        abs: false,
    };
    /// `.rn`.
    pub const RN: FloatMods = FloatMods { precision: Precision::Rounded(Rounding::Rn), ..FloatMods::NONE };
    /// `.rp`: rounded towards +∞.
    pub const RP: FloatMods = FloatMods { precision: Precision::Rounded(Rounding::Rp), ..FloatMods::NONE };
    /// `.approx.ftz`.
    pub const APPROX_FTZ: FloatMods =
        FloatMods { precision: Precision::Approx, ftz: true, ..FloatMods::NONE };
}

/// Operations with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum UnaryOp {
    Abs,
    Neg,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    /// `bfind`: position of the most significant non-sign bit.
    Bfind,
    /// `bfind.shiftamt`.
    BfindShiftamt,
    Rcp,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Lg2,
    Ex2,
    Tanh,
}

/// Operations with two sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BinaryOp {
    Add,
    Sub,
    /// Floating-point `mul`.
    Mul,
    /// `mul.lo`.
    MulLo,
    /// `mul.hi`.
    MulHi,
    /// `mul.wide`: the sources have the type in the text, the result is twice as wide.
    MulWide,
    /// `mul24.lo`.
    Mul24Lo,
    /// `mul24.hi`.
    Mul24Hi,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    /// `shl.bN`. The shift amount is a u32.
    Shl,
    /// `shr.{b,u,s}N`. The shift amount is a u32.
    Shr,
    Copysign,
}

/// Operations with three sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum TernaryOp {
    /// Floating-point `fma`.
    Fma,
    /// Floating-point `mad` (same as fma on sm_20 and later).
    Mad,
    /// `mad.lo`.
    MadLo,
    /// `mad.hi`.
    MadHi,
    /// `mad.wide`: `a` and `b` have the type in the text, `c` and the result are twice as wide.
    MadWide,
    /// `mad24.lo`.
    Mad24Lo,
    /// `mad24.hi`.
    Mad24Hi,
    /// `sad`: |a − b| + c.
    Sad,
    /// `min` with three sources.
    Min,
    /// `max` with three sources.
    Max,
}

/// Arithmetic with the carry flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum CarryOp {
    /// `add.cc`
    AddCc,
    /// `addc`
    Addc,
    /// `addc.cc`
    AddcCc,
    /// `sub.cc`
    SubCc,
    /// `subc`
    Subc,
    /// `subc.cc`
    SubcCc,
    /// `mad.lo.cc`
    MadLoCc,
    /// `mad.hi.cc`
    MadHiCc,
    /// `madc.lo`
    MadcLo,
    /// `madc.hi`
    MadcHi,
    /// `madc.lo.cc`
    MadcLoCc,
    /// `madc.hi.cc`
    MadcHiCc,
}

impl CarryOp {
    /// Whether the operation multiplies.
    pub const fn is_mad(self) -> bool {
        !matches!(
            self,
            CarryOp::AddCc
                | CarryOp::Addc
                | CarryOp::AddcCc
                | CarryOp::SubCc
                | CarryOp::Subc
                | CarryOp::SubcCc
        )
    }
}

names! {
    Rounding { Rn = "rn", Rz = "rz", Rm = "rm", Rp = "rp" }
    UnaryOp {
        Abs = "abs", Neg = "neg", Not = "not", Cnot = "cnot", Popc = "popc", Clz = "clz", Brev = "brev",
        Bfind = "bfind", BfindShiftamt = "bfind.shiftamt", Rcp = "rcp", Sqrt = "sqrt", Rsqrt = "rsqrt",
        Sin = "sin",
        Cos = "cos", Lg2 = "lg2", Ex2 = "ex2", Tanh = "tanh",
    }
    BinaryOp {
        Add = "add", Sub = "sub", Mul = "mul", MulLo = "mul.lo", MulHi = "mul.hi", MulWide = "mul.wide",
        Mul24Lo = "mul24.lo", Mul24Hi = "mul24.hi", Div = "div", Rem = "rem", Min = "min", Max = "max",
        And = "and",
        Or = "or", Xor = "xor", Shl = "shl", Shr = "shr", Copysign = "copysign",
    }
    TernaryOp {
        Fma = "fma", Mad = "mad", MadLo = "mad.lo", MadHi = "mad.hi", MadWide = "mad.wide",
        Mad24Lo = "mad24.lo",
        Mad24Hi = "mad24.hi", Sad = "sad", Min = "min", Max = "max",
    }
    CarryOp {
        AddCc = "add.cc", Addc = "addc", AddcCc = "addc.cc", SubCc = "sub.cc", Subc = "subc",
        SubcCc = "subc.cc",
        MadLoCc = "mad.lo.cc", MadHiCc = "mad.hi.cc", MadcLo = "madc.lo", MadcHi = "madc.hi",
        MadcLoCc = "madc.lo.cc", MadcHiCc = "madc.hi.cc",
    }
}

start! {
    FloatMods = FloatMods::NONE;
}

const PRECISIONS: &[(Precision, &str)] = &[
    (Precision::Approx, "approx"),
    (Precision::Full, "full"),
    (Precision::Rounded(Rounding::Rn), "rn"),
    (Precision::Rounded(Rounding::Rz), "rz"),
    (Precision::Rounded(Rounding::Rm), "rm"),
    (Precision::Rounded(Rounding::Rp), "rp"),
];

fn float_mods<S: Syntax>(m: &mut S, mods: &mut FloatMods) -> Result<(), S::Stop> {
    m.optional(&mut mods.precision, Precision::Unspecified, PRECISIONS)?;
    m.flag(&mut mods.ftz, "ftz")?;
    m.flag(&mut mods.nan, "NaN")?;
    m.flag(&mut mods.xorsign_abs, "xorsign.abs")?;
    m.flag(&mut mods.abs, "abs")?;
    m.flag(&mut mods.sat, "sat")?;
    m.flag(&mut mods.relu, "relu")
}

instructions! { ($) arith arith_list

    /// `d, a`. PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions" and "Logic and Shift
    /// Instructions". The sections have the names of the operations.
    Unary(op: UnaryOp, ty: Type, mods: FloatMods) => {
        text: |m| {
            m.name(op, UnaryOp::NAMES)?;
            if !matches!(op, UnaryOp::Bfind | UnaryOp::BfindShiftamt) {
                float_mods(m, mods)?;
            }
            m.ty(ty)
        },
        operands: {
            let ty = carrier(ty);
            let counts = matches!(op, UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Bfind | UnaryOp::BfindShiftamt);
            smallvec![write(value(if counts { Type::U32 } else { ty })), read(value(ty))]
        },
        accepts: match (op, ty) {
            (UnaryOp::Rcp, Type::F64) if mods.ftz != (mods.precision == Precision::Approx) => {
                Err("rcp.f64 takes .approx.ftz together, or a rounding".into())
            }
            _ => allowed(op.name(), ty, mods, unary(op, ty)),
        },
        needs: match op {
            UnaryOp::Abs | UnaryOp::Neg => when(is_bf16(ty), need(70, 80)),
            UnaryOp::Ex2 | UnaryOp::Tanh => when(is_bf16(ty), need(78, 90)),
            _ => BASE,
        },
    }

    /// `d, a, b`. PTX ISA, the section with the name of the operation.
    Binary(op: BinaryOp, ty: Type, mods: FloatMods) => {
        text: |m| { m.name(op, BinaryOp::NAMES)?; float_mods(m, mods)?; m.ty(ty) },
        operands: {
            let ty = carrier(ty);
            match op {
                BinaryOp::Shl | BinaryOp::Shr => {
                    smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))]
                }
                BinaryOp::MulWide => smallvec![write(value(widened(ty))), read(value(ty)), read(value(ty))],
                _ => uniform(ty, 2),
            }
        },
        accepts: allowed(op.name(), ty, mods, binary(op, ty)),
        needs: {
            let by_type = match (op, ty) {
                (BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul, _) if is_bf16(ty) => need(78, 90),
                (_, Type::F32x2) => need(86, 100),
                (_, Type::U16x2 | Type::S16x2) => need(80, 90),
                (BinaryOp::Min | BinaryOp::Max, _) if is_half(ty) => need(70, 80),
                _ => BASE,
            };
            all([
                by_type,
                when(mods.nan, need(70, 80)),
                when(mods.xorsign_abs, need(72, 86)),
                when(mods.relu, need(80, 90)),
            ])
        },
    }

    /// `d, a, b, c`. PTX ISA, the section with the name of the operation. The parser tells `min` and `max`
    /// from those of [`BinaryOp`] by the number of operands.
    Ternary(op: TernaryOp, ty: Type, mods: FloatMods) => {
        text: |m| { m.name(op, TernaryOp::NAMES)?; float_mods(m, mods)?; m.ty(ty) },
        operands: {
            let (ty, wide) = (carrier(ty), widened(carrier(ty)));
            match op {
                TernaryOp::MadWide => {
                    smallvec![write(value(wide)), read(value(ty)), read(value(ty)), read(value(wide))]
                }
                _ => uniform(ty, 3),
            }
        },
        accepts: match op {
            TernaryOp::Min | TernaryOp::Max => {
                allowed(&format!("three-source {}", op.name()), ty, mods, ternary(op, ty))
            }
            _ => allowed(op.name(), ty, mods, ternary(op, ty)),
        },
        needs: match op {
            TernaryOp::Min | TernaryOp::Max => need(88, 100),
            TernaryOp::Fma if ty == Type::F32x2 => need(86, 100),
            TernaryOp::Fma => when(is_bf16(ty) || mods.relu, need(70, 80)),
            _ => BASE,
        },
    }

    /// Extended-precision integer arithmetic through the carry flag: `d, a, b`, or `d, a, b, c` for `mad`.
    /// PTX ISA, "Extended-Precision Integer Arithmetic Instructions".
    Carry(op: CarryOp, ty: Type) => {
        text: |m| { m.name(op, CarryOp::NAMES)?; m.ty(ty) },
        operands: uniform(ty, if op.is_mad() { 3 } else { 2 }),
        accepts: one_of(op.name(), ty, &[Type::U32, Type::S32, Type::U64, Type::S64]),
    }
}

/// The type that is twice as wide.
fn widened(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        Type::S32 => Type::S64,
        other => other,
    }
}

/// The modifiers that an operation accepts for one type.
#[derive(Clone, Copy)]
struct Accepts {
    /// Rounding and precision may be left out.
    bare: bool,
    /// `.rn`.
    nearest: bool,
    /// `.rz .rm .rp`.
    directed: bool,
    approx: bool,
    full: bool,
    ftz: bool,
    /// `.ftz` must be written.
    ftz_always: bool,
    sat: bool,
    relu: bool,
    nan: bool,
    xorsign: bool,
    abs: bool,
}

const NOTHING: Accepts = Accepts {
    bare: false,
    nearest: false,
    directed: false,
    approx: false,
    full: false,
    ftz: false,
    ftz_always: false,
    sat: false,
    relu: false,
    nan: false,
    xorsign: false,
    abs: false,
};
/// Operations that accept no modifier.
const PLAIN: Accepts = Accepts { bare: true, ..NOTHING };
const PLAIN_FTZ: Accepts = Accepts { ftz: true, ..PLAIN };
/// The modifiers of add, sub and mul.
const SUM_F32: Accepts = Accepts { sat: true, ..SUM_F32X2 };
const SUM_F32X2: Accepts = Accepts { ftz: true, ..SUM_F64 };
const SUM_F64: Accepts = Accepts { bare: true, ..ROUNDED };
const SUM_F16: Accepts = Accepts { ftz: true, sat: true, ..SUM_BF16 };
const SUM_BF16: Accepts = Accepts { bare: true, nearest: true, ..NOTHING };
/// A rounding is required.
const ROUNDED: Accepts = Accepts { nearest: true, directed: true, ..NOTHING };
const APPROX: Accepts = Accepts { approx: true, ..NOTHING };
const APPROX_FTZ: Accepts = Accepts { ftz: true, ..APPROX };
const APPROX_ALWAYS_FTZ: Accepts = Accepts { ftz_always: true, ..APPROX_FTZ };

/// Compares the modifiers with the accepted ones. `accepts` is `None` when the operation does not support the
/// type.
fn allowed(name: &str, ty: Type, mods: FloatMods, accepts: Option<Accepts>) -> Result<(), String> {
    let Some(a) = accepts else { return Err(format!("{name} has no type .{ty}")) };
    let precision = match mods.precision {
        Precision::Unspecified => a.bare,
        Precision::Rounded(Rounding::Rn) => a.nearest,
        Precision::Rounded(_) => a.directed,
        Precision::Approx => a.approx,
        Precision::Full => a.full,
    };
    ensure(precision, || match mods.precision {
        Precision::Unspecified if a.approx && !a.nearest => format!("{name}.{ty} needs .approx"),
        Precision::Unspecified => format!("{name}.{ty} needs a rounding such as .rn"),
        _ => format!("{name}.{ty} does not take that rounding or approximation"),
    })?;
    let refused = [
        (mods.ftz && !a.ftz, ".ftz"),
        (mods.sat && !a.sat, ".sat"),
        (mods.relu && !a.relu, ".relu"),
        (mods.nan && !a.nan, ".NaN"),
        (mods.xorsign_abs && !a.xorsign, ".xorsign.abs"),
        (mods.abs && !a.abs, ".abs"),
    ];
    if let Some((_, modifier)) = refused.iter().find(|(refused, _)| *refused) {
        return Err(format!("{name}.{ty} does not take {modifier}"));
    }
    ensure(mods.ftz || !a.ftz_always, || format!("{name}.{ty} needs .ftz"))?;
    ensure(!(mods.sat && mods.relu), || format!("{name}.{ty} takes .sat or .relu, not both"))
}

fn unary(op: UnaryOp, ty: Type) -> Option<Accepts> {
    use Type::{B16, B32, B64, Bf16, Bf16x2, F16, F16x2, F32, F64, Pred, S16, S32, S64, U32, U64};
    let full = Accepts { approx: true, ftz: true, ..ROUNDED };
    match (op, ty) {
        (UnaryOp::Abs | UnaryOp::Neg, S16 | S32 | S64 | F64 | Bf16 | Bf16x2) => Some(PLAIN),
        (UnaryOp::Abs | UnaryOp::Neg, F16 | F16x2 | F32) => Some(PLAIN_FTZ),
        (UnaryOp::Not, Pred | B16 | B32 | B64) | (UnaryOp::Cnot, B16 | B32 | B64) => Some(PLAIN),
        (UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Brev, B32 | B64) => Some(PLAIN),
        (UnaryOp::Bfind | UnaryOp::BfindShiftamt, U32 | S32 | U64 | S64) => Some(PLAIN),
        (UnaryOp::Rcp | UnaryOp::Sqrt, F32) => Some(full),
        (UnaryOp::Rcp, F64) => Some(Accepts { approx: true, ftz: true, ..ROUNDED }),
        (UnaryOp::Sqrt, F64) => Some(ROUNDED),
        (UnaryOp::Rsqrt, F64) => Some(APPROX_FTZ),
        (UnaryOp::Rsqrt | UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Lg2 | UnaryOp::Ex2, F32) => Some(APPROX_FTZ),
        (UnaryOp::Ex2, F16 | F16x2) => Some(APPROX),
        (UnaryOp::Ex2, Bf16 | Bf16x2) => Some(APPROX_ALWAYS_FTZ),
        (UnaryOp::Tanh, F32 | F16 | F16x2 | Bf16 | Bf16x2) => Some(APPROX),
        _ => None,
    }
}

fn is_word(ty: Type) -> bool {
    matches!(ty, Type::U16 | Type::U32 | Type::U64 | Type::S16 | Type::S32 | Type::S64)
}

/// Modifiers of add, sub and mul for a floating-point type.
fn sum(ty: Type) -> Option<Accepts> {
    match ty {
        Type::F32 => Some(SUM_F32),
        Type::F64 => Some(SUM_F64),
        Type::F32x2 => Some(SUM_F32X2),
        Type::F16 | Type::F16x2 => Some(SUM_F16),
        Type::Bf16 | Type::Bf16x2 => Some(SUM_BF16),
        _ => None,
    }
}

fn binary(op: BinaryOp, ty: Type) -> Option<Accepts> {
    use Type::{B16, B32, B64, Bf16, Bf16x2, F16, F16x2, F32, F64, Pred, S16, S32, U16, U32};
    let when = |holds: bool| holds.then_some(PLAIN);
    match op {
        BinaryOp::Add | BinaryOp::Sub if ty == S32 => Some(Accepts { sat: true, ..PLAIN }),
        BinaryOp::Add if is_pair(ty) => Some(PLAIN),
        BinaryOp::Add | BinaryOp::Sub if is_word(ty) => Some(PLAIN),
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul => sum(ty),
        BinaryOp::MulLo | BinaryOp::MulHi | BinaryOp::Rem => when(is_word(ty)),
        BinaryOp::MulWide => when(matches!(ty, U16 | U32 | S16 | S32)),
        BinaryOp::Mul24Lo | BinaryOp::Mul24Hi => when(matches!(ty, U32 | S32)),
        BinaryOp::Div => match ty {
            F32 => Some(Accepts { approx: true, full: true, ftz: true, ..ROUNDED }),
            F64 => Some(ROUNDED),
            _ => when(is_word(ty)),
        },
        BinaryOp::Min | BinaryOp::Max => match ty {
            F32 | F16 | F16x2 => Some(Accepts { nan: true, xorsign: true, ..PLAIN_FTZ }),
            Bf16 | Bf16x2 => Some(Accepts { nan: true, xorsign: true, ..PLAIN }),
            F64 => Some(PLAIN),
            S32 | Type::S16x2 => Some(Accepts { relu: true, ..PLAIN }),
            _ => when(is_word(ty) || is_pair(ty)),
        },
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => when(matches!(ty, Pred | B16 | B32 | B64)),
        BinaryOp::Shl => when(matches!(ty, B16 | B32 | B64)),
        BinaryOp::Shr => when(matches!(ty, B16 | B32 | B64) || is_word(ty)),
        BinaryOp::Copysign => when(matches!(ty, F32 | F64)),
    }
}

fn ternary(op: TernaryOp, ty: Type) -> Option<Accepts> {
    use Type::{Bf16, Bf16x2, F16, F16x2, F32, F32x2, F64, S16, S32, U16, U32};
    let when = |holds: bool| holds.then_some(PLAIN);
    match op {
        TernaryOp::Fma | TernaryOp::Mad => match ty {
            F32 => Some(Accepts { ftz: true, sat: true, ..ROUNDED }),
            F64 => Some(ROUNDED),
            F32x2 if op == TernaryOp::Fma => Some(Accepts { ftz: true, ..ROUNDED }),
            F16 | F16x2 if op == TernaryOp::Fma => {
                Some(Accepts { nearest: true, ftz: true, sat: true, relu: true, ..NOTHING })
            }
            Bf16 | Bf16x2 if op == TernaryOp::Fma => Some(Accepts { nearest: true, relu: true, ..NOTHING }),
            _ => None,
        },
        TernaryOp::MadHi if ty == S32 => Some(Accepts { sat: true, ..PLAIN }),
        TernaryOp::MadLo | TernaryOp::MadHi | TernaryOp::Sad => when(is_word(ty)),
        TernaryOp::MadWide => when(matches!(ty, U16 | U32 | S16 | S32)),
        TernaryOp::Mad24Hi if ty == S32 => Some(Accepts { sat: true, ..PLAIN }),
        TernaryOp::Mad24Lo | TernaryOp::Mad24Hi => when(matches!(ty, U32 | S32)),
        TernaryOp::Min | TernaryOp::Max => {
            (ty == F32).then_some(Accepts { nan: true, abs: true, ..PLAIN_FTZ })
        }
    }
}
