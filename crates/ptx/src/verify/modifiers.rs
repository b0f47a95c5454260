//! Which types and modifiers each arithmetic operation has (PTX ISA, the syntax block of each instruction).

use crate::{
    BinaryOp, CarryOp, CmpOp, Cvt, CvtRounding, CvtSaturation, FloatMods, Op, Precision, ReduxOp, Space,
    TernaryOp, Type, UnaryOp,
};

use super::{async_modifiers, memory_modifiers, tensor_modifiers, wgmma_modifiers, wmma_modifiers};

/// Says what is wrong with the operation itself, whatever its operands.
pub(super) fn check(op: &Op) -> Result<(), String> {
    match *op {
        Op::Unary(UnaryOp::Rcp, Type::F64, mods) if mods.ftz != (mods.precision == Precision::Approx) => {
            Err("rcp.f64 takes .approx.ftz together, or a rounding".into())
        }
        Op::Unary(op, ty, mods) => allowed(op.name(), ty, mods, unary(op, ty)),
        Op::Binary(op, ty, mods) => allowed(op.name(), ty, mods, binary(op, ty)),
        Op::Ternary(op, ty, mods) => allowed(op.name(), ty, mods, ternary(op, ty)),
        Op::Carry(op, ty) => carry(op, ty),
        Op::Setp { cmp, ty, ftz, .. } => compare("setp", cmp, ty, ftz),
        Op::Set { cmp, ty, to, ftz, .. } => {
            compare("set", cmp, ty, ftz)?;
            let half = matches!(to, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2);
            let to_fits = matches!(to, Type::U32 | Type::S32 | Type::F32 | Type::U16 | Type::S16) || half;
            ensure(to_fits, || format!("set has no result type .{to}"))
        }
        Op::Selp(ty) => one_of("selp", ty, &SELECTABLE),
        Op::Slct { ty, cond, ftz } => {
            one_of("slct", ty, &SELECTABLE)?;
            ensure(matches!(cond, Type::S32 | Type::F32), || "slct decides by .s32 or .f32".into())?;
            ensure(!ftz || cond == Type::F32, || "slct takes .ftz with an .f32 condition only".into())
        }
        Op::Testp(_, ty) => one_of("testp", ty, &[Type::F32, Type::F64]),
        Op::Bfe(ty) => one_of("bfe", ty, &[Type::U32, Type::U64, Type::S32, Type::S64]),
        Op::Bfi(ty) => one_of("bfi", ty, &[Type::B32, Type::B64]),
        Op::Szext(_, ty) => one_of("szext", ty, &[Type::U32, Type::S32]),
        Op::Dp4a(a, b) | Op::Dp2a(_, a, b) => {
            one_of("a dot product", a, &[Type::U32, Type::S32])?;
            one_of("a dot product", b, &[Type::U32, Type::S32])
        }
        Op::Mov(ty) => one_of("mov", ty, &MOVABLE),
        Op::Cvt(cvt) => convert(&cvt),
        Op::Cvta { ty, .. } => one_of("an address conversion", ty, &[Type::U32, Type::U64]),
        Op::Mapa { space, ty } | Op::Getctarank { space, ty } => {
            one_of("an address conversion", ty, &[Type::U32, Type::U64])?;
            ensure(matches!(space, Space::Generic | Space::SharedCluster), || {
                format!("an address of the cluster lies in .shared::cluster, not in {}", space.suffix())
            })
        }
        Op::Match(_, ty) => one_of("match", ty, &[Type::B32, Type::B64]),
        Op::Redux { op, ty, abs, nan } => redux(op, ty, abs || nan),
        Op::Ld(_) | Op::St(_) | Op::Atom(_) | Op::Red(_) | Op::Prefetch(..) | Op::CpAsync(_) => {
            memory_modifiers::check(op)
        }
        Op::CvtPack { to, from, chained } => pack(to, from, chained),
        Op::Ldmatrix(_) | Op::Stmatrix(_) | Op::Mma(_) => tensor_modifiers::check(op),
        Op::WmmaLoad(m) => wmma_modifiers::access(&m),
        Op::WmmaStore(m) => wmma_modifiers::store(&m),
        Op::Wmma(wmma) => wmma_modifiers::product(&wmma),
        Op::Wgmma(wgmma) => wgmma_modifiers::check(&wgmma),
        _ => async_modifiers::check(op),
    }
}

