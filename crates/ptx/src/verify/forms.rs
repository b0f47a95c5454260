//! Which types and modifiers each arithmetic operation knows, as a table.

use crate::*;

/// How the rounding or precision of a form is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Nothing.
    Plain,
    /// `.rn`.
    Rn,
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    Rounded,
    Approx,
    Full,
}

impl Mode {
    fn accepts(self, precision: Precision) -> bool {
        match self {
            Mode::Plain => precision == Precision::Unspecified,
            Mode::Rn => precision == Precision::Rounded(Rounding::Rn),
            Mode::Rounded => matches!(precision, Precision::Rounded(_)),
            Mode::Approx => precision == Precision::Approx,
            Mode::Full => precision == Precision::Full,
        }
    }
}

/// Flags of a form.
const NO: u8 = 0;
const FTZ: u8 = 1;
const SAT: u8 = 2;
const RELU: u8 = 4;
const NAN: u8 = 8;
const XORSIGN: u8 = 16;

/// Types, ways to write the precision, and flags that may stand together.
type Form = (&'static [Type], &'static [Mode], u8);

use Mode::{Approx, Full, Plain, Rn, Rounded};
use Type::*;

const INTS: &[Type] = &[U16, U32, U64, S16, S32, S64];
const SIGNED: &[Type] = &[S16, S32, S64];
const WORDS: &[Type] = &[U32, U64, S32, S64];
const NARROW: &[Type] = &[U16, U32, S16, S32];
const BITS: &[Type] = &[B16, B32, B64];
const LOGIC: &[Type] = &[Pred, B16, B32, B64];
const HALVES: &[Type] = &[F16, F16x2];
const BRAINS: &[Type] = &[Bf16, Bf16x2];

fn unary(op: UnaryOp) -> &'static [Form] {
    const ABS: &[Form] =
        &[(SIGNED, &[Plain], NO), (&[F32, F16, F16x2], &[Plain], FTZ), (&[F64, Bf16, Bf16x2], &[Plain], NO)];
    match op {
        UnaryOp::Abs | UnaryOp::Neg => ABS,
        UnaryOp::Not => &[(LOGIC, &[Plain], NO)],
        UnaryOp::Cnot => &[(BITS, &[Plain], NO)],
        UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Brev => &[(&[B32, B64], &[Plain], NO)],
        UnaryOp::Bfind | UnaryOp::BfindShiftamt => &[(WORDS, &[Plain], NO)],
        UnaryOp::Rcp | UnaryOp::Sqrt => {
            &[(&[F32], &[Approx, Rounded], FTZ), (&[F64], &[Rounded], NO), (&[F64], &[Approx], FTZ)]
        }
        UnaryOp::Rsqrt => &[(&[F32, F64], &[Approx], FTZ)],
        UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Lg2 => &[(&[F32], &[Approx], FTZ)],
        UnaryOp::Ex2 => &[(&[F32], &[Approx], FTZ), (HALVES, &[Approx], NO), (BRAINS, &[Approx], FTZ)],
        UnaryOp::Tanh => &[(&[F32, F16, F16x2, Bf16, Bf16x2], &[Approx], NO)],
    }
}

fn binary(op: BinaryOp) -> &'static [Form] {
    const ADD: &[Form] = &[
        (INTS, &[Plain], NO),
        (&[S32], &[Plain], SAT),
        (&[U16x2, S16x2], &[Plain], NO),
        (&[F32], &[Plain, Rounded], FTZ | SAT),
        (&[F64], &[Plain, Rounded], NO),
        (HALVES, &[Plain, Rn], FTZ | SAT),
        (BRAINS, &[Plain, Rn], NO),
        (&[F32x2], &[Plain, Rounded], FTZ),
    ];
    const EXTREMUM: &[Form] = &[
        (INTS, &[Plain], NO),
        (&[U16x2, S16x2], &[Plain], NO),
        (&[S16x2, S32], &[Plain], RELU),
        (&[F32, F16, F16x2], &[Plain], FTZ | NAN | XORSIGN),
        (&[F64], &[Plain], NO),
        (BRAINS, &[Plain], NAN | XORSIGN),
    ];
    match op {
        BinaryOp::Add | BinaryOp::Sub => ADD,
        BinaryOp::Mul => &ADD_FLOATS,
        BinaryOp::MulLo | BinaryOp::MulHi => &[(INTS, &[Plain], NO)],
        BinaryOp::MulWide => &[(NARROW, &[Plain], NO)],
        BinaryOp::Mul24Lo | BinaryOp::Mul24Hi => &[(&[U32, S32], &[Plain], NO)],
        BinaryOp::Div => {
            &[(INTS, &[Plain], NO), (&[F32], &[Approx, Full, Rounded], FTZ), (&[F64], &[Rounded], NO)]
        }
        BinaryOp::Rem => &[(INTS, &[Plain], NO)],
        BinaryOp::Min | BinaryOp::Max => EXTREMUM,
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => &[(LOGIC, &[Plain], NO)],
        BinaryOp::Shl => &[(BITS, &[Plain], NO)],
        BinaryOp::Shr => &[(BITS, &[Plain], NO), (INTS, &[Plain], NO)],
        BinaryOp::Copysign => &[(&[F32, F64], &[Plain], NO)],
    }
}

