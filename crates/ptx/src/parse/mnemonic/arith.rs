//! Arithmetic, logic, comparison and conversion.

use super::super::Failure;
use super::super::modifiers::Modifiers;
use crate::*;

/// Rounding, `.ftz`, `.sat` and the like.
pub(super) fn modifiers(m: &mut Modifiers<'_>) -> FloatMods {
    let precision = m.find(|word| {
        Some(match word {
            "approx" => Precision::Approx,
            "full" => Precision::Full,
            _ => Precision::Rounded(rounding(word)?),
        })
    });
    FloatMods {
        precision: precision.unwrap_or_default(),
        ftz: m.take("ftz"),
        sat: m.take("sat"),
        relu: m.take("relu"),
        nan: m.take("NaN"),
        xorsign_abs: m.take("xorsign") && m.take("abs"),
    }
}

pub(super) fn rounding(word: &str) -> Option<Rounding> {
    Some(match word {
        "rn" => Rounding::Rn,
        "rz" => Rounding::Rz,
        "rm" => Rounding::Rm,
        "rp" => Rounding::Rp,
        _ => return None,
    })
}

/// Which part of a product `mul`, `mad` and their 24-bit kin keep.
#[derive(Clone, Copy)]
enum Half {
    Lo,
    Hi,
    Wide,
}

fn half(m: &mut Modifiers<'_>) -> Option<Half> {
    m.find(|word| match word {
        "lo" => Some(Half::Lo),
        "hi" => Some(Half::Hi),
        "wide" => Some(Half::Wide),
        _ => None,
    })
}

/// The names shared by integers and floats, with or without the carry flag.
pub(super) fn integer_or_float(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let carry = m.take("cc");
    let half = half(m);
    let mods = modifiers(m);
    let ty = m.ty()?;
    let carrying = |op| Ok(Op::Carry(op, ty));
    let binary = |op| Ok(Op::Binary(op, ty, mods));
    let ternary = |op| Ok(Op::Ternary(op, ty, mods));
    match (m.base, half, carry) {
        ("add", None, false) => binary(BinaryOp::Add),
        ("sub", None, false) => binary(BinaryOp::Sub),
        ("add", None, true) => carrying(CarryOp::AddCc),
        ("sub", None, true) => carrying(CarryOp::SubCc),
        ("addc", None, false) => carrying(CarryOp::Addc),
        ("addc", None, true) => carrying(CarryOp::AddcCc),
        ("subc", None, false) => carrying(CarryOp::Subc),
        ("subc", None, true) => carrying(CarryOp::SubcCc),
        ("mul", None, false) => binary(BinaryOp::Mul),
        ("mul", Some(Half::Lo), false) => binary(BinaryOp::MulLo),
        ("mul", Some(Half::Hi), false) => binary(BinaryOp::MulHi),
        ("mul", Some(Half::Wide), false) => binary(BinaryOp::MulWide),
        ("mul24", Some(Half::Lo), false) => binary(BinaryOp::Mul24Lo),
        ("mul24", Some(Half::Hi), false) => binary(BinaryOp::Mul24Hi),
        ("mad", None, false) => ternary(TernaryOp::Mad),
        ("mad", Some(Half::Lo), false) => ternary(TernaryOp::MadLo),
        ("mad", Some(Half::Hi), false) => ternary(TernaryOp::MadHi),
        ("mad", Some(Half::Wide), false) => ternary(TernaryOp::MadWide),
        ("mad24", Some(Half::Lo), false) => ternary(TernaryOp::Mad24Lo),
        ("mad24", Some(Half::Hi), false) => ternary(TernaryOp::Mad24Hi),
        ("mad", Some(Half::Lo), true) => carrying(CarryOp::MadLoCc),
        ("mad", Some(Half::Hi), true) => carrying(CarryOp::MadHiCc),
        ("madc", Some(Half::Lo), false) => carrying(CarryOp::MadcLo),
        ("madc", Some(Half::Hi), false) => carrying(CarryOp::MadcHi),
        ("madc", Some(Half::Lo), true) => carrying(CarryOp::MadcLoCc),
        ("madc", Some(Half::Hi), true) => carrying(CarryOp::MadcHiCc),
        _ => Err(Failure::at(m.offset, format!("`{}` has no form with these modifiers", m.base))),
    }
}