/// `cvt.pack`: two words to halves, or two words and what is packed already to smaller elements.
fn pack(to: Type, from: Type, chained: bool) -> Result<(), String> {
    one_of("cvt.pack", from, &[Type::S32])?;
    let accepted: &[Type] = match chained {
        false => &[Type::U16, Type::S16],
        true => &[Type::U2, Type::S2, Type::U4, Type::S4, Type::U8, Type::S8],
    };
    one_of(if chained { "cvt.pack with .b32" } else { "cvt.pack without .b32" }, to, accepted)
}

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

const MOVABLE: [Type; 13] = [
    Type::Pred,
    Type::B16,
    Type::B32,
    Type::B64,
    Type::B128,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F32,
    Type::F64,
];

pub(super) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

pub(super) fn one_of(what: &str, ty: Type, types: &[Type]) -> Result<(), String> {
    ensure(types.contains(&ty), || {
        let list = types.iter().map(|t| format!(".{t}")).collect::<Vec<_>>().join(" ");
        format!("{what} has no type .{ty}; it takes {list}")
    })
}

/// What an operation accepts at one type.
#[derive(Clone, Copy)]
struct Accepts {
    /// No rounding or precision written.
    bare: bool,
    /// `.rn`.
    nearest: bool,
    /// `.rz .rm .rp`.
    directed: bool,
    approx: bool,
    full: bool,
    ftz: bool,
    /// `.ftz` must be there.
    ftz_always: bool,
    sat: bool,
    relu: bool,
    nan: bool,
    xorsign: bool,
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
};
/// Operations without modifiers.
const PLAIN: Accepts = Accepts { bare: true, ..NOTHING };
const PLAIN_FTZ: Accepts = Accepts { ftz: true, ..PLAIN };
/// add, sub, mul.
const SUM_F32: Accepts = Accepts { sat: true, ..SUM_F32X2 };
const SUM_F32X2: Accepts = Accepts { ftz: true, ..SUM_F64 };
const SUM_F64: Accepts = Accepts { bare: true, ..ROUNDED };
const SUM_F16: Accepts = Accepts { ftz: true, sat: true, ..SUM_BF16 };
const SUM_BF16: Accepts = Accepts { bare: true, nearest: true, ..NOTHING };
/// A rounding must be written.
const ROUNDED: Accepts = Accepts { nearest: true, directed: true, ..NOTHING };
const APPROX: Accepts = Accepts { approx: true, ..NOTHING };
const APPROX_FTZ: Accepts = Accepts { ftz: true, ..APPROX };
const APPROX_ALWAYS_FTZ: Accepts = Accepts { ftz_always: true, ..APPROX_FTZ };

/// Compares what is written with what is accepted; `None` means that the operation has no such type.
fn allowed(name: &str, ty: Type, mods: FloatMods, accepts: Option<Accepts>) -> Result<(), String> {
    let Some(a) = accepts else { return Err(format!("{name} has no type .{ty}")) };
    let precision = match mods.precision {
        Precision::Unspecified => a.bare,
        Precision::Rounded(crate::Rounding::Rn) => a.nearest,
        Precision::Rounded(_) => a.directed,
        Precision::Approx => a.approx,
        Precision::Full => a.full,
    };
    ensure(precision, || match mods.precision {
        Precision::Unspecified if a.approx && !a.nearest => format!("{name}.{ty} must say .approx"),
        Precision::Unspecified => format!("{name}.{ty} must say how it rounds"),
        _ => format!("{name}.{ty} does not take that rounding or approximation"),
    })?;
    let refused = [
        (mods.ftz && !a.ftz, ".ftz"),
        (mods.sat && !a.sat, ".sat"),
        (mods.relu && !a.relu, ".relu"),
        (mods.nan && !a.nan, ".NaN"),
        (mods.xorsign_abs && !a.xorsign, ".xorsign.abs"),
    ];
    if let Some((_, modifier)) = refused.iter().find(|(refused, _)| *refused) {
        return Err(format!("{name}.{ty} does not take {modifier}"));
    }
    ensure(mods.ftz || !a.ftz_always, || format!("{name}.{ty} must say .ftz"))?;
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

fn is_pair(ty: Type) -> bool {
    matches!(ty, Type::U16x2 | Type::S16x2)
}

/// add, sub and mul of a floating-point type.
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
    }
}