const ADD_FLOATS: [Form; 5] = [
    (&[F32], &[Plain, Rounded], FTZ | SAT),
    (&[F64], &[Plain, Rounded], NO),
    (HALVES, &[Plain, Rn], FTZ | SAT),
    (BRAINS, &[Plain, Rn], NO),
    (&[F32x2], &[Plain, Rounded], FTZ),
];

fn ternary(op: TernaryOp) -> &'static [Form] {
    match op {
        TernaryOp::Fma => &[
            (&[F32], &[Rounded], FTZ | SAT),
            (&[F64], &[Rounded], NO),
            (HALVES, &[Rn], FTZ | SAT),
            (HALVES, &[Rn], FTZ | RELU),
            (BRAINS, &[Rn], RELU),
            (&[F32x2], &[Rounded], FTZ),
        ],
        TernaryOp::Mad => &[(&[F32], &[Rounded], FTZ | SAT), (&[F64], &[Rounded], NO)],
        TernaryOp::MadLo => &[(INTS, &[Plain], NO)],
        TernaryOp::MadHi => &[(INTS, &[Plain], NO), (&[S32], &[Plain], SAT)],
        TernaryOp::MadWide => &[(NARROW, &[Plain], NO)],
        TernaryOp::Mad24Lo => &[(&[U32, S32], &[Plain], NO)],
        TernaryOp::Mad24Hi => &[(&[U32, S32], &[Plain], NO), (&[S32], &[Plain], SAT)],
        TernaryOp::Sad => &[(INTS, &[Plain], NO)],
    }
}

fn flags(m: FloatMods) -> u8 {
    let bit = |on: bool, flag: u8| if on { flag } else { NO };
    bit(m.ftz, FTZ) | bit(m.sat, SAT) | bit(m.relu, RELU) | bit(m.nan, NAN) | bit(m.xorsign_abs, XORSIGN)
}

/// What is wrong with type and modifiers of an arithmetic operation, if anything.
pub(super) fn arithmetic(op: &Op) -> Option<String> {
    let (forms, ty, mods) = match *op {
        Op::Unary(op, ty, mods) => (unary(op), ty, mods),
        Op::Binary(op, ty, mods) => (binary(op), ty, mods),
        Op::Ternary(op, ty, mods) => (ternary(op), ty, mods),
        _ => return None,
    };
    let of_type = || forms.iter().filter(|(types, ..)| types.contains(&ty));
    if of_type().next().is_none() {
        let mut known: Vec<String> =
            forms.iter().flat_map(|(types, ..)| types.iter().map(|t| format!(".{t}"))).collect();
        known.dedup();
        return Some(format!("does not know `.{ty}`; it knows {}", known.join(", ")));
    }
    let flags = flags(mods);
    let fits = |(_, modes, allowed): &&Form| {
        modes.iter().any(|mode| mode.accepts(mods.precision)) && flags & !allowed == 0
    };
    if of_type().any(|form| fits(&form)) {
        return None;
    }
    let precise = of_type().any(|(_, modes, _)| modes.iter().any(|mode| mode.accepts(mods.precision)));
    let wrong = if precise { "these flags" } else { "this rounding" };
    let modes: Vec<&str> = of_type().flat_map(|(_, modes, _)| modes.iter().map(|mode| mode.text())).collect();
    Some(format!("does not know {wrong} with `.{ty}`; it knows {}", modes.join(" or ")))
}

