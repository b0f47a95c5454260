//! Moves and conversions (PTX ISA, "mov", "cvt", "cvt.pack").

use super::requirement::{BASE, need, when};
use super::signature::{carrier, read, uniform, value, write};
use super::syntax::start;
use super::{Rounding, is_pair};
use crate::verify::rules::{ensure, one_of};
use crate::{Requirement, Signature, SlotKind, Type};
use smallvec::smallvec;

/// Rounding of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CvtRounding {
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    Float(Rounding),
    /// `.rni`, `.rzi`, `.rmi`, `.rpi`: to an integral value.
    Integer(Rounding),
    /// `.rna`: nearest, ties away from zero (tf32).
    Rna,
}

/// Saturation of `cvt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CvtSaturation {
    /// Not written.
    #[default]
    None,
    /// `.sat`.
    Sat,
    /// `.satfinite`.
    SatFinite,
}

/// `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cvt {
    /// Type of the result.
    pub to: Type,
    /// Type of the source.
    pub from: Type,
    /// Rounding, if one is written.
    pub rounding: Option<CvtRounding>,
    /// `.ftz`.
    pub ftz: bool,
    /// Saturation.
    pub saturation: CvtSaturation,
    /// `.relu`.
    pub relu: bool,
}

impl Cvt {
    /// Whether the conversion packs two sources (`cvt.rn.f16x2.f32 d, a, b`): the result is a pair and the
    /// sources are f32.
    pub fn packed(&self) -> bool {
        self.from == Type::F32 && matches!(self.to, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2)
    }
}

start! {
    Cvt = Cvt {
        to: Type::B32,
        from: Type::B32,
        rounding: None,
        ftz: false,
        saturation: CvtSaturation::None,
        relu: false,
    };
}

const ROUNDINGS: &[(CvtRounding, &str)] = &[
    (CvtRounding::Float(Rounding::Rn), "rn"),
    (CvtRounding::Float(Rounding::Rz), "rz"),
    (CvtRounding::Float(Rounding::Rm), "rm"),
    (CvtRounding::Float(Rounding::Rp), "rp"),
    (CvtRounding::Integer(Rounding::Rn), "rni"),
    (CvtRounding::Integer(Rounding::Rz), "rzi"),
    (CvtRounding::Integer(Rounding::Rm), "rmi"),
    (CvtRounding::Integer(Rounding::Rp), "rpi"),
    (CvtRounding::Rna, "rna"),
];

const SATURATIONS: &[(CvtSaturation, &str)] =
    &[(CvtSaturation::Sat, "sat"), (CvtSaturation::SatFinite, "satfinite")];

instructions! { ($) convert convert_list

    /// `d, a`. `a` may be a register, immediate, special register or symbol. With `.b32`, `.b64` and `.b128`,
    /// `mov` also packs `{…}` into `d` and unpacks `a` into `{…}`. PTX ISA, "mov".
    Mov(ty: Type) => {
        text: |m| { m.head("mov")?; m.ty(ty) },
        operands: if ty.is_bits() {
            smallvec![write(SlotKind::Packable(ty)), read(SlotKind::Packable(ty))]
        } else {
            uniform(ty, 1)
        },
        accepts: one_of("mov", ty, &MOVABLE),
        needs: when(ty == Type::B128, need(83, 75)),
    }

    /// `d, a`; when [`Cvt::packed`], `d, a, b`: two sources, `a` in the upper half. PTX ISA, "cvt".
    Cvt(cvt: Cvt) => {
        text: |m| {
            m.head("cvt")?;
            m.maybe(&mut cvt.rounding, ROUNDINGS)?;
            m.flag(&mut cvt.ftz, "ftz")?;
            // The ISA writes `.relu` before `.satfinite` for tf32 and after it for other types.
            let relu_first = cvt.to == Type::Tf32;
            if relu_first {
                m.flag(&mut cvt.relu, "relu")?;
            }
            m.optional(&mut cvt.saturation, CvtSaturation::None, SATURATIONS)?;
            if !relu_first {
                m.flag(&mut cvt.relu, "relu")?;
            }
            m.ty(&mut cvt.to)?;
            m.ty(&mut cvt.from)
        },
        operands: {
            let from = read(SlotKind::Wide(carrier(cvt.from)));
            let mut s: Signature = smallvec![write(SlotKind::Wide(carrier(cvt.to))), from];
            if cvt.packed() {
                s.push(from);
            }
            s
        },
        accepts: convertible(&cvt),
        needs: conversion_requirement(&cvt),
    }

    /// `cvt.pack.sat`: `d, a, b, c?`. `a` and `b` are saturated to `to`. `b` takes the lowest bits, `a` the
    /// next, and with `chained` the low bits of `c` the bits above. PTX ISA, "cvt.pack".
    CvtPack {
        /// Type of the packed elements.
        to: Type,
        /// Type of `a` and `b`: s32.
        from: Type,
        /// `.b32`: there is a `c`.
        chained: bool,
    } => {
        text: |m| { m.head("cvt.pack.sat")?; m.ty(to)?; m.ty(from)?; m.flag(chained, "b32") },
        operands: {
            let mut s: Signature = smallvec![write(value(Type::B32)), read(value(from)), read(value(from))];
            if chained {
                s.push(read(value(Type::B32)));
            }
            s
        },
        accepts: {
            one_of("cvt.pack", from, &[Type::S32])?;
            let accepted: &[Type] = match chained {
                false => &[Type::U16, Type::S16],
                true => &[Type::U2, Type::S2, Type::U4, Type::S4, Type::U8, Type::S8],
            };
            one_of(if chained { "cvt.pack with .b32" } else { "cvt.pack without .b32" }, to, accepted)
        },
    }
}

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