fn carry(op: CarryOp, ty: Type) -> Result<(), String> {
    one_of(op.name(), ty, &[Type::U32, Type::S32, Type::U64, Type::S64])
}

fn compare(name: &str, cmp: CmpOp, ty: Type, ftz: bool) -> Result<(), String> {
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

fn redux(op: ReduxOp, ty: Type, float_modifiers: bool) -> Result<(), String> {
    match op {
        ReduxOp::Add => one_of("redux.add", ty, &[Type::U32, Type::S32])?,
        ReduxOp::Min | ReduxOp::Max => one_of("redux.min and .max", ty, &[Type::U32, Type::S32, Type::F32])?,
        ReduxOp::And | ReduxOp::Or | ReduxOp::Xor => one_of("a bitwise redux", ty, &[Type::B32])?,
    }
    ensure(!float_modifiers || ty == Type::F32, || ".abs and .NaN of redux are for .f32".into())
}

/// `cvt` between two types, in the order of the ISA's table.
fn convert(cvt: &Cvt) -> Result<(), String> {
    let Cvt { to, from, rounding, ftz, saturation, relu } = *cvt;
    let shape = conversion(to, from).ok_or_else(|| format!("cvt does not convert .{from} to .{to}"))?;
    let rounded = match (shape.rounding, rounding) {
        (RoundingRule::Absent, None) | (RoundingRule::IntegralOptional, None) => true,
        (RoundingRule::Float, Some(CvtRounding::Float(_))) => true,
        (RoundingRule::Nearest, Some(CvtRounding::Float(r))) => {
            r == crate::Rounding::Rn || (r == crate::Rounding::Rz && shape.toward_zero)
        }
        (RoundingRule::Tf32, Some(CvtRounding::Rna)) => !relu,
        (RoundingRule::Tf32, Some(CvtRounding::Float(r))) => {
            matches!(r, crate::Rounding::Rn | crate::Rounding::Rz)
        }
        (RoundingRule::Integral | RoundingRule::IntegralOptional, Some(CvtRounding::Integer(_))) => true,
        _ => false,
    };
    ensure(rounded, || format!("cvt.{to}.{from} {}", shape.rounding.wanted()))?;
    let flushes = matches!((to, from), (_, Type::F32) | (Type::F32, _))
        && !matches!((to, from), (Type::F16x2 | Type::Bf16x2 | Type::Tf32, _) | (_, Type::Bf16));
    ensure(!ftz || flushes, || format!("cvt.{to}.{from} does not take .ftz"))?;
    let directed = matches!(rounding, Some(CvtRounding::Float(crate::Rounding::Rm | crate::Rounding::Rp)));
    ensure(!directed || !(relu || saturation == CvtSaturation::SatFinite), || {
        format!("cvt.{to}.{from} takes .relu and .satfinite with .rn and .rz only")
    })?;
    ensure(!relu || shape.relu, || format!("cvt.{to}.{from} does not take .relu"))?;
    match saturation {
        CvtSaturation::None => {
            ensure(!shape.satfinite_always, || format!("cvt.{to}.{from} must say .satfinite"))
        }
        CvtSaturation::Sat => ensure(shape.sat, || format!("cvt.{to}.{from} does not take .sat")),
        CvtSaturation::SatFinite => {
            ensure(shape.satfinite, || format!("cvt.{to}.{from} does not take .satfinite"))
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum RoundingRule {
    Absent,
    Float,
    /// `.rn`, and `.rz` where [`Conversion::toward_zero`].
    Nearest,
    Tf32,
    Integral,
    IntegralOptional,
}

impl RoundingRule {
    fn wanted(self) -> &'static str {
        match self {
            RoundingRule::Absent => "is exact and takes no rounding",
            RoundingRule::Float => "must say .rn, .rz, .rm or .rp",
            RoundingRule::Nearest => "must say .rn (or .rz, to 16-bit floats)",
            RoundingRule::Tf32 => "must say .rna, .rn or .rz (.relu not with .rna)",
            RoundingRule::Integral => "must say .rni, .rzi, .rmi or .rpi",
            RoundingRule::IntegralOptional => "may say .rni, .rzi, .rmi or .rpi only",
        }
    }
}

#[derive(Clone, Copy)]
struct Conversion {
    rounding: RoundingRule,
    toward_zero: bool,
    sat: bool,
    satfinite: bool,
    satfinite_always: bool,
    relu: bool,
}

/// Whether every value of integer type `inner` is one of `outer`: then there is nothing to saturate.
fn contains(outer: Type, inner: Type) -> bool {
    match (outer.is_signed(), inner.is_signed()) {
        (true, false) => outer.bits() > inner.bits(),
        (false, true) => false,
        _ => outer.bits() >= inner.bits(),
    }
}

fn conversion(to: Type, from: Type) -> Option<Conversion> {
    use RoundingRule::{Absent, Float, Integral, IntegralOptional, Nearest, Tf32};
    use Type::{Bf16, Bf16x2, E4m3x2, E5m2x2, F16, F16x2, F32, F64};
    let plain = |rounding| Conversion {
        rounding,
        toward_zero: false,
        sat: true,
        satfinite: false,
        satfinite_always: false,
        relu: false,
    };
    let narrow = |rounding| Conversion {
        toward_zero: true,
        sat: false,
        satfinite: true,
        relu: true,
        ..plain(rounding)
    };
    let integer = |ty: Type| ty.is_integer() && matches!(ty.bits(), 8..=64) && !is_pair(ty);
    let scalar_float = |ty: Type| matches!(ty, F16 | Bf16 | F32 | F64);
    let rank = |ty: Type| ty.bits();
    match (to, from) {
        _ if integer(to) && integer(from) => Some(Conversion { sat: !contains(to, from), ..plain(Absent) }),
        _ if integer(to) && scalar_float(from) => Some(plain(Integral)),
        _ if scalar_float(to) && integer(from) => Some(Conversion { sat: to != Bf16, ..plain(Float) }),
        (Type::Tf32, F32) => Some(narrow(Tf32)),
        (F16 | Bf16, F32) => {
            Some(Conversion { sat: to == F16, ..narrow(if to == F16 { Float } else { Nearest }) })
        }
        (F16x2 | Bf16x2, F32) => Some(narrow(Nearest)),
        (E4m3x2 | E5m2x2, F32 | F16x2) => {
            Some(Conversion { toward_zero: false, satfinite_always: true, ..narrow(Nearest) })
        }
        (F16x2, E4m3x2 | E5m2x2) => {
            Some(Conversion { toward_zero: false, satfinite: false, ..narrow(Nearest) })
        }
        _ if !scalar_float(to) || !scalar_float(from) => None,
        _ if to == from => Some(Conversion { sat: to != Bf16, ..plain(IntegralOptional) }),
        (Bf16, F16) | (F16, Bf16) => Some(Conversion { sat: false, ..plain(Float) }),
        _ if rank(to) > rank(from) => Some(Conversion { sat: from != Bf16, ..plain(Absent) }),
        _ => Some(plain(Float)),
    }
}