pub(super) fn bfind(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let op = if m.take("shiftamt") { UnaryOp::BfindShiftamt } else { UnaryOp::Bfind };
    Ok(Op::Unary(op, m.ty()?, FloatMods::NONE))
}

pub(super) fn setp(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let cmp = m.one("a comparison", CmpOp::from_name)?;
    let (combine, ftz) = (m.find(BoolOp::from_name), m.take("ftz"));
    Ok(Op::Setp { cmp, combine, ty: m.ty()?, ftz })
}

pub(super) fn set(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let cmp = m.one("a comparison", CmpOp::from_name)?;
    let (combine, ftz) = (m.find(BoolOp::from_name), m.take("ftz"));
    Ok(Op::Set { cmp, combine, to: m.ty()?, ty: m.ty()?, ftz })
}

pub(super) fn slct(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let ftz = m.take("ftz");
    Ok(Op::Slct { ty: m.ty()?, cond: m.ty()?, ftz })
}

pub(super) fn testp(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let test = m.one("a test such as `.finite`", TestpOp::from_name)?;
    Ok(Op::Testp(test, m.ty()?))
}

/// The operations that know `.b32` only.
pub(super) fn bits32(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    m.require("b32")?;
    const CLAMP: &str = "`.clamp` or `.wrap`";
    Ok(match m.base {
        "lop3" => Op::Lop3(m.find(BoolOp::from_name)),
        "fns" => Op::Fns,
        "shf" => {
            Op::Shf(m.one("`.l` or `.r`", ShiftDirection::from_name)?, m.one(CLAMP, ShfMode::from_name)?)
        }
        "bmsk" => Op::Bmsk(m.one(CLAMP, ShfMode::from_name)?),
        "prmt" => {
            let mode = m.find(|word| {
                let known = |(_, suffix): &&(PrmtMode, &str)| suffix.strip_prefix('.') == Some(word);
                PrmtMode::SUFFIXES.iter().find(known).map(|&(mode, _)| mode)
            });
            Op::Prmt(mode.unwrap_or(PrmtMode::Generic))
        }
        _ => return Err(m.unknown()),
    })
}

pub(super) fn szext(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    Ok(Op::Szext(m.one("`.clamp` or `.wrap`", ShfMode::from_name)?, m.ty()?))
}

pub(super) fn dot(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    Ok(match m.base {
        "dp4a" => Op::Dp4a(m.ty()?, m.ty()?),
        _ => Op::Dp2a(m.one("`.lo` or `.hi`", DotHalf::from_name)?, m.ty()?, m.ty()?),
    })
}

pub(super) fn cvt(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.take("pack") {
        m.require("sat")?;
        return Ok(Op::CvtPack { to: m.ty()?, from: m.ty()?, chained: m.take("b32") });
    }
    let rounding = m.find(|word| {
        Some(match word {
            "rni" => CvtRounding::Integer(Rounding::Rn),
            "rzi" => CvtRounding::Integer(Rounding::Rz),
            "rmi" => CvtRounding::Integer(Rounding::Rm),
            "rpi" => CvtRounding::Integer(Rounding::Rp),
            "rna" => CvtRounding::Rna,
            _ => CvtRounding::Float(rounding(word)?),
        })
    });
    let saturation = m.find(|word| match word {
        "sat" => Some(CvtSaturation::Sat),
        "satfinite" => Some(CvtSaturation::SatFinite),
        _ => None,
    });
    let (ftz, relu) = (m.take("ftz"), m.take("relu"));
    let (to, from) = (m.ty()?, m.ty()?);
    Ok(Op::Cvt(Cvt { to, from, rounding, ftz, saturation: saturation.unwrap_or_default(), relu }))
}