const fn is_fp8(ty: Type) -> bool {
    matches!(ty, Type::E4m3 | Type::E5m2 | Type::E4m3x2 | Type::E5m2x2)
}

fn conversion_requirement(cvt: &Cvt) -> Requirement {
    let saturates = cvt.saturation == CvtSaturation::SatFinite;
    match (cvt.to, cvt.from) {
        (Type::Tf32, _) if cvt.rounding == Some(CvtRounding::Rna) => {
            when(saturates, need(81, 80)).and(need(70, 80))
        }
        (Type::Tf32, _) => when(saturates, need(86, 100)).and(need(78, 90)),
        (to, from) if is_fp8(to) || is_fp8(from) => need(81, 89),
        (Type::F16x2 | Type::Bf16x2, Type::F32) => need(70, 80).and(when(saturates, need(81, 80))),
        (Type::Bf16, Type::F32) => need(70, 80).and(when(saturates, need(81, 80))),
        (Type::F16, Type::F32) => when(cvt.relu, need(70, 80)).and(when(saturates, need(81, 80))),
        (Type::F32, Type::Bf16) if cvt.rounding.is_none() => need(71, 80),
        (Type::Bf16, _) | (_, Type::Bf16) => need(78, 90),
        _ => BASE,
    }
}

/// Checks the modifiers of a conversion between two types.
fn convertible(cvt: &Cvt) -> Result<(), String> {
    let Cvt { to, from, rounding, ftz, saturation, relu } = *cvt;
    let shape = conversion(to, from).ok_or_else(|| format!("cvt does not convert .{from} to .{to}"))?;
    let rounded = match (shape.rounding, rounding) {
        (RoundingRule::Absent, None) | (RoundingRule::IntegralOptional, None) => true,
        (RoundingRule::Float, Some(CvtRounding::Float(_))) => true,
        (RoundingRule::Nearest, Some(CvtRounding::Float(r))) => {
            r == Rounding::Rn || (r == Rounding::Rz && shape.toward_zero)
        }
        (RoundingRule::Tf32, Some(CvtRounding::Rna)) => !relu,
        (RoundingRule::Tf32, Some(CvtRounding::Float(r))) => {
            matches!(r, Rounding::Rn | Rounding::Rz)
        }
        (RoundingRule::Integral | RoundingRule::IntegralOptional, Some(CvtRounding::Integer(_))) => true,
        _ => false,
    };
    ensure(rounded, || format!("cvt.{to}.{from} {}", shape.rounding.wanted()))?;
    let flushes = matches!((to, from), (_, Type::F32) | (Type::F32, _))
        && !matches!((to, from), (Type::F16x2 | Type::Bf16x2 | Type::Tf32, _) | (_, Type::Bf16));
    ensure(!ftz || flushes, || format!("cvt.{to}.{from} does not take .ftz"))?;
    let directed = matches!(rounding, Some(CvtRounding::Float(Rounding::Rm | Rounding::Rp)));
    ensure(!directed || !(relu || saturation == CvtSaturation::SatFinite), || {
        format!("cvt.{to}.{from} takes .relu and .satfinite with .rn and .rz only")
    })?;
    ensure(!relu || shape.relu, || format!("cvt.{to}.{from} does not take .relu"))?;
    match saturation {
        CvtSaturation::None => {
            ensure(!shape.satfinite_always, || format!("cvt.{to}.{from} needs .satfinite"))
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
    /// `.rn`, and `.rz` if [`Conversion::toward_zero`].
    Nearest,
    Tf32,
    Integral,
    IntegralOptional,
}

impl RoundingRule {
    fn wanted(self) -> &'static str {
        match self {
            RoundingRule::Absent => "is exact and takes no rounding",
            RoundingRule::Float => "needs .rn, .rz, .rm or .rp",
            RoundingRule::Nearest => "needs .rn (or .rz, to 16-bit floats)",
            RoundingRule::Tf32 => "needs .rna, .rn or .rz (.relu not with .rna)",
            RoundingRule::Integral => "needs .rni, .rzi, .rmi or .rpi",
            RoundingRule::IntegralOptional => "takes .rni, .rzi, .rmi or .rpi only",
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

/// Whether integer type `outer` contains every value of `inner`. Such a conversion never saturates.
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