impl Mode {
    const fn text(self) -> &'static str {
        match self {
            Mode::Plain => "no rounding",
            Mode::Rn => "`.rn`",
            Mode::Rounded => "`.rn`, `.rz`, `.rm`, `.rp`",
            Mode::Approx => "`.approx`",
            Mode::Full => "`.full`",
        }
    }
}

/// What is wrong with a comparison of this type, if anything.
pub(super) fn comparison(cmp: CmpOp, ty: Type, ftz: bool) -> Option<String> {
    let known = match cmp {
        CmpOp::Eq | CmpOp::Ne => BITS.contains(&ty) || INTS.contains(&ty) || is_compared_float(ty),
        CmpOp::Lt | CmpOp::Le | CmpOp::Gt | CmpOp::Ge => INTS.contains(&ty) || is_compared_float(ty),
        CmpOp::Lo | CmpOp::Ls | CmpOp::Hi | CmpOp::Hs => matches!(ty, U16 | U32 | U64),
        CmpOp::Equ
        | CmpOp::Neu
        | CmpOp::Ltu
        | CmpOp::Leu
        | CmpOp::Gtu
        | CmpOp::Geu
        | CmpOp::Num
        | CmpOp::Nan => is_compared_float(ty),
    };
    if !known {
        return Some(format!("does not compare `.{ty}` with `.{}`", cmp.name()));
    }
    (ftz && !matches!(ty, F32 | F16 | F16x2)).then(|| format!("does not know `.ftz` with `.{ty}`"))
}

const fn is_compared_float(ty: Type) -> bool {
    matches!(ty, F32 | F64 | F16 | F16x2 | Bf16 | Bf16x2)
}

/// What is wrong with a conversion, if anything (PTX ISA, "cvt").
pub(super) fn conversion(cvt: &Cvt) -> Option<String> {
    let Cvt { to, from, rounding, ftz, saturation, relu } = *cvt;
    let scalar = |ty: Type| {
        (ty.is_integer() && !matches!(ty, U4 | S4 | U16x2 | S16x2)) || matches!(ty, F16 | Bf16 | F32 | F64)
    };
    let float = matches!(rounding, Some(CvtRounding::Float(_)));
    let rn = rounding == Some(CvtRounding::Float(Rounding::Rn));
    let nearest_or_zero = rn || rounding == Some(CvtRounding::Float(Rounding::Rz));
    let fp8 = matches!(to, E4m3x2 | E5m2x2);
    let known = match (to, from) {
        (F16x2 | Bf16x2, F32) => nearest_or_zero,
        (E4m3x2 | E5m2x2, F32 | F16x2) => rn && saturation == CvtSaturation::SatFinite,
        (F16x2, E4m3x2 | E5m2x2) => rn,
        (Tf32, F32) => nearest_or_zero || rounding == Some(CvtRounding::Rna),
        (to, from) if scalar(to) && scalar(from) => match (to.is_float(), from.is_float()) {
            (false, false) => rounding.is_none(),
            (false, true) => matches!(rounding, Some(CvtRounding::Integer(_))),
            (true, false) => float,
            // Narrowing rounds; what fits may round to an integral value of the same type.
            (true, true) if to.bits() < from.bits() => float,
            (true, true) if to == from => !float,
            (true, true) if matches!((to, from), (F16, Bf16) | (Bf16, F16)) => float,
            (true, true) => rounding.is_none() || (to == Bf16 || from == Bf16),
        },
        _ => return Some(format!("does not convert `.{from}` to `.{to}`")),
    };
    if !known {
        let written = if rounding.is_some() { "this rounding" } else { "no rounding" };
        return Some(format!("from `.{from}` to `.{to}` does not go with {written}"));
    }
    if ftz && to != F32 && from != F32 {
        return Some("knows `.ftz` with `.f32` only".to_owned());
    }
    if relu && !(matches!(to, F16 | Bf16 | F16x2 | Bf16x2 | Tf32) || fp8) {
        return Some(format!("does not know `.relu` to `.{to}`"));
    }
    let finite = saturation == CvtSaturation::SatFinite;
    (finite && !(fp8 || matches!(to, Tf32 | F16 | Bf16 | F16x2 | Bf16x2)))
        .then(|| format!("does not know `.satfinite` to `.{to}`"))
}
